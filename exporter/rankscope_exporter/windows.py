"""One quantity's view of the table that all quantities fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rankscope_exporter.quantities.base import Table
from rankscope_exporter.statistics import MeasureGroup, StatisticsTable, copy_entries


@dataclass(frozen=True, slots=True)
class Measurement:
    """How tensors are measured."""

    zero_below: float = 0.0
    compiled: bool = True  # use the compiled CPU kernel once it is ready


class TableWindow(Table):
    """Shifts a quantity's own rows to where its entries stand in the plan."""

    def __init__(self, table: StatisticsTable, first: int, settings: Measurement) -> None:
        self._table = table
        self._first = first
        self._settings = settings
        self._groups: dict[range, MeasureGroup] = {}

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Take the statistics of `tensors` into entries `rows`; None leaves an entry absent."""
        group = self._groups.get(rows)
        if group is None:
            settings = self._settings
            group = MeasureGroup(self._shifted(rows), zero_below=settings.zero_below, compiled=settings.compiled)
            self._groups[rows] = group
        group.measure(tensors, self._table)

    def copy(self, source: range, target: range) -> None:
        """Set entries `target` equal to entries `source`, which were measured before."""
        copy_entries(self._table, self._shifted(source), self._shifted(target))

    def forget(self, rows: range) -> None:
        """Make entries absent that were measured before."""
        self._table.forget(self._shifted(rows))

    def _shifted(self, rows: range) -> range:
        return range(self._first + rows.start, self._first + rows.stop)
