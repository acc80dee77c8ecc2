"""What can go wrong before training starts. Later than that nothing of ours is ever raised into training."""

from __future__ import annotations


class RankscopeError(Exception):
    """Root of all errors of the exporter."""


class ConfigError(RankscopeError, ValueError):
    """A setting is wrong; the text names it and what would be right."""


class ServeError(ConfigError):
    """Serving cannot start as configured; the text names the fix."""
