"""Rows and companion lines of one stretch of a log, in its order, as one block of columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.events import EventType, Severity
from rankscope_ingest.importers.common.importer import FROM_LOG, RECORD_COLUMN, ImportedBlock
from rankscope_ingest.importers.megatron.columns import Alike, Integers
from rankscope_ingest.importers.megatron.groups import NO_NUMBER, NO_TIME, Group, Printers
from rankscope_ingest.importers.megatron.keys import LOSS, Meaning, main_loss, meaning, meanings
from rankscope_ingest.importers.megatron.other_lines import Companion, timer_meaning
from rankscope_ingest.importers.megatron.rows import Row, values

_MISSING: Final = {
    "type": EventType.LOSS_MISSING,
    "severity": Severity.WARNING,
    "message": "no loss in this row: it was NaN, not above zero, or all iterations were skipped",
}


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers of one meaning: `positions` says to which records of the block they belong."""

    meaning: Meaning
    positions: Integers
    numbers: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowColumns:
    """What the rows of a stretch have in common, as columns: first the groups', then those read one by one."""

    places: Integers
    printers: Integers
    steps: Integers
    planned: Integers
    times: Integers
    losses: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls, groups: Sequence[Group], rows: Sequence[tuple[int, Row]], places: int, printers: Printers
    ) -> RowColumns:
        """Return the columns; `places` is the number of places that one line takes."""

        def joined(arrays: Iterable[Integers], more: Iterable[int]) -> Integers:
            return np.concatenate([*arrays, np.array(list(more), np.int64)])

        return cls(
            places=joined((group.lines * places for group in groups), (place for place, _ in rows)),
            printers=joined(
                [printers.of_labels(group.labels, group.label_codes) for group in groups],
                [printers.number(row.printer) for _, row in rows],
            ),
            steps=joined((group.steps for group in groups), (row.step for _, row in rows)),
            planned=joined((group.planned for group in groups), (row.planned for _, row in rows)),
            times=joined((group.times for group in groups), (NO_TIME if row.ts is None else row.ts for _, row in rows)),
            losses=np.concatenate([*map(group_losses, groups), np.array([row_loss(row) for _, row in rows], float)]),
        )


