"""HTTP between a rank and the service: paths, headers, registration, rank ranges."""
