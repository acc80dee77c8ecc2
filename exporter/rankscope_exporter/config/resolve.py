"""Converts the configuration of a script to a MonitorConfig, and exports a configuration with masked secrets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from rankscope_contract.model.redaction import redacted
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.identity import script_commit

DYNAMIC_VARIABLE: Final = "DYNAMIC_MONITOR"
"""Name of the environment variable with which the configuration file is also the switch file."""

Given = MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def config_of(given: Given) -> MonitorConfig:
    """Return the configuration of a script as a MonitorConfig. Raises ConfigError if it is invalid.

    With the environment variable DYNAMIC_MONITOR=true, the configuration file is also the switch file.
    """
    if given is None:
        return MonitorConfig()
    if isinstance(given, MonitorConfig):
        return given
    if isinstance(given, Mapping):
        return MonitorConfig.from_mapping(given)
    try:
        path = os.fspath(given)
    except TypeError as error:
        raise ConfigError(f"the configuration must be a MonitorConfig, a mapping or a path, not {given!r}") from error
    config = MonitorConfig.from_file(path)
    is_watched = config.switch_file is None and os.environ.get(DYNAMIC_VARIABLE, "").lower() == "true"
    return replace(config, switch_file=path) if is_watched else config


def public_settings(config: MonitorConfig) -> dict[str, Any]:
    """Return the configuration, secrets masked, as GET /config returns it and the service stores it."""
    settings = asdict(config)
    settings["rules"] = [{"rule_name": type(rule).__name__, "args": asdict(rule)} for rule in config.rules]
    shown: dict[str, Any] = redacted({**settings, "argv": sys.argv})
    return shown | {"git_commit": script_commit(sys.argv[0])}


def steps_from(name: str, value: Any, *, at_least: int) -> int:
    """Return `value` if it is a number of steps of at least `at_least`; else raise ConfigError, which names `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} must be a whole number of steps of at least {at_least}, not {value!r}")
    return value


def callable_or_none(name: str, value: Any) -> Any:
    """Return `value` if it is a function or None. Otherwise raise ConfigError, which names the argument `name`."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function of one argument, not {value!r}")
    return value
