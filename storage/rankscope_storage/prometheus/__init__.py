"""The history as Prometheus requests it: series selected by matchers, with their live names and labels."""
