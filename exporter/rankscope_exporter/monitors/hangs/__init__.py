"""Detection of hangs, and the stacks and collectives that explain them."""
