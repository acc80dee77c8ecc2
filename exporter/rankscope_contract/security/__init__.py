"""TLS, access configuration, redaction of secrets, and escaping of names."""
