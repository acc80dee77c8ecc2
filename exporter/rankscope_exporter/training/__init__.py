"""Hooks on model and optimizers, boundaries of steps, the steps that are sampled, and the record of the open step."""
