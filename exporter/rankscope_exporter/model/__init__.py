"""Names of parameters and modules, selection by name, and search for tensors in arguments and results of modules."""
