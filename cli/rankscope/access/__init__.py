"""What commands read: stores, logs of other tools, and the service."""
