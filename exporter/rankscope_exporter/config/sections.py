"""Sections of the configuration: `serve`, `throughput`, `hardware` and `capture`.

A dataclass validates each section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final

from rankscope_exporter.measure.quantities import select_quantities
from rankscope_exporter.monitors.throughput import ThroughputConfig
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.validation import Checked, at_least, check_keys, number, table, validate
from rankscope_exporter.publish.serving_config import ServeConfig

_SECONDS: Final = number("a number of seconds of at least 0", 0, advice="; 0 disables the readings")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """Settings of the thread that reads hardware metrics of the rank's GPU, process and machine."""

    every_seconds: Annotated[float, _SECONDS] = 5.0
    """Seconds between two readings of the hardware; 0 disables the readings."""

    def __post_init__(self) -> None:
        validate(self, ConfigError, "hardware.")


TABLES: Final[Mapping[str, type[Any]]] = {
    "serve": ServeConfig,
    "throughput": ThroughputConfig,
    "hardware": HardwareConfig,
}


def options_from(cls: type[Any], value: Any, name: str, advice: str = "") -> Any:
    """Return the settings in the table `value` as an object of the dataclass `cls`, which validates them.

    If `value` is such an object, it is returned. Raises ConfigError, whose text names the table `name` and ends with
    `advice` if `value` is not a table.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings, not {value!r}{advice}")
    check_keys(value, {item.name for item in fields(cls)}, f"{name}.")
    try:
        return cls(**value)
    except ConfigError:
        raise
    except ValueError as error:  # its text names only the setting
        raise ConfigError(f"{name}: {error}") from error


def check_option_tables(options: Mapping[str, Any], quantities: Sequence[str], prefix: str = "") -> None:
    """Raise ConfigError if `options` has a table for a quantity that is not one of `quantities`."""
    for name in options:
        if name not in quantities:
            select_quantities([name])  # names the nearest one
            raise ConfigError(f"{prefix}options.{name} has no effect: add {name!r} to {prefix}quantities")


ALL: Final = "*"
OptionTables = Annotated[Mapping[str, Mapping[str, Any]], table("a table with one table for each quantity")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Settings of captures.

    If one of `rules` fires on any rank, all ranks measure `quantities` at each of the next `steps` steps.
    """

    rules: tuple[str, ...] = (ALL,)
    """Names of the rules whose firing starts a capture; "*" means all rules."""
    quantities: Annotated[tuple[str, ...], Checked(select_quantities)] = ("activations", "gradients", "parameters")
    """Names of the quantities that are measured in addition during a capture."""
    options: OptionTables = field(default_factory=dict)
    """Options of quantities during a capture, by name of the quantity.

    By default, a quantity has the same options as outside of captures.
    """
    steps: Annotated[int, at_least(1)] = 5
    cooldown_steps: Annotated[int, at_least(0)] = 100
    """Number of steps after a capture in which firings do not start another capture."""
    max_captures: Annotated[int, at_least(1)] = 10
    """Maximum number of captures per process. Without it, a permanently broken run would be measured at every step."""
    flight_record: bool = True
    """True records the latest collectives of each rank at a capture, if there is a process group."""

    def __post_init__(self) -> None:
        given: object = self.rules
        if given == ALL:
            object.__setattr__(self, "rules", (ALL,))
        validate(self, ConfigError, "capture.")
        check_option_tables(self.options, self.quantities, "capture.")

    @classmethod
    def of(cls, given: Any) -> CaptureConfig | None:
        """Return the capture settings in the value of the setting `capture`; None if captures are disabled.

        Raises ConfigError if the value is invalid.
        """
        return None if given is None else options_from(cls, given, "capture", "; write {} for the defaults")

    def chooses(self, rule: str | None) -> bool:
        return ALL in self.rules or rule in self.rules

    def settings(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the sampling settings during a capture; `options` are those of quantities outside of captures."""
        own = {name: options[name] for name in self.quantities if name in options}
        return {"quantities": self.quantities, "options": {**own, **self.options}, "every": 1, "times": None}
