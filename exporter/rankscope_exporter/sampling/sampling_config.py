"""The sampling configuration as far as it may change while training runs: a document in, quantities and schedules out.

Pure. A schedule decides at which steps a quantity is sampled; it is called once for each step, in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.config.monitor_config import MonitorConfig, own_settings
from rankscope_exporter.quantities import Quantity, select_quantities
from rankscope_exporter.quantities.base import QuantityOptions
from rankscope_exporter.statistics.selection import EVERY_OP, Ops, chosen_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """From `start_step` on every n-th step, `times` times; without them from the first step, and without end."""

    start_step: int | None = None
    every: int = 1
    times: int | None = None


class Schedule:
    """Counts the steps of one quantity. The first step at or behind `start_step` is measured, then every n-th."""

    def __init__(self, timing: Timing) -> None:
        self.stretch = 1
        """Of the steps that are due every so many-th is measured; times are counted as ever."""
        self._timing = timing
        self._seen = 0
        self._taken = 0

    @property
    def is_over(self) -> bool:
        """Return whether no further step will be measured."""
        return self._timing.times is not None and self._taken >= self._timing.times

    @property
    def period(self) -> int:
        """Return how many steps lie between two that are measured."""
        return self._timing.every * self.stretch

    def begins(self, step: int) -> bool:
        """Note that step number `step` begins; return whether it is due. Numbers may jump, steps are counted."""
        timing = self._timing
        if self.is_over or (timing.start_step is not None and not self._seen and step < timing.start_step):
            return False
        due = self._seen % self.period == 0
        self._seen += 1
        return due

    def taken(self) -> None:
        """Note that a step that was due has been measured."""
        self._taken += 1


@dataclass(frozen=True, slots=True)
class QuantitySampling:
    """On which steps a quantity is measured, and which of its statistics leave the rank."""

    timing: Timing = field(default_factory=Timing)
    ops: Ops = EVERY_OP


SWITCH: Final = "dynamic_on"
_ENVIRONMENT: Final = ("serve", "hang_after_seconds", "stacks_signal", "stop_signals", "switch_file", "enabled")
"""Settings that variables may have put over what a file says: a difference need not be a change of the file."""

CHANGEABLE: Final = ("quantities", "options", "every", "times", "ops")
"""Settings that a running monitor takes over; what a document does not name is as it was at attach()."""

_SAID: Final = "remarks"
"""Said when a document takes effect."""

Part = tuple[Quantity, QuantitySampling]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """What is measured from some step on."""

    on: bool
    config: MonitorConfig
    fixed: tuple[str, ...] = ()
    """Settings that the document changes and that only a new start takes over."""

    def shown(self) -> dict[str, Any]:
        """Return it as /config and the event show it."""
        settings = {name: getattr(self.config, name) for name in CHANGEABLE}
        return {SWITCH: self.on, **json.loads(json.dumps(settings, default=str))}


def as_text(document: Mapping[str, Any]) -> str:
    """Return the one text of a document by which ranks tell whether two are the same. Raises ConfigError."""
    try:
        return json.dumps(document, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"what is measured has no JSON form: {error}") from error


def sampling_config_from(document: Mapping[str, Any], base: MonitorConfig, *, on: bool) -> SamplingConfig:
    """Return what `document` asks for, over what was configured; `on` where it does not say. Raises ConfigError."""
    document = own_settings(document)
    settings = {name: getattr(base, name) for name in CHANGEABLE} | document
    if "quantities" in document and "options" not in document:
        kept = document["quantities"]
        settings["options"] = {name: base.options[name] for name in base.options if name in kept}
    config = MonitorConfig.from_mapping(settings)
    others = {item.name for item in fields(MonitorConfig)} - {*CHANGEABLE, *_ENVIRONMENT, SWITCH, _SAID}
    fixed = tuple(sorted(name for name in others & document.keys() if getattr(config, name) != getattr(base, name)))
    changed = replace(base, **{name: getattr(config, name) for name in (*CHANGEABLE, _SAID)})
    return SamplingConfig(on=config.dynamic_on if SWITCH in document else on, config=changed, fixed=fixed)


def chosen(monitored: MonitoredModel, config: MonitorConfig, rank: int, *, switched: bool = False) -> list[Part]:
    """Return what this rank measures, and when; what is switched on begins at once, whatever `start_step` says."""
    parts: list[Part] = []
    for quantity_class in select_quantities(config.quantities):
        options = config.options_of(quantity_class)
        if options.ranks is None or rank in options.ranks:
            ops = chosen_ops(config.ops if options.ops is None else options.ops)
            timing = _timing(options, config, switched=switched)
            parts.append((quantity_class(monitored, options), QuantitySampling(timing, ops)))
    return parts


def _timing(options: QuantityOptions, config: MonitorConfig, *, switched: bool) -> Timing:
    return Timing(
        start_step=None if switched else options.start_step,
        every=config.every if options.every is None else options.every,
        times=config.times if options.times is None else options.times,
    )
