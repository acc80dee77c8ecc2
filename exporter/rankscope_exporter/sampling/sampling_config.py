"""The sampling configuration, which may change during training: converts a document to quantities and schedules.

The module is pure: it uses neither files nor threads.
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
from rankscope_exporter.statistics.selection import EVERY_OP, Ops, chosen_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The steps to sample: every n-th step from `start_step` on, until `times` steps were sampled.

    If `start_step` is None, sampling begins with the first step. If `times` is None, it does not end.
    """

    start_step: int | None = None
    every: int = 1
    times: int | None = None


class Schedule:
    """Decides at which steps one quantity is sampled. `begins` must be called once for each step, in order.

    The first sampled step is the first one with a number of at least `start_step`. After it, every n-th step is
    sampled.
    """

    def __init__(self, timing: Timing) -> None:
        self.stretch = 1
        """Factor by which the sampling interval is multiplied.

        It does not change the number of sampled steps, `times`.
        """
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
        """Count step number `step`, which begins; return whether it is selected for sampling.

        Step numbers may have gaps.
        """
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
    """The steps at which a quantity is measured, and the statistics that the rank publishes for it."""

    timing: Timing = field(default_factory=Timing)
    ops: Ops = EVERY_OP


SWITCH: Final = "dynamic_on"
_ENVIRONMENT: Final = ("serve", "hang_after_seconds", "stacks_signal", "stop_signals", "switch_file", "enabled")
"""Settings that environment variables may override, so that they can differ from an unchanged switch file.

A difference in one of them is therefore not reported as a change of the file.
"""

CHANGEABLE: Final = ("quantities", "options", "every", "times", "ops")
"""Settings that can be changed while the monitor runs.

If a document does not contain one of them, the setting has the value that it had at attach().
"""

_REMARKS: Final = "remarks"
"""The name of the setting that contains notices about a sampling document.

The notices are published when the document takes effect.
"""

Part = tuple[Quantity, QuantitySampling]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """A sampling configuration. If `on` is false, nothing is measured."""

    on: bool
    config: MonitorConfig
    fixed: tuple[str, ...] = ()
    """Names of the settings that the document changes, but that take effect only after a restart of the training."""

    def document(self) -> dict[str, Any]:
        """Return the changeable settings as JSON values, for the HTTP path /config and for events."""
        settings = {name: getattr(self.config, name) for name in CHANGEABLE}
        return {SWITCH: self.on, **json.loads(json.dumps(settings, default=str))}


def document_text(document: Mapping[str, Any]) -> str:
    """Return the canonical JSON text of a document: equal documents have equal texts.

    Raises ConfigError if the document cannot be represented as JSON.
    """
    try:
        return json.dumps(document, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the sampling configuration cannot be written as JSON: {error}") from error


def sampling_config_from(document: Mapping[str, Any], base: MonitorConfig, *, on: bool) -> SamplingConfig:
    """Return the sampling configuration that results when `document` changes settings of the configuration `base`.

    If the document does not contain the switch `dynamic_on`, the value of `on` is used. Raises ConfigError if the
    document is invalid.
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

    If `ignore_start` is true, the option `start_step` has no effect. Quantities that are switched on during training
    are then sampled immediately.
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
