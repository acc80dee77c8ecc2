"""Trainer callbacks under the import path that users see, such as `rankscope.integrations.lightning`."""
