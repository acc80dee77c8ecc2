"""Statistics of tensors: the quantities that select them, the table of a step, and the compiled kernels."""
