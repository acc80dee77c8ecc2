"""Hooks on model and optimizers, the boundaries of steps, and the record of the step that is being measured."""
