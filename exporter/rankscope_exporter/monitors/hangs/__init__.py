"""Detection of a training that hangs, and the stacks and collectives that explain it."""
