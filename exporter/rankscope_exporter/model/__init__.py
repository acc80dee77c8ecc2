"""Names of parameters and modules, selection by name, and the tensors inside arguments and results."""
