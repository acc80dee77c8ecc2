"""History as Prometheus asks for it: series by matchers, under the names and labels that they have live."""
