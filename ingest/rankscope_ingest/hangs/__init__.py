"""Runs that stand still: noticed, asked for their stacks, told of."""
