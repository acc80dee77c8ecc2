"""TLS, web configuration files, masking of secrets, and escaping of user-defined names."""
