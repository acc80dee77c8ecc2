"""HTTP between a rank and the service, TLS of both sides, escaping of names, and the spool on disk."""
