"""Trainer callbacks at the import paths for users, such as `rankscope.integrations.lightning`."""
