"""Spectral norm and stable rank of the weights of linear modules, as the step finds them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.module_names import NamedModule
from rankscope_exporter.quantities.base import Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.module_calls import (
    ModuleCalls,
    Running,
    is_matrix,
    local_matrix_or_reason,
    may_be_gathered,
    weight_of,
)
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.statistics.formulas.spectral import batches, norms, spectral_numbers

SPECTRAL_NORM: Final = "spectral_norm"
STABLE_RANK: Final = "stable_rank"

_FINEST: Final = 1e-5  # below it float32 itself is the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOptions(QuantityOptions):
    """Which modules, and how closely. No targets are all modules that have a 2-D `weight` or `wg`."""

    tolerance: float = 0.01
    """How far below the largest singular value the spectral norm may lie, as a share of it. A tenth of it costs about
    three times the steps."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, list | tuple) and not self.targets:
            object.__setattr__(self, "targets", ("*",))
        QuantityOptions.__post_init__(self)
        if not isinstance(self.tolerance, float) or not _FINEST <= self.tolerance < 1:
            raise ValueError(f"tolerance is a share from {_FINEST:g} on and below 1, not {self.tolerance!r}")


class Linear(Quantity):
    """Two features of the weight that a step computes with, read when the step begins:

    `spectral_norm` is its largest singular value σ₁, too low by a share of `tolerance` at most and never too high
    (see features/spectral.py); `stable_rank` is ‖W‖_F / σ₁, as the existing tool and its files have it: the square of
    it is what papers call the stable rank. Both are NaN when the weight holds a NaN or Inf; a weight of zeros has no
    `stable_rank`, and one without elements neither.

    A weight that FSDP shards is whole only while its module runs: it is read then, and is equal on all ranks. One that
    is never whole has no rows, and is named once. Parts under tensor parallelism that are plain tensors are weights of
    their own.
    """  # noqa: D400 - the list goes on

    name: ClassVar[str] = "linear"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = LinearOptions
    of_modules: ClassVar[bool] = True
    options: LinearOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._whole: list[NamedModule] = []
        self._measured: set[str] = set()
        self._calls: ModuleCalls
        self._gate: SamplingGate

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Choose the modules; only those whose weight is in parts get a hook."""
        self._gate = gate
        self._calls = ModuleCalls(self.name, hooking, gate)
        found = [named for named in self._calls.find(self.monitored.framework.module, self.targets) if _is_meant(named)]
        if not found:
            self._calls.tell("no module of the targets has a 2-D weight, so nothing is measured")
        for named in found:
            weight = _weight_of(named)
            whole = local_matrix_or_reason(weight)
            if isinstance(whole, torch.Tensor):
                self._whole.append(named)
            elif may_be_gathered(weight):
                self._calls.before(named, self._called)
            else:
                self._calls.missing(whole, named)

    def on_step_begin(self, table: Table) -> None:
        """Read all weights that are whole."""
        self._calls.on_step_begin()
        self._measured.clear()
        self._measure(self._whole, table)

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Say what was missing."""
        self._calls.on_step_end()

    def _called(self, call: Running, *_: Any) -> None:
        if call.named.name not in self._measured:
            self._measured.add(call.named.name)
            self._measure([call.named], self._gate.table)

    def _measure(self, modules: Iterable[NamedModule], table: Table) -> None:
        names: dict[int, list[str]] = {}
        weights: list[torch.Tensor] = []
        for named in modules:
            if named.module is None:  # the training has dropped the layer
                continue
            weight = _weight_of(named)
            whole = local_matrix_or_reason(weight)
            if isinstance(whole, str):
                self._calls.missing(whole, named)
            elif whole.numel():
                of_weight = names.setdefault(id(weight), [])
                of_weight.append(named.name)
                if len(of_weight) == 1:  # a tied weight is computed once
                    weights.append(whole)
        listed = list(names.values())
        for batch in batches(weights):
            numbers = spectral_numbers([weights[place] for place in batch], self.options.tolerance)
            table.defer("features", numbers, functools.partial(_rows, [listed[place] for place in batch]))


def _is_meant(named: NamedModule) -> bool:
    # FSDP leaves a part of a flat tensor, or nothing, where the matrix was.
    return isinstance(named.module, nn.Linear | nn.Embedding) or is_matrix(_weight_of(named))


def _weight_of(named: NamedModule) -> torch.Tensor | None:
    module = named.module
    return None if module is None else weight_of(module)


def _rows(names: Sequence[Sequence[str]], numbers: Numbers) -> Iterable[Row]:
    """Return the rows of some weights, each with the names of the modules that hold it."""
    spectral, frobenius = norms(numbers)
    for of_weight, largest, total in zip(names, spectral.tolist(), frobenius.tolist(), strict=True):
        features = {STABLE_RANK: math.nan if math.isnan(largest) else total / largest if largest else None}
        features[SPECTRAL_NORM] = largest
        for name in of_weight:
            for kind, value in features.items():
                if value is not None:
                    yield {"kind": kind, "module": name, "index": None, "micro_step": None, "value": value}
