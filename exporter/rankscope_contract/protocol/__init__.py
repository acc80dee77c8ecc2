"""HTTP protocol between a rank and the service: paths, headers, and the registration."""
