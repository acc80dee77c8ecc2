"""The lowest layer: errors and the error boundary, checks of settings, tracers, and the behaviour of copies."""
