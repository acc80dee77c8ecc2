"""Basic modules that do not depend on runs: errors, configuration, TLS, tables, memory, background tasks, protobuf."""
