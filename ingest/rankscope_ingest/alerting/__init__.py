"""From thousands of anomalies to the few messages a person wants."""
