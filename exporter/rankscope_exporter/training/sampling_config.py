"""The sampling configuration, which may change during training.

The module converts a JSON document of settings to quantities and schedules. It is pure: it uses neither files nor
threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.config.monitor_config import MonitorConfig, own_settings
from rankscope_exporter.measure.quantities import Quantity, select_quantities
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.records.plan import EVERY_OP, Ops, chosen_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantitySampling:
    """The sampled steps of a quantity, and the statistics `ops` that the rank publishes for it.

    Every n-th step from `start_step` on is sampled, until `times` steps were sampled. If `start_step` is None, sampling
    begins with the first step. If `times` is None, it does not end.
    """

    start_step: int | None = None
    every: int = 1
    times: int | None = None
    ops: Ops = EVERY_OP


SWITCH: Final = "dynamic_on"
_ENVIRONMENT: Final = ("serve", "hang_after_seconds", "stacks_signal", "stop_signals", "switch_file", "enabled")
"""Settings that environment variables may override, so that they can differ from an unchanged switch file.

A difference in one of them is therefore not reported as a change of the file.
"""

CHANGEABLE: Final = ("quantities", "options", "every", "times", "ops")
"""Settings that can be changed while the monitor runs.

If a sampling document (JSON) does not contain one of them, the setting has the value that it had at attach().
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
    """Names of settings that the sampling document changes, but that change only when training is restarted."""

    def document(self) -> dict[str, Any]:
        """Return the changeable settings as JSON values, for the HTTP path /config and for events."""
        settings = {name: getattr(self.config, name) for name in CHANGEABLE}
        return {SWITCH: self.on, **json.loads(json.dumps(settings, default=str))}


def document_text(document: Mapping[str, Any]) -> str:
    """Return canonical JSON: equal documents have equal texts. Raises ConfigError if it is not possible."""
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
            sampling = QuantitySampling(
                start_step=None if ignore_start else options.start_step,
                every=config.every if options.every is None else options.every,
                times=config.times if options.times is None else options.times,
                ops=chosen_ops(config.ops if options.ops is None else options.ops),
            )
            parts.append((quantity_class(monitored, options), sampling))
    return parts
