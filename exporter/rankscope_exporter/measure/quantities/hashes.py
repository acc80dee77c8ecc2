"""Quantity `hashes`: hashes and norms of tensors that several ranks hold, to detect replica divergence.

Every rank publishes its own hashes, even if only the first rank of a group publishes statistics (`dp_group`). Ranks do
not compare hashes, because that needs communication. The service, Prometheus and the view `desync` of the store compare
them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

import numpy as np
import torch

from rankscope_contract.model.kinds import COUNT_OPS, Kind
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_names import Targets, local_tensor, plain_name
from rankscope_exporter.adapters.placement import ranks_text
from rankscope_exporter.measure.kernels.hashes import Hasher, finished, hashable
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import SUMS, StatisticsTable
from rankscope_exporter.measure.kernels.tensor_access import PLAIN_TYPES, dtype_name, is_code
from rankscope_exporter.measure.quantities.base import Quantity, QuantityOptions, TargetNames
from rankscope_exporter.measure.quantities.update import KIND_OF_STATE
from rankscope_exporter.measure.table import Table
from rankscope_exporter.process.validation import at_least
from rankscope_exporter.records.record import Numbers, Row

DATASET: Final = "hashes"
BUFFER: Final = "buffer"
"""The kind of a hashed buffer of the model. Buffers are read after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashesOptions(QuantityOptions):
    """Options of the quantity `hashes`: the tensors to hash in addition to parameters, and the sampling interval."""

    of: Literal["replicas", "all"] = "replicas"
    """"replicas" hashes the tensors that other ranks also hold.

    "all" hashes all tensors, to compare runs by `rankscope diff`.
    """
    every: Annotated[int, at_least(1)] | None = 100
    """Sample every n-th step; must be equal on all ranks. Null means the value of the monitor's `every`."""
    state: bool = False
    """Also hash the state of the optimizers."""
    buffers: TargetNames = ()
    """Names or globs of buffers to hash, which must be equal on all ranks.

    Buffers of BatchNorm differ between ranks, unless BatchNorm is synchronised.
    """
    everywhere: bool = False
    """Treat all tensors that are not sharded as replicas. Needed if the training loop itself reduces gradients."""


class _Described(NamedTuple):
    """The columns of a row that are known before the hash was copied to the host. Contains no tensor."""

    columns: Row
    size_bytes: int
    is_code: bool
    """True if the elements are codes of a quantised state, which have a hash and no norm."""


_Item = tuple[_Described, torch.Tensor]
"""A tensor to hash: the columns of its row, and this rank's part of its elements."""


