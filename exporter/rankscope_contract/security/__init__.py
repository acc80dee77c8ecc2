"""TLS, web configuration files, masking of secrets, and escaping of names."""
