"""Errors that are raised before training starts. After `attach` nothing of ours is raised into training."""

from __future__ import annotations


class RankscopeError(Exception):
    """Root of all errors of the exporter."""


class ConfigError(RankscopeError, ValueError):
    """A setting is wrong; the text names it and what would be right."""


class ServeError(ConfigError):
    """Serving cannot start as configured; the text names the fix."""


class CountError(RankscopeError, ValueError):
    """The FLOPs of a model cannot be counted; the text names the reason and the fix."""
