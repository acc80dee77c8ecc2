"""Lowest layer of the exporter: errors, checks of settings, detection of tracers, objects whose copies do nothing."""
