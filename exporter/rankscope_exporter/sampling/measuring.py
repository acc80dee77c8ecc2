"""What is measured, as far as it may change while training runs: a document in, quantities out. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from rankscope_exporter.config import MonitorConfig, in_our_words
from rankscope_exporter.errors import ConfigError
from rankscope_exporter.quantities import Quantity, select_quantities
from rankscope_exporter.quantities.base import QuantityOptions, Subject
from rankscope_exporter.sampling.ops import chosen_ops
from rankscope_exporter.sampling.schedule import Timing
from rankscope_exporter.sampling.terms import Terms

SWITCH: Final = "dynamic_on"
_ENVIRONMENT: Final = ("serve", "hang_after_seconds", "stacks_signal", "stop_signals", "switch_file", "enabled")
"""Settings that variables may have put over what a file says: a difference need not be a change of the file."""

CHANGEABLE: Final = ("quantities", "options", "every", "times", "ops")
"""Settings that a running monitor takes over; what a document does not name is as it was at attach()."""

_SAID: Final = "remarks"
"""Said when a document takes effect."""

Part = tuple[Quantity, Terms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
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


def measuring_of(document: Mapping[str, Any], base: MonitorConfig, *, on: bool) -> Measuring:
    """Return what `document` asks for, over what was configured; `on` where it does not say. Raises ConfigError."""
    document = in_our_words(document)
    settings = {name: getattr(base, name) for name in CHANGEABLE} | document
    if "quantities" in document and "options" not in document:
        kept = document["quantities"]
        settings["options"] = {name: base.options[name] for name in base.options if name in kept}
    config = MonitorConfig.from_mapping(settings)
    others = {item.name for item in fields(MonitorConfig)} - {*CHANGEABLE, *_ENVIRONMENT, SWITCH, _SAID}
    fixed = tuple(sorted(name for name in others & document.keys() if getattr(config, name) != getattr(base, name)))
    changed = replace(base, **{name: getattr(config, name) for name in (*CHANGEABLE, _SAID)})
    return Measuring(on=config.dynamic_on if SWITCH in document else on, config=changed, fixed=fixed)


def chosen(subject: Subject, config: MonitorConfig, rank: int, *, switched: bool = False) -> list[Part]:
    """Return what this rank measures, and when; what is switched on begins at once, whatever `start_step` says."""
    parts: list[Part] = []
    for quantity_class in select_quantities(config.quantities):
        options = config.options_of(quantity_class)
        if options.ranks is None or rank in options.ranks:
            ops = chosen_ops(config.ops if options.ops is None else options.ops)
            timing = _timing(options, config, switched=switched)
            parts.append((quantity_class(subject, options), Terms(timing, ops)))
    return parts


def _timing(options: QuantityOptions, config: MonitorConfig, *, switched: bool) -> Timing:
    return Timing(
        start_step=None if switched else options.start_step,
        every=config.every if options.every is None else options.every,
        times=config.times if options.times is None else options.times,
    )
