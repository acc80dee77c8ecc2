"""The HTTP server of a rank: exposition, record channel, registration with the service, and the spool."""