@dataclass(slots=True)
class Stretch:
    """What a stretch of a log says, record by record: `steps` and so on stand at the position of the record."""

    steps: Integers
    ranks: Integers
    times: Integers
    attempts: Integers
    series: list[Series] = field(default_factory=list)
    without_loss: list[Integers] = field(default_factory=list)
    events: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    single: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Scalars of companion lines, one by one."""

    @classmethod
    def of(
        cls, positions: Integers, *, steps: Integers, ranks: Integers, times: Integers, attempts: Integers
    ) -> Stretch:
        """Return a stretch whose records have these, each at its position."""
        order = np.argsort(positions)
        return cls(steps[order], ranks[order], times[order], attempts[order])

    def add_group(self, group: Group, positions: Integers) -> None:
        """Add rows that look alike."""
        meant = dict(zip(group.keys, meanings(group.keys), strict=True))
        for column in group.columns:
            what = meant[column.key].average() if column.is_average else meant[column.key]
            numbers = column.numbers if what.factor == 1.0 else column.numbers * what.factor
            self.series.append(Series(what, positions, numbers))
        if main_loss(group.keys) is None:
            self.without_loss.append(positions)

    def add_row(self, row: Row, position: int) -> None:
        """Add a row that was read by itself."""
        self.single += [(position, scalar) for scalar in row_scalars(row)]
        if main_loss(row.keys) is None:
            self.without_loss.append(np.array([position]))

    def add_timers(self, alike: Alike, positions: Integers) -> None:
        """Add lines of timers that look alike."""
        for column in alike.columns:
            what = timer_meaning(column.key)
            self.series.append(Series(what, positions, column.numbers * what.factor))

    def add_companion(self, companion: Companion, position: int) -> None:
        """Add what a line between the rows says."""
        self.single += [(position, scalar) for scalar in companion.scalars]
        self.events += [(position, event) for event in companion.events]

    def block(self) -> ImportedBlock:
        """Return it as columns."""
        tables = {}
        if self.series or self.single:
            tables["scalars"] = pa.concat_tables(self._scalars())
        if events := list(self._events()):
            tables["events"] = pa.concat_tables(events, promote_options="default")
        return ImportedBlock(records=len(self.steps), tables=tables)

    def _scalars(self) -> Iterable[pa.Table]:
        if self.series:
            positions = np.concatenate([series.positions for series in self.series])
            sizes = [len(series.positions) for series in self.series]
            meanings = [series.meaning for series in self.series]
            yield self._table(
                positions,
                {
                    "name": _coded([meaning.name for meaning in meanings], sizes),
                    "value": pa.array(np.concatenate([series.numbers for series in self.series])),
                    "unit": _coded([meaning.unit for meaning in meanings], sizes),
                    "labels": _coded([meaning.labels for meaning in meanings], sizes),
                },
            )
        if self.single:
            yield self._listed(self.single, {"name": None, "value": pa.float64(), "unit": None, "labels": None})

    def _events(self) -> Iterable[pa.Table]:
        for positions in self.without_loss:
            columns = {name: _coded([text], [len(positions)]) for name, text in _MISSING.items()}
            yield self._table(positions, columns)
        if self.events:
            texts = ("type", "severity", "op", "message", "details")
            yield self._listed(self.events, {**dict.fromkeys(texts), "value": pa.float64()})

    def _listed(
        self, listed: Sequence[tuple[int, Mapping[str, Any]]], types: Mapping[str, pa.DataType | None]
    ) -> pa.Table:
        positions = np.array([position for position, _ in listed], np.int64)
        columns = {
            name: _text([row.get(name) for _, row in listed])
            if kind is None
            else pa.array([row.get(name) for _, row in listed], kind)
            for name, kind in types.items()
        }
        return self._table(positions, columns)

    def _table(self, positions: Integers, own: Mapping[str, Any]) -> pa.Table:
        times = self.times[positions]
        untimed = times == NO_TIME
        common = {
            RECORD_COLUMN: pa.array(positions.astype(np.int32)),
            "step": _nullable(self.steps[positions], pa.int64()),
            "rank": _nullable(self.ranks[positions], pa.int32()),
            "ts": pa.array(times, pa.int64(), mask=untimed).cast(pa.timestamp("us", tz="UTC")),
            "ts_origin": pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(len(times), np.int32), mask=untimed), pa.array([FROM_LOG])
            ),
            "attempt": pa.array(self.attempts[positions].astype(np.int32)),
        }
        return pa.table({**common, **own})


def _nullable(numbers: Integers, kind: pa.DataType) -> pa.Array:
    return pa.array(numbers, pa.int64(), mask=numbers == NO_NUMBER).cast(kind)


def _coded(texts: Sequence[str | None], sizes: Sequence[int]) -> pa.DictionaryArray:
    """Return a column that repeats each text as often as its size says."""
    distinct = list(dict.fromkeys(text for text in texts if text is not None))
    codes = np.array([-1 if text is None else distinct.index(text) for text in texts], np.int32)
    indices = np.repeat(codes, sizes)
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), pa.array(distinct, pa.string()))


def _text(texts: Sequence[str | None]) -> pa.DictionaryArray:
    return pa.array(texts, pa.string()).dictionary_encode()


def row_scalars(row: Row) -> list[dict[str, Any]]:
    """Return the numbers of a row as scalars."""
    main = main_loss(row.keys)
    scalars = []
    for part, text in row.parts:
        for key, is_average, value, unit in values(part, text):
            what = meaning(key if unit is None or "(" in key else f"{key} ({unit})", is_main=part == main)
            what = what.average() if is_average else what
            scalars.append({"name": what.name, "value": value * what.factor, "unit": what.unit, "labels": what.labels})
    return scalars


def group_losses(group: Group) -> npt.NDArray[np.float64]:
    """Return the loss of each row, NaN where it is or was left out."""
    main = main_loss(group.keys)
    for column in group.columns:
        if column.key == main and not column.is_average:
            return column.numbers
    return np.full(len(group.lines), np.nan)


def row_loss(row: Row) -> float:
    """Return the loss of a row, NaN where it is or was left out."""
    main = main_loss(row.keys)
    text = next((text for key, text in row.parts if key == main), "")
    return next((value for _, is_average, value, _ in values(LOSS, text) if not is_average), np.nan)
