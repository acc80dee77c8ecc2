"""Start of the service, wiring of its parts, periodic jobs, and drain."""
