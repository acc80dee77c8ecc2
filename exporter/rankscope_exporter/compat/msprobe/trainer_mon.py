"""`TrainerMon` as scripts of msprobe call it: its constructor, its calls, its configuration file, and its getters.

Construction raises ConfigError for an invalid configuration, and so does `set_monitor`, which is called before training
begins. No call during training raises. Getters return statistics by tag, then by name, as tensors. msprobe's statistics
are over all elements: with a NaN they are NaN here too, with an Inf the norm is Inf. `zeros` is a share. A tensor that
does not exist has no entry.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from rankscope_contract.model.kinds import VALUE_OPS, Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.base.copies import CopiesDoNothing
from rankscope_exporter.base.errors import ConfigError, ErrorBoundary
from rankscope_exporter.compat.msprobe.argument_checks import Attachment, Construction, first_step, wrong_hints
from rankscope_exporter.compat.msprobe.config_translation import translated
from rankscope_exporter.config.loader import read_settings
from rankscope_exporter.config.monitor_config import MonitorConfig, setting_names
from rankscope_exporter.process.identity import place_in, rank_here
from rankscope_exporter.sampling.sampling_config import CHANGEABLE, SWITCH
from rankscope_exporter.sinks.anomaly_file import Anomalies, tag
from rankscope_exporter.statistics.selection import ALL_OPS, FALLBACK, chosen_ops

Metrics = dict[str, dict[str, torch.Tensor]]


class Measured(Protocol):
    """One tensor at one step."""

    @property
    def entry(self) -> PlanEntry:
        """What it is."""
        ...

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Its statistics, None for one that does not exist."""
        ...


def metrics_of(rows: Iterable[Measured], ops: Sequence[str], rank: int) -> Metrics:
    """Return the statistics `ops` of `rows`."""
    found: Metrics = {}
    for row in rows:
        entry = row.entry
        where = {"index": entry.index, "micro_step": entry.micro_step, "vpp_stage": entry.vpp_stage}
        found[tag(entry.kind, entry.tensor, rank, **where)] = {
            op: torch.tensor(statistic(op, row.numbers), dtype=torch.float64, device="cpu") for op in ops
        }
    return found


def statistic(op: str, numbers: Mapping[str, Any]) -> float:
    """Return one statistic over all elements; NaN for what is not known."""
    nans, infs, value = numbers.get("nans") or 0, numbers.get("infs") or 0, numbers.get(op)
    if op in VALUE_OPS and nans:
        return math.nan
    if op in VALUE_OPS and infs:
        return math.inf if op == "norm" else math.nan
    if op == "norm" and numbers.get("numel") == 0:
        return 0.0
    if value is None:
        return math.nan
    if op == "zeros":
        return value / numbers["numel"] if numbers.get("numel") else math.nan
    return float(value)


DYNAMIC_VARIABLE: Final = "DYNAMIC_MONITOR"
_ACTIVATIONS: Final = "activations"


