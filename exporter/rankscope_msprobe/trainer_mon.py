"""`TrainerMon`, the class that scripts for msprobe use: constructor, methods, configuration file and getters.

The constructor and `set_monitor`, which are called before training begins, raise ConfigError for invalid arguments. No
call during training raises an exception.

Getters return statistics as tensors, by msprobe's tag of the measured tensor and by name of the statistic. As in
msprobe, statistics are over all elements. If a tensor contains a NaN, its statistics are NaN. If it contains an Inf,
its norm is Inf. The statistic `zeros` is the share of the elements that count as zero. A tensor that does not exist
has no entry.

Parses the arguments of `TrainerMon` and `set_monitor`, and compares hints of the script with the model.

For `set_monitor`, msprobe's manual prints the arguments in the order `(model, grad_acc_steps, optimizer, dp_group,
tp_group, start_iteration)`. msprobe's code accepts the order `(model, optimizer, grad_acc_steps, tp_group, dp_group,
start_iteration)`. The constructor of msprobe's `TrainerMon` has had two orders. This module finds the order in a call
by the types of the arguments. Hints such as `opt_ty` are only compared with the model and the optimizer: wrong hints
are reported, and no result depends on a hint.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from rankscope_contract.model.kinds import OPS, VALUE_OPS, Kind
from rankscope_exporter.adapters import are_chunks
from rankscope_exporter.adapters.process_group import place_in, rank_here
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.config.loader import read_settings
from rankscope_exporter.config.monitor_config import DYNAMIC_VARIABLE, MonitorConfig, setting_names
from rankscope_exporter.process.errors import ConfigError, ErrorBoundary
from rankscope_exporter.process.inert import CopiesDoNothing
from rankscope_exporter.publish.sinks.memory import Row
from rankscope_exporter.records.plan import ALL_OPS, FALLBACK, chosen_ops
from rankscope_exporter.training.sampling_config import CHANGEABLE, SWITCH
from rankscope_msprobe.configuration import translated
from rankscope_msprobe.files.csv_layout import anomaly_tag
from rankscope_msprobe.sinks.csv_files import Anomalies, Csv
from rankscope_msprobe.sinks.tensorboard import TensorBoard

AS_IN_THE_MANUAL: Final = ("grad_acc_steps", "optimizer", "dp_group", "tp_group", "start_iteration")
AS_IN_THE_CODE: Final = ("optimizer", "grad_acc_steps", "tp_group", "dp_group", "start_iteration")
_CONSTRUCTION_NAMES: Final = ("process_group", "params_have_main_grad", "opt_ty")
_MISPRINTED: Final = {"param_have_main_grad": "params_have_main_grad"}
"""Misspelled names of arguments, with the correct names. msprobe's manual contains both spellings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """The arguments of `TrainerMon` that follow the configuration file. An argument that the script omits is None."""

    process_group: Any = None
    params_have_main_grad: bool | None = None
    opt_ty: str | None = None

    @classmethod
    def of(cls, positional: Sequence[Any], named: Mapping[str, Any]) -> Construction:
        """Parse the arguments of `TrainerMon` and return them by name. Raises ConfigError if an argument is invalid."""
        given = {_MISPRINTED.get(name, name): value for name, value in named.items()}
        places = list(_CONSTRUCTION_NAMES)
        for value in positional:
            place = _place_of(value, places)
            # Older releases had no group, so a flag or a name may come first: its type decides which argument it is.
            _put(given, place, value, "TrainerMon")
            del places[: places.index(place) + 1]
        _check_names(given, _CONSTRUCTION_NAMES, "TrainerMon")
        made = cls(**given)
        group = made.process_group
        if group is not None and not callable(getattr(group, "rank", None)):
            raise ConfigError(f"process_group must be the process group of the pipeline or None, not {group!r}")
        if not isinstance(made.params_have_main_grad, bool | None):
            raise ConfigError(f"params_have_main_grad must be True or False, not {made.params_have_main_grad!r}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The arguments of `TrainerMon.set_monitor`, by name."""

    model: Any
    optimizer: Any = None
    grad_acc_steps: Any = 1
    dp_group: Any = None
    tp_group: Any = None
    start_iteration: Any = 0

    @classmethod
    def of(cls, call: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Attachment:
        """Parse the arguments of the function `call` and return them by name.

        The positional arguments may be in the order of msprobe's manual or of msprobe's code. Raises ConfigError if an
        argument is invalid.
        """
        given = dict(named)
        names: tuple[str, ...] = ("model",)
        if len(positional) > 1:
            is_count = isinstance(positional[1], float) or _whole(positional[1]) is not None
            names += AS_IN_THE_MANUAL if is_count else AS_IN_THE_CODE
        if len(positional) > len(names):
            raise ConfigError(
                f"{call} takes {len(names)} arguments by position, not {len(positional)}: pass them by name"
            )
        for name, value in zip(names, positional, strict=False):
            _put(given, name, value, call)
        _check_names(given, ("model", *AS_IN_THE_CODE), call)
        if "model" not in given:
            raise ConfigError(f"{call} needs the model: call {call}(model, optimizer=optimizer)")
        return cls(**given)

    @property
    def chunks(self) -> Sequence[Any]:
        """Return the model chunks: one unless the pipeline has virtual stages on this rank."""
        return self.model if isinstance(self.model, list | tuple) else [self.model]

    @property
    def watched(self) -> torch.nn.Module | list[torch.nn.Module]:
        """Return the modules to monitor: all model chunks if Megatron-Core's DDP wraps them, else the first chunk."""
        return list(self.chunks) if len(self.chunks) > 1 and are_chunks(self.chunks) else self.chunks[0]

    def check(self, call: str) -> None:
        """Raise ConfigError if the model or the optimizer has a wrong type."""
        if isinstance(self.optimizer, torch.nn.Module) and not isinstance(self.model, torch.nn.Module):
            raise ConfigError(f"{call}: model and optimizer are exchanged; pass the model first")
        if not self.chunks or not all(isinstance(module, torch.nn.Module) for module in self.chunks):
            raise ConfigError(f"{call}: model must be a torch module or a list of its chunks, not {_type(self.model)}")
        if self.optimizer is None:
            raise ConfigError(f"{call} needs the optimizer: call {call}(model, optimizer=optimizer)")
        optimizers = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        if not optimizers or not all(callable(getattr(item, "step", None)) for item in optimizers):
            raise ConfigError(f"{call}: optimizer must be a torch optimizer or wrap one, not {_type(self.optimizer)}")


def _place_of(value: Any, places: Sequence[str]) -> str:
    wanted = "params_have_main_grad" if isinstance(value, bool) else "opt_ty" if isinstance(value, str) else None
    if wanted is not None and wanted in places:
        return wanted
    if not places:
        raise ConfigError(
            "too many arguments: TrainerMon takes config_file_path, process_group, params_have_main_grad and opt_ty"
        )
    return places[0]


def _put(given: dict[str, Any], name: str, value: Any, call: str) -> None:
    if name in given:
        raise ConfigError(f"{call}: {name} is given by position and by name; give it once")
    given[name] = value


def _check_names(given: Mapping[str, Any], known: Sequence[str], call: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"{call} has no argument {unknown[0]!r}; its arguments are {', '.join(known)}")


def _type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return f"a {type(value).__name__}"


MOST_ITERATIONS: Final = 1 << 53

_CLASSES: Final = {
    "Megatron_DistributedOptimizer": "DistributedOptimizer",
    "Megatron_Float16OptimizerWithFloat16Params": "Float16OptimizerWithFloat16Params",
    "Megatron_ChainedDistributedOptimizer": "ChainedOptimizer",
    "Megatron_ChainedFloat16OptimizerWithFloat16Params": "ChainedOptimizer",
    "DeepSpeedZeroOptimizer_Stage0": "BF16_Optimizer",
    "DeepSpeedZeroOptimizer_Stage1_or_2": "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3": "DeepSpeedZeroOptimizer_Stage3",
}
"""Names of optimizer classes by the value of the argument `opt_ty` in msprobe."""


def wrong_hints(hints: Construction, given: Attachment) -> Iterator[str]:
    """Yield a sentence for each wrong hint about the model or the optimizer, and one for unmonitored model chunks."""
    yield from _main_grad_hints(hints.params_have_main_grad, given.chunks)
    yield from _optimizer_hints(hints.opt_ty, given.optimizer)
    if len(given.chunks) > 1 and not isinstance(given.watched, list):
        yield (
            f"the {len(given.chunks)} models are no chunks that Megatron-Core's DDP wraps, and the first is monitored: "
            "make a TrainerMon for each"
        )
    if (_whole(given.grad_acc_steps) or 0) < 1:
        yield f"grad_acc_steps={given.grad_acc_steps!r} is no number of micro-batches; they are counted anyway"
    if not _is_iteration(_whole(given.start_iteration)):
        yield f"start_iteration={given.start_iteration!r} is no number of a step, so steps count from 1"


def first_step(given: Attachment) -> int:
    """Return the first step in Rankscope: one more than in msprobe, which counts from 0."""
    started = _whole(given.start_iteration)
    return 1 + started if started is not None and _is_iteration(started) else 1


def _main_grad_hints(hint: bool | None, models: Sequence[torch.nn.Module]) -> Iterator[str]:  # noqa: FBT001 - three values
    if hint is None:
        return
    has = any(hasattr(parameter, "main_grad") for model in models for parameter in model.parameters())
    if hint and not has:
        yield "params_have_main_grad=True, but no parameter has a main_grad: gradients are read from .grad"
    elif has and not hint:
        yield "params_have_main_grad=False, but parameters have a main_grad: gradients are read where they are"


def _optimizer_hints(hint: Any, optimizer: Any) -> Iterator[str]:
    if hint is None:
        return
    own = _class_names(optimizer)
    if hint not in _CLASSES:
        yield f"opt_ty={hint!r} is none of {', '.join(_CLASSES)}; it is not needed, the optimizer is a {own[0]}"
    elif _CLASSES[hint] not in own:
        yield f"opt_ty={hint!r}, but the optimizer is a {own[0]}, and is read as one"


def _class_names(optimizer: Any) -> list[str]:
    """Return the class names of an optimizer and of the optimizers that it wraps, from the outermost inwards."""
    names: list[str] = []
    while optimizer is not None and len(names) < len(_CLASSES):
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return names


def _is_iteration(number: int | None) -> bool:
    return number is not None and 0 <= number <= MOST_ITERATIONS


def _whole(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number, such as one of Python, numpy or torch."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers, or without any
        return None


Metrics = dict[str, dict[str, torch.Tensor]]


def metrics_of(rows: Iterable[Row], ops: Sequence[str], rank: int) -> Metrics:
    """Return the statistics `ops` of `rows` as float64 tensors on the CPU.

    The result maps msprobe's tag of a tensor to its statistics by name. A tag names the model chunk, the tensor, the
    rank and the kind of the tensor.
    """
    found: Metrics = {}
    for row in rows:
        entry = row.entry
        place = {"index": entry.index, "micro_step": entry.micro_step, "vpp_stage": entry.vpp_stage}
        found[anomaly_tag(entry.kind, entry.tensor, rank, **place)] = {
            op: torch.tensor(statistic(op, row.numbers), dtype=torch.float64, device="cpu") for op in ops
        }
    return found


def statistic(op: str, numbers: Mapping[str, Any]) -> float:
    """Return the statistic `op` of a tensor over all its elements, from its published `numbers`; NaN if unknown."""
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


_ACTIVATIONS: Final = "activations"


class _Monitor(Monitor):
    """A Monitor that a script for msprobe never detaches: the end of the script without an error completes the run."""

    _completes_at_exit = True


class TrainerMon(CopiesDoNothing):
    """The monitor of one model, with the interface of msprobe.

    Create it with `TrainerMon("monitor_config.json")`, then call `set_monitor`, for example `set_monitor(model,
    optimizer=optimizer)`. Its arguments are `(model, optimizer, grad_acc_steps, tp_group, dp_group, start_iteration)`.
    The order of msprobe's manual, `(model, grad_acc_steps, optimizer, dp_group, tp_group, start_iteration)`, and names
    are accepted as well. The attribute `monitor` is the Rankscope `Monitor`, with further methods such as `log`,
    `phase`, `switch` and `detach`. A copy does nothing, like a copy of a Monitor.

    `generate_…_metrics` return mappings from msprobe's tag of a tensor to its statistics by name. A tag names the model
    chunk, the tensor, the rank and the kind of the tensor. Statistics of the current step are returned if they are
    measured, otherwise those of the last measured step. These calls wait for the device.
    """

    def __init__(self, config_file_path: str | os.PathLike[str], *positional: Any, **named: Any) -> None:
        """Read the configuration file.

        The arguments `process_group`, `params_have_main_grad` and `opt_ty` may follow, by position or by name. By
        position, `process_group` may be left out, as in older releases of msprobe.
        """
        if not isinstance(config_file_path, str | os.PathLike):
            raise ConfigError(
                f"config_file_path must be the path of a JSON file, not a {type(config_file_path).__name__}: "
                "pass settings in Python to rankscope.Monitor"
            )
        self._hints = Construction.of(positional, named)
        self._path = Path(config_file_path)
        self._document = read_settings(self._path)
        self._config = _config_of(self._document, self._path)
        self._optimizer: Any = None
        self._monitor: Monitor | None = None
        self._boundary = ErrorBoundary()
        self._remarks: dict[str, None] = {}  # each is reported once, in order

    def _unattached(self) -> dict[str, Any]:
        return {"_hints": Construction(), "_optimizer": None, "_boundary": ErrorBoundary(), "_remarks": {}}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_config": self._config.without_secrets(), "_document": {}}

    @property
    def monitor(self) -> Monitor | None:
        """The Rankscope `Monitor` of the model; None before `set_monitor`."""
        return self._monitor

    @property
    def faults(self) -> int:
        """The number of errors that this object caught in training; the Monitor counts its own."""
        return self._boundary.count

    # Attaching.

    def set_monitor(self, *positional: Any, **named: Any) -> None:
        """Attach the monitor to a model. The class lists the arguments."""
        if self._refuses("set_monitor()"):
            return
        self._attach("set_monitor", Attachment.of("set_monitor", positional, named))

    def monitor_gnorm_with_ad(self, *positional: Any, **named: Any) -> None:
        """Attach the monitor to a model.

        Older scripts call this method instead of `set_monitor`. If no optimizer is passed, the one that was passed to
        `set_wrapped_optimizer` is used.
        """
        if self._refuses("monitor_gnorm_with_ad()"):
            return
        self._remark_once("monitor_gnorm_with_ad is deprecated: call set_monitor with the same arguments")
        given = Attachment.of("monitor_gnorm_with_ad", positional, named)
        optimizer = self._optimizer if given.optimizer is None else given.optimizer
        self._optimizer = None  # no reference to an object of the training is kept
        self._attach("monitor_gnorm_with_ad", replace(given, optimizer=optimizer))

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Store the optimizer, which `monitor_gnorm_with_ad` uses by default."""
        if not self.is_copy:
            self._remark_once("set_wrapped_optimizer is deprecated: pass the optimizer to set_monitor")
            self._optimizer = optimizer

    def detach(self) -> None:
        """Remove all hooks and publish the remaining records. This also happens when the process exits."""
        if self._monitor is not None:
            self._monitor.detach()

    def _attach(self, call: str, given: Attachment) -> None:
        given.check(call)
        if self._monitor is not None:
            self._remark_once(
                f"{call} was called before, and the first model remains attached: create a TrainerMon for each model"
            )
            return
        for sentence in wrong_hints(self._hints, given):
            self._remarks[sentence] = None
        is_watched = os.environ.get(DYNAMIC_VARIABLE, "").lower() == "true"
        config = replace(self._config, switch_file=os.fspath(self._path)) if is_watched else self._config
        monitor = _Monitor(config, first_step=first_step(given))
        groups = {"dp_group": given.dp_group, "tp_group": given.tp_group, "pp_group": self._hints.process_group}
        monitor.attach(given.watched, given.optimizer, **groups)
        self._monitor = monitor
        self._boundary.call("process_group", _place_in_pipeline, monitor, self._hints.process_group)
        for sentence in self._remarks:
            monitor.remark(sentence)

    # Numbers.

    def generate_wgrad_metrics(self, *_: Any) -> tuple[Metrics, Metrics]:
        """Return the statistics of reduced and of unreduced gradients."""
        return self._numbers((Kind.GRAD_REDUCED,), (Kind.GRAD_UNREDUCED,))

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """Return the statistics of activations and of activation gradients."""
        return self._numbers((Kind.ACT_IN, Kind.ACT_OUT), (Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT))

    def _numbers(self, first: Sequence[str], second: Sequence[str]) -> tuple[Metrics, Metrics]:
        def read() -> tuple[Metrics, Metrics]:
            # One call for both kinds, because both must be of the same step.
            rows = () if self._monitor is None else self._monitor.current(*first, *second)
            ops, rank = self.ops, rank_here(os.environ)
            one, other = ([row for row in rows if row.entry.kind in kinds] for kinds in (first, second))
            return metrics_of(one, ops, rank), metrics_of(other, ops, rank)

        found: tuple[Metrics, Metrics] | None = self._boundary.call("a getter", read)
        return ({}, {}) if found is None else found

    # Changes while training runs.

    @property
    def ops(self) -> list[str]:
        """Names of the statistics that are published and that the getters return."""
        now = _measured_now(self._monitor)
        return _names(self._config.ops if now is None else now["ops"])

    @ops.setter
    def ops(self, names: Sequence[str]) -> None:
        if self.is_copy:
            return
        instead = "call monitor.monitor.switch({'ops': […]}), or edit the watched file"
        self._remark_once(f"monitor.ops = […] is deprecated: {instead}")
        self._boundary.call("ops", self._change_ops, names)

    def _change_ops(self, names: Sequence[str]) -> None:
        try:
            chosen_ops(names)
        except ValueError as error:
            self._remark_once(f"ops remain {self.ops}: {error}")
            return
        self._config = replace(self._config, ops=tuple(names))
        for name in (Csv.name, TensorBoard.name):
            sink = None if self._monitor is None else self._monitor.sink(name)
            if isinstance(sink, Csv | TensorBoard):
                sink.tensor_rows.add_ops([op for op in dict.fromkeys(names) if op in OPS])
        self._switch({"ops": list(names)})

    def reload_xy(self, xy_distribution: bool = False) -> None:  # noqa: FBT001, FBT002 - msprobe's signature
        """Start or stop the measurement of activations. The targets are those of the configuration."""
        if self.is_copy:
            return
        instead = f"set {DYNAMIC_VARIABLE}=True and edit the file, or call monitor.monitor.switch"
        self._remark_once(f"reload_xy is deprecated: {instead}")
        self._boundary.call("reload_xy()", self._reload_activations, bool(xy_distribution))

    def _reload_activations(self, on: bool) -> None:  # noqa: FBT001 - the only argument
        self._document = {**self._document, "xy_distribution": on}
        self._config = replace(_config_of(self._document, self._path), ops=self._config.ops)
        now = _measured_now(self._monitor)
        if now is None:
            return
        quantities = [name for name in now["quantities"] if name != _ACTIVATIONS]
        options = {name: chosen for name, chosen in now["options"].items() if name != _ACTIVATIONS}
        if on:
            quantities.append(_ACTIVATIONS)
            options |= {name: chosen for name, chosen in self._config.options.items() if name == _ACTIVATIONS}
        self._switch({"quantities": quantities, "options": options})

    def _switch(self, changes: Mapping[str, Any]) -> None:
        now = _measured_now(self._monitor)
        if self._monitor is not None and now is not None:
            self._monitor.switch({**{name: now[name] for name in CHANGEABLE}, **changes}, on=now[SWITCH])

    # Remarks.

    def _remark_once(self, sentence: str) -> None:
        if sentence not in self._remarks:
            self._remarks[sentence] = None
            if self._monitor is not None:
                self._monitor.remark(sentence)


def _place_in_pipeline(monitor: Monitor, process_group: Any) -> None:
    place, sink = place_in(process_group), monitor.sink(Anomalies.name)
    if place is not None and isinstance(sink, Anomalies):
        sink.place(*place)


def _measured_now(monitor: Monitor | None) -> Mapping[str, Any] | None:
    """Return the settings of `monitor` after all changes requested so far; None while no model is attached."""
    state = {} if monitor is None else monitor.measuring
    return (state["to_come"] or [state])[-1] if state else None


def _config_of(document: Mapping[str, Any], path: Path) -> MonitorConfig:
    try:
        return MonitorConfig.from_mapping(translated(document, setting_names()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _names(ops: Sequence[str]) -> list[str]:
    """Return the statistics in `ops` without duplicates, or the default one if there are none."""
    chosen = chosen_ops(ops)
    return [op for op in dict.fromkeys("mean" if op == "id" else op for op in ops) if op in ALL_OPS] or [
        op for op in (FALLBACK,) if op in chosen
    ]
