"""Start the service, connect its components, run its periodic jobs, and drain it before it stops."""
