"""The stored history in the form of Prometheus: series that matchers select, with the names and labels of live data."""