class Hashes(Quantity):
    """Computes hashes and norms of tensors after the optimizer update of a sampled step.

    The hashes show at which step a tensor was changed, whether before, during or outside of the update.
    """

    name: ClassVar[str] = "hashes"
    options_class: ClassVar[type[QuantityOptions]] = HashesOptions
    measures_tensors: ClassVar[bool] = False

    options: HashesOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._groups: dict[int, str | None] = {}  # parameter -> its replicas, as text
        self._measures: dict[torch.device, Measure] = {}
        self._buffers = Targets(self.options.buffers)
        for index, parameter in enumerate(self.monitored.tensors()):
            ranks = () if parameter is None else self._ranks_of(parameter)
            if parameter is not None and (len(ranks) > 1 or self.options.of == "all"):
                self._groups[index] = ranks_text(ranks) if len(ranks) > 1 else None

    def notices(self) -> list[str]:
        found = super().notices()
        if not self._groups:
            found.append(
                "no parameter is known to have replicas on other ranks; if the training loop keeps ranks equal, "
                "set options.hashes.everywhere"
            )
        return found

    def on_optimizer_step_end(self, table: Table) -> None:
        table.withdraw(DATASET)  # with several optimizers, the values after the last update are published
        by_device: dict[torch.device, list[_Item]] = {}
        for described, elements in self._items():
            if hashable(elements):
                by_device.setdefault(elements.device, []).append((described, elements))
        for device, items in by_device.items():
            if device not in self._measures:
                self._measures[device] = Measure(device)
            compute = functools.partial(self._compute, self._measures[device], items, table)
            names = [described.columns["tensor"] for described, _ in items]
            table.isolate(f"hashes on {device}", names, [elements for _, elements in items], compute)

    @staticmethod
    def _compute(measure: Measure, items: Sequence[_Item], table: Table, positions: Sequence[int]) -> None:
        described, tensors = zip(*(items[position] for position in positions), strict=True)
        table.defer(DATASET, measure.of(tensors), functools.partial(_rows, described))

    def _items(self) -> Iterator[_Item]:
        framework, tensors = self.monitored.framework, self.monitored.tensors()
        for index, replicas in self._groups.items():
            parameter = tensors[index]
            if parameter is not None:
                name, stage = self.monitored.parameters[index].name, framework.vpp_stage(parameter)
                yield _item(Kind.PARAM_AFTER, name, stage, replicas, parameter)
        is_partial = framework.traits.optimizer_takes_copies or self.monitored.has_divided_state
        if self.options.state and self._groups and not is_partial:
            yield from self._state(tensors)
        if self._buffers.patterns:
            yield from self._kept_buffers()

    def _state(self, tensors: Sequence[torch.nn.Parameter | None]) -> Iterator[_Item]:
        framework = self.monitored.framework
        kept = self.monitored.states(tensors)
        for index, replicas in self._groups.items():
            own, parameter = kept[index], tensors[index]
            if own is None or parameter is None:
                continue
            for key, value in own.state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    kind, name = KIND_OF_STATE.get(key, key), self.monitored.parameters[index].name
                    stage = framework.vpp_stage(parameter)
                    yield _item(kind, name, stage, replicas, value, is_code=is_code(value))

    def _kept_buffers(self) -> Iterator[_Item]:
        for name, buffer in self.monitored.framework.module.named_buffers():
            ranks = self._ranks_of(buffer) or range(self.monitored.world_size)
            if self._buffers.selects(plain_name(name)) and (len(ranks) > 1 or self.options.of == "all"):
                replicas = ranks_text(ranks) if len(ranks) > 1 else None
                yield _item(BUFFER, plain_name(name), None, replicas, buffer)

    def _ranks_of(self, tensor: torch.Tensor) -> Sequence[int]:
        known = self.monitored.framework.replicas(tensor)
        if known or not self.options.everywhere or self.monitored.framework.layout(tensor).placement == "shard":
            return known
        return range(self.monitored.world_size)


def _item(
    kind: str, tensor: str, vpp_stage: int | None, replicas: str | None, value: torch.Tensor, *, is_code: bool = False
) -> _Item:
    """Return a tensor to hash. Call no operation of a tensor subclass that may lack it."""
    local = local_tensor(value)
    elements = local.detach() if type(local) in PLAIN_TYPES else local
    columns = {"kind": kind, "tensor": tensor, "vpp_stage": vpp_stage, "replicas": replicas}
    columns |= {"dtype": dtype_name(elements.dtype), "numel": elements.numel()}
    return _Described(columns, elements.numel() * elements.element_size(), is_code), elements


class Measure:
    """Computation of hashes and norms on one device. The memory for it is allocated once."""

    def __init__(self, device: torch.device) -> None:
        self._hasher = Hasher(device)
        self._table = StatisticsTable(0, device)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return int64 [1 + statistics, len(tensors)] on the device.

        The first row has, for each tensor, the sum from which its hash is computed on the host. The other rows have the
        bits of the sums and counts from which the statistics, such as the norm, are computed.
        """
        count = len(tensors)
        self._table.clear()
        self._table.grow(count)
        MeasureGroup(range(count)).measure(tensors, self._table)
        return torch.cat((self._hasher.partials(tensors).unsqueeze(0), self._table.buffer[:, :count]))


def _rows(items: Sequence[_Described], numbers: Numbers) -> Iterator[Row]:
    counts = dict(zip(COUNT_OPS, numbers[1 + len(SUMS) :], strict=True))
    finite = counts["numel"] - counts["nans"] - counts["infs"]
    columns = zip(items, numbers[0].tolist(), numbers[1].view(np.float64).tolist(), finite.tolist(), strict=True)
    for described, partial, squares, count in columns:
        norm = math.sqrt(squares) if count > 0 and not described.is_code else None
        yield {**described.columns, "hash": finished(partial, described.size_bytes), "norm": norm}
