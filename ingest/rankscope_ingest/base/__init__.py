"""Modules that do not depend on runs: errors, configuration, TLS, table schemas, memory, background tasks, protobuf."""
