"""Quantity `linear`: spectral norm and stable rank of the weights of linear modules, at the beginning of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import nn

from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.adapters.parameter_names import NamedModule
from rankscope_exporter.measure.formulas import batches, norms, spectral_numbers
from rankscope_exporter.measure.quantities.base import QuantityOptions, SamplingGate, TargetNames
from rankscope_exporter.measure.quantities.module_quantity import (
    ModuleQuantity,
    Unreadable,
    is_matrix,
    local_matrix,
    may_be_gathered,
    weight_of,
)
from rankscope_exporter.measure.table import Table
from rankscope_exporter.process.validation import Converted, number
from rankscope_exporter.records.record import Numbers, Row

SPECTRAL_NORM: Final = "spectral_norm"
STABLE_RANK: Final = "stable_rank"

_FINEST: Final = 1e-5  # below it, float32 itself is the limit
_TOLERANCE: Final = number(f"a number of at least {_FINEST:g} and below 1", _FINEST, math.nextafter(1, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOptions(QuantityOptions):
    """Options of the quantity `linear`: the modules to measure, and the accuracy of the spectral norm.

    An empty list of targets selects all modules with a 2-D `weight` or `wg`.
    """

    targets: Annotated[TargetNames, Converted(lambda names: names or ("*",))] = ("*",)
    tolerance: Annotated[float, _TOLERANCE] = 0.01
    """Largest relative error by which the spectral norm may be too low.

    A tolerance that is one tenth as large needs about three times as many steps of the Lanczos method.
    """


class Linear(ModuleQuantity):
    """Two features of the weight of each module. The weight is read when a step begins.

    `spectral_norm` is the largest singular value σ₁. The computed value is never too high, and is too low by a relative
    error of at most `tolerance` (see measure/formulas.py). `stable_rank` is ‖W‖_F / σ₁;
    papers call the square of this number the stable rank. Both are NaN if the weight contains a NaN or an
    Inf. A weight of zeros, or without elements, has no `stable_rank`.

    A weight that FSDP shards is whole only while its module runs. It is read at that time, and the features are equal
    on all ranks. A weight that is never whole on this rank has no rows, and is reported once. With tensor parallelism,
    a part of a weight that is a plain tensor is measured like a whole weight.
    """

    name: ClassVar[str] = "linear"
    options_class: ClassVar[type[QuantityOptions]] = LinearOptions
    options: LinearOptions

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        self._whole: list[NamedModule] = []
        self._has_modules = False
        super().install(hooking, gate)
        if not self._has_modules:
            self.tell("no module of the targets has a 2-D weight, so nothing is measured")

    def _follow(self, named: NamedModule) -> None:
        weight = weight_of(named.module)
        # FSDP leaves a part of a flat tensor, or nothing, in the place of the matrix.
        if not (isinstance(named.module, nn.Linear | nn.Embedding) or is_matrix(weight)):
            return
        self._has_modules = True
        try:
            local_matrix(weight)
            self._whole.append(named)
        except Unreadable as reason:
            if may_be_gathered(weight):
                self.at_first_call(named, functools.partial(self._read_gathered, named), before=True)
            else:
                self.missing(str(reason), named)

    def on_step_begin(self, table: Table) -> None:
        super().on_step_begin(table)
        self._measure(self._whole, table)

    def _read_gathered(self, named: NamedModule, *_: Any) -> None:
        if self.is_first_in_step:
            self._measure([named], self._gate.table)

    def _measure(self, modules: Iterable[NamedModule], table: Table) -> None:
        names: dict[int, list[str]] = {}
        weights: list[torch.Tensor] = []
        for named in modules:
            if named.module is None:  # the training has dropped the layer
                continue
            weight = weight_of(named.module)
            try:
                whole = local_matrix(weight)
            except Unreadable as reason:
                self.missing(str(reason), named)
                continue
            if whole.numel():
                if id(weight) not in names:  # a tied weight is computed once
                    weights.append(whole)
                names.setdefault(id(weight), []).append(named.name)
        listed = list(names.values())

        def compute(batch: Sequence[int], positions: Sequence[int]) -> None:
            places = [batch[position] for position in positions]
            numbers = spectral_numbers([weights[place] for place in places], self.options.tolerance)
            table.defer("features", numbers, functools.partial(_rows, [listed[place] for place in places]))

        for batch in batches(weights):
            labels = [f"the weight of {listed[place][0]}" for place in batch]
            part = functools.partial(compute, batch)
            table.isolate(" ".join(labels), labels, [weights[place] for place in batch], part)


def _rows(names: Sequence[Sequence[str]], numbers: Numbers) -> Iterable[Row]:
    """Yield the rows of the dataset `features` for several weights.

    `names` has, for each weight, the names of the modules that share it.
    """
    spectral, frobenius = norms(numbers)
    for of_weight, largest, total in zip(names, spectral.tolist(), frobenius.tolist(), strict=True):
        features = {STABLE_RANK: math.nan if math.isnan(largest) else total / largest if largest else None}
        features[SPECTRAL_NORM] = largest
        for name in of_weight:
            for kind, value in features.items():
                if value is not None:
                    yield {"kind": kind, "module": name, "index": None, "micro_step": None, "value": value}
