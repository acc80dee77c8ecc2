"""The lowest layer of the exporter: errors, checks of settings, detection of tracers, and inert copies."""
