"""The registry of targets, and the tasks that poll them."""
