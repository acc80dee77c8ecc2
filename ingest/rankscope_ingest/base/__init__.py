"""Modules without knowledge of runs: errors, configuration, TLS, table schemas, memory, background tasks, protobuf."""
