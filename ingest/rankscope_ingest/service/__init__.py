"""Start of the service, wiring of its parts, periodic work, drain."""
