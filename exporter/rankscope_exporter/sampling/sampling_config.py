"""The part of the configuration that may change during training: from a document to quantities and schedules. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.config.monitor_config import MonitorConfig, own_settings
from rankscope_exporter.quantities import Quantity, select_quantities
from rankscope_exporter.statistics.selection import EVERY_OP, Ops, chosen_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Sample every n-th step from `start_step` on, `times` times. None: from the first step, and without an end."""

    start_step: int | None = None
    every: int = 1
    times: int | None = None


class Schedule:
    """Decides at which steps one quantity is sampled. `begins` is called once for each step, in order.

    The first step with a number of at least `start_step` is sampled, then every n-th step.
    """

    def __init__(self, timing: Timing) -> None:
        self.stretch = 1
        """Factor by which the sampling interval is multiplied. `times` still counts sampled steps."""
        self._timing = timing
        self._seen = 0
        self._sampled = 0

    @property
    def is_over(self) -> bool:
        """True if no further step will be sampled."""
        return self._timing.times is not None and self._sampled >= self._timing.times

    @property
    def period(self) -> int:
        """The number of steps from one sampled step to the next."""
        return self._timing.every * self.stretch

    def begins(self, step: int) -> bool:
        """Count step number `step`, which begins; return whether it is sampled. Step numbers may have gaps."""
        timing = self._timing
        if self.is_over or (timing.start_step is not None and not self._seen and step < timing.start_step):
            return False
        is_due = self._seen % self.period == 0
        self._seen += 1
        return is_due

    def sampled(self) -> None:
        """Count a step at which the quantity was measured."""
        self._sampled += 1


@dataclass(frozen=True, slots=True)
class QuantitySampling:
    """The steps at which a quantity is measured, and the statistics of it that leave the rank."""

    timing: Timing = field(default_factory=Timing)
    ops: Ops = EVERY_OP


SWITCH: Final = "dynamic_on"
_ENVIRONMENT: Final = ("serve", "hang_after_seconds", "stacks_signal", "stop_signals", "switch_file", "enabled")
"""Settings that environment variables may override: a different value need not be a change of the file."""

CHANGEABLE: Final = ("quantities", "options", "every", "times", "ops")
"""Settings that a running monitor adopts. Settings that a document does not name keep their value of attach()."""

_REMARKS: Final = "remarks"
"""Notices of a document, which are published when it takes effect."""

Part = tuple[Quantity, QuantitySampling]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """A sampling configuration. If `on` is false, nothing is measured."""

    on: bool
    config: MonitorConfig
    fixed: tuple[str, ...] = ()
    """Settings that the document changes and that take effect only after a restart."""

    def document(self) -> dict[str, Any]:
        """Return the settings as JSON has them, for /config and for events."""
        settings = {name: getattr(self.config, name) for name in CHANGEABLE}
        return {SWITCH: self.on, **json.loads(json.dumps(settings, default=str))}


def document_text(document: Mapping[str, Any]) -> str:
    """Return the canonical JSON text of a document: equal documents have equal texts. Raises ConfigError."""
    try:
        return json.dumps(document, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the sampling configuration cannot be written as JSON: {error}") from error


def sampling_config_from(document: Mapping[str, Any], base: MonitorConfig, *, on: bool) -> SamplingConfig:
    """Return the configuration `base` with the changes of `document`. Raises ConfigError.

    `on` applies if the document does not contain the switch itself.
    """
    document = own_settings(document)
    settings = {name: getattr(base, name) for name in CHANGEABLE} | document
    if "quantities" in document and "options" not in document:
        kept = document["quantities"]
        settings["options"] = {name: base.options[name] for name in base.options if name in kept}
    config = MonitorConfig.from_mapping(settings)
    others = {item.name for item in fields(MonitorConfig)} - {*CHANGEABLE, *_ENVIRONMENT, SWITCH, _REMARKS}
    fixed = tuple(sorted(name for name in others & document.keys() if getattr(config, name) != getattr(base, name)))
    changed = replace(base, **{name: getattr(config, name) for name in (*CHANGEABLE, _REMARKS)})
    return SamplingConfig(on=config.dynamic_on if SWITCH in document else on, config=changed, fixed=fixed)


def selected_parts(
    monitored: MonitoredModel, config: MonitorConfig, rank: int, *, ignore_start: bool = False
) -> list[Part]:
    """Return the quantities that this rank measures, with their schedules.

    With `ignore_start`, `start_step` has no effect: quantities that are switched on later are sampled immediately.
    """
    parts: list[Part] = []
    for quantity_class in select_quantities(config.quantities):
        options = config.options_of(quantity_class)
        if options.ranks is None or rank in options.ranks:
            timing = Timing(
                start_step=None if ignore_start else options.start_step,
                every=config.every if options.every is None else options.every,
                times=config.times if options.times is None else options.times,
            )
            ops = chosen_ops(config.ops if options.ops is None else options.ops)
            parts.append((quantity_class(monitored, options), QuantitySampling(timing, ops)))
    return parts
