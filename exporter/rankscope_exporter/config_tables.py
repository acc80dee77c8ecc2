"""Settings of a monitor that are tables of their own, each checked by the dataclass of the part that it configures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from rankscope_exporter.checks import check_keys
from rankscope_exporter.errors import ConfigError
from rankscope_exporter.hardware.config import HardwareConfig
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.throughput.config import ThroughputConfig

TABLES: Final[Mapping[str, type[Any]]] = {
    "serve": ServeConfig,
    "throughput": ThroughputConfig,
    "hardware": HardwareConfig,
}


def tables_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables among the settings of a parsed document, each as its dataclass. Raises ConfigError."""
    return {name: _table(name, settings[name], cls) for name, cls in TABLES.items() if name in settings}


def check_tables(config: object) -> None:
    """Raise ConfigError where a table of a configuration is of another type."""
    for name, cls in TABLES.items():
        value = getattr(config, name)
        if not isinstance(value, cls):
            raise ConfigError(f"{name} is a {cls.__name__}, not {value!r}")


def _table(name: str, value: Any, cls: type[Any]) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a table of settings, not {value!r}")
    check_keys(dict(value), {item.name for item in fields(cls)}, f"{name}.")
    return cls(**value)