class TrainerMon(CopiesDoNothing):
    """One model's monitor: `TrainerMon("monitor_config.json")`, then `set_monitor(model, optimizer=optimizer)`.

    `monitor` is the Monitor behind it, with all that it can do beside: `log`, `phase`, `switch`, `detach`.
    A copy does nothing, like a copy of the Monitor.
    """

    def __init__(self, config_file_path: str | os.PathLike[str], *positional: Any, **named: Any) -> None:
        """Take `process_group`, `params_have_main_grad` and `opt_ty` as well, by name or in either order."""
        if not isinstance(config_file_path, str | os.PathLike):
            raise ConfigError(
                f"config_file_path is the path of a JSON file, not a {type(config_file_path).__name__}: "
                "settings in Python go to rankscope.Monitor"
            )
        self._said = Construction.of(positional, named)
        self._path = Path(config_file_path)
        self._document = read_settings(self._path)
        self._config = _config_of(self._document, self._path)
        self._optimizer: Any = None
        self._monitor: Monitor | None = None
        self._boundary = ErrorBoundary()
        self._told: dict[str, None] = {}  # what is said once, in order

    def _unattached(self) -> dict[str, Any]:
        return {"_said": Construction(), "_optimizer": None, "_boundary": ErrorBoundary(), "_told": {}}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_config": self._config.without_secrets(), "_document": {}}

    @property
    def monitor(self) -> Monitor | None:
        """The Monitor, once a model is attached."""
        return self._monitor

    @property
    def faults(self) -> int:
        """How many errors were swallowed here; those of the Monitor are its own."""
        return self._boundary.count

    # Attaching.

    def set_monitor(self, *positional: Any, **named: Any) -> None:
        """Attach: `(model, optimizer, grad_acc_steps, tp_group, dp_group, start_iteration)`, or as the manual has it.

        That is `(model, grad_acc_steps, optimizer, dp_group, tp_group, start_iteration)`; names always work.
        """
        if self._refuses("set_monitor()"):
            return
        self._attach("set_monitor", Attachment.of("set_monitor", positional, named))

    def monitor_gnorm_with_ad(self, *positional: Any, **named: Any) -> None:
        """Attach, as older scripts do; the optimizer may have been given to `set_wrapped_optimizer`."""
        if self._refuses("monitor_gnorm_with_ad()"):
            return
        self._deprecated("monitor_gnorm_with_ad", "call set_monitor, which takes the same")
        given = Attachment.of("monitor_gnorm_with_ad", positional, named)
        optimizer = self._optimizer if given.optimizer is None else given.optimizer
        self._optimizer = None  # which the training owns
        self._attach("monitor_gnorm_with_ad", replace(given, optimizer=optimizer))

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Keep the optimizer for `monitor_gnorm_with_ad`."""
        if not self.is_copy:
            self._deprecated("set_wrapped_optimizer", "give the optimizer to set_monitor")
            self._optimizer = optimizer

    def detach(self) -> None:
        """Take every hook away, and publish what is left; the end of the process does it too."""
        if self._monitor is not None:
            self._monitor.detach()

    def _attach(self, call: str, given: Attachment) -> None:
        given.check(call)
        if self._monitor is not None:
            self._tell(f"{call} was called before, and the first model stays: make a TrainerMon for each model")
            return
        for sentence in wrong_hints(self._said, given):
            self._told[sentence] = None
        monitor = Monitor(self._attached_config(), first_step=first_step(given))
        groups = {"dp_group": given.dp_group, "tp_group": given.tp_group, "pp_group": self._said.process_group}
        monitor.attach(given.watched, given.optimizer, **groups)
        self._monitor = monitor
        self._boundary.call("process_group", self._place_in_pipeline, monitor)
        for sentence in self._told:
            monitor.remark(sentence)

    def _attached_config(self) -> MonitorConfig:
        watched = os.environ.get(DYNAMIC_VARIABLE, "").lower() == "true"
        return replace(self._config, switch_file=os.fspath(self._path)) if watched else self._config

    def _place_in_pipeline(self, monitor: Monitor) -> None:
        place, sink = place_in(self._said.process_group), monitor.sink(Anomalies.name)
        if place is not None and isinstance(sink, Anomalies):
            sink.place(*place)

    # Numbers.

    def generate_wgrad_metrics(self, *_: Any) -> tuple[Metrics, Metrics]:
        """Return the statistics of reduced and of unreduced gradients, each by tag, then by name of the statistic.

        Those of the step under way as far as it has come, else of the last measured one. Waits for the device.
        """
        return self._numbers((Kind.GRAD_REDUCED,), (Kind.GRAD_UNREDUCED,))

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """Return the statistics of activations and of their gradients, in the same way."""
        return self._numbers((Kind.ACT_IN, Kind.ACT_OUT), (Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT))

    def _numbers(self, first: Sequence[str], second: Sequence[str]) -> tuple[Metrics, Metrics]:
        found: tuple[Metrics, Metrics] | None = self._boundary.call("a getter", self._read_numbers, first, second)
        return ({}, {}) if found is None else found

    def _read_numbers(self, first: Sequence[str], second: Sequence[str]) -> tuple[Metrics, Metrics]:
        rows = () if self._monitor is None else self._monitor.current(*first, *second)  # one look: both of one step
        ops, rank = self.ops, rank_here(os.environ)
        ones, others = ([row for row in rows if row.entry.kind in kinds] for kinds in (first, second))
        return metrics_of(ones, ops, rank), metrics_of(others, ops, rank)

    # Changes while training runs.

    @property
    def ops(self) -> list[str]:
        """The statistics that are published and returned."""
        now = self._measured_now()
        return _names(self._config.ops if now is None else now["ops"])

    @ops.setter
    def ops(self, names: Sequence[str]) -> None:
        if self.is_copy:
            return
        self._deprecated("monitor.ops = […]", "call monitor.monitor.switch({'ops': […]}), or edit the watched file")
        self._boundary.call("ops", self._change_ops, names)

    def _change_ops(self, names: Sequence[str]) -> None:
        try:
            chosen_ops(names)
        except ValueError as error:
            self._tell(f"ops stay {self.ops}: {error}")
            return
        self._config = replace(self._config, ops=tuple(names))
        self._switch({"ops": list(names)})

    def reload_xy(self, xy_distribution: bool = False) -> None:  # noqa: FBT001, FBT002 - as the tool has it
        """Switch activations on or off, with the targets of the configuration."""
        if self.is_copy:
            return
        self._deprecated("reload_xy", f"set {DYNAMIC_VARIABLE}=True and edit the file, or call monitor.monitor.switch")
        self._boundary.call("reload_xy()", self._reload_activations, bool(xy_distribution))

    def _reload_activations(self, on: bool) -> None:  # noqa: FBT001 - one thing to say
        self._document = {**self._document, "xy_distribution": on}
        self._config = replace(_config_of(self._document, self._path), ops=self._config.ops)
        now = self._measured_now()
        if now is None:
            return
        quantities = [name for name in now["quantities"] if name != _ACTIVATIONS]
        options = {name: told for name, told in now["options"].items() if name != _ACTIVATIONS}
        if on:
            quantities.append(_ACTIVATIONS)
            options |= {name: told for name, told in self._config.options.items() if name == _ACTIVATIONS}
        self._switch({"quantities": quantities, "options": options})

    def _switch(self, changes: Mapping[str, Any]) -> None:
        now = self._measured_now()
        if self._monitor is not None and now is not None:
            self._monitor.switch({**{name: now[name] for name in CHANGEABLE}, **changes}, on=now[SWITCH])

    def _measured_now(self) -> Mapping[str, Any] | None:
        """Return what is measured, or will be once what was asked for has taken place; None while not attached."""
        state = {} if self._monitor is None else self._monitor.measuring
        return (state["to_come"] or [state])[-1] if state else None

    # What is said.

    def _deprecated(self, name: str, instead: str) -> None:
        self._tell(f"{name} is deprecated: {instead}")

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told[sentence] = None
            if self._monitor is not None:
                self._monitor.remark(sentence)


def _config_of(document: Mapping[str, Any], path: Path) -> MonitorConfig:
    try:
        return MonitorConfig.from_mapping(translated(document, setting_names()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _names(ops: Sequence[str]) -> list[str]:
    """Return the statistics that `ops` name, in that order."""
    chosen = chosen_ops(ops)
    return [op for op in dict.fromkeys("mean" if op == "id" else op for op in ops) if op in ALL_OPS] or [
        op for op in (FALLBACK,) if op in chosen
    ]
