"""The data that commands read: stores, logs of other tools, and the service."""
