"""The registered targets of the service, and their poll loops."""
