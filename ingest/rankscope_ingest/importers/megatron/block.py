"""Convert the rows and companion lines of one chunk of a Megatron log into a block of columns, in the order of the log.

A companion line is a line between the rows, such as a validation or a list of timers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.events import EventType, Severity
from rankscope_ingest.importers.common.importer import FROM_LOG, RECORD_COLUMN, ImportedBlock
from rankscope_ingest.importers.megatron.columns import NO_NUMBER, NO_TIME, Alike, Group, Integers, Numbers, Printers
from rankscope_ingest.importers.megatron.other_lines import Companion, timer_meaning
from rankscope_ingest.importers.megatron.rows import LOSS, Meaning, Row, main_loss, meaning, meanings, values

_MISSING: Final = {
    "type": EventType.LOSS_MISSING,
    "severity": Severity.WARNING,
    "message": "no loss in this row: it was NaN, not above zero, or all iterations were skipped",
}


class AttemptCounter:
    """Derives the attempts of the rows of a Megatron log, separately for each process that printed rows.

    A step that decreases begins another attempt. A row that repeats the previous step with the same loss was printed
    twice; it is not another attempt. The state between calls is the last row of each process.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float, int]] = {}  # step, loss, attempt

    def attempts(self, printers: Integers, steps: Integers, losses: Numbers) -> Integers:
        """Return the attempt, from 0, of each row; the rows are in the order of the log.

        A repeated step with a NaN loss is another attempt, because NaN is not equal to NaN.
        """
        found = np.zeros(len(steps), np.int64)
        for printer in np.unique(printers):
            chosen = np.flatnonzero(printers == printer)
            found[chosen] = self._of_printer(int(printer), steps[chosen], losses[chosen])
        return found

    def _of_printer(self, printer: int, steps: Integers, losses: Numbers) -> Integers:
        step, loss, attempt = self._last.get(printer, (steps[0] - 1, np.nan, 0))
        previous = np.concatenate([[step], steps[:-1]])
        same = losses == np.concatenate([[loss], losses[:-1]])
        restarts = (steps < previous) | ((steps == previous) & ~same)
        found: Integers = np.cumsum(restarts) + attempt
        self._last[printer] = (int(steps[-1]), float(losses[-1]), int(found[-1]))
        return found


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one scalar in some records of a block.

    `positions` has, for each value, the index of its record in the block.
    """

    meaning: Meaning
    positions: Integers
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The step, time, loss and other common values of all rows of a chunk, as columns.

    The rows that were parsed in groups come first, then the rows that were parsed one by one.
    """

    places: Integers
    printers: Integers
    steps: Integers
    planned: Integers
    times: Integers
    losses: Numbers

    @classmethod
    def of(
        cls, groups: Sequence[Group], rows: Sequence[tuple[int, Row]], places: int, printers: Printers
    ) -> RowColumns:
        """Return step, time, loss and other common values of all rows, those in `groups` first, then those in `rows`.

        The place of a row is a sort key: its line number times `places`, plus its index within the line. The rows in
        `rows` come with their places; a row in a group is the only one on its line.
        """

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
            losses=np.concatenate([*map(_group_losses, groups), np.array([_row_loss(row) for _, row in rows], float)]),
        )


@dataclass(slots=True)
class Chunk:
    """The records of one chunk of a log.

    `steps`, `ranks`, `times` (UTC µs) and `attempts` have one value per record.
    """

    steps: Integers
    ranks: Integers
    times: Integers
    attempts: Integers
    series: list[Series] = field(default_factory=list)
    without_loss: list[Integers] = field(default_factory=list)
    events: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    scalars: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Scalars from lines that were parsed one by one, each with the index of the record to which it belongs."""

    @classmethod
    def of(cls, positions: Integers, *, steps: Integers, ranks: Integers, times: Integers, attempts: Integers) -> Chunk:
        """Return a chunk of records with these steps, ranks, times and attempts.

        Each argument has one value per record, in any order. `positions` has the index that each record gets in the
        chunk.
        """
        order = np.argsort(positions)
        return cls(steps[order], ranks[order], times[order], attempts[order])

    def add_group(self, group: Group, positions: Integers) -> None:
        """Add the scalars of rows with the same keys (value names). `positions` has the record index of each row."""
        found = dict(zip(group.keys, meanings(group.keys), strict=True))
        for column in group.columns:
            of_key = found[column.key].average() if column.is_average else found[column.key]
            numbers = column.numbers if of_key.factor == 1.0 else column.numbers * of_key.factor
            self.series.append(Series(of_key, positions, numbers))
        if main_loss(group.keys) is None:
            self.without_loss.append(positions)

    def add_row(self, row: Row, position: int) -> None:
        """Add the scalars of a single row of the log. `position` is the index of its record."""
        main = main_loss(row.keys)
        for part, text in row.parts:
            for key, is_average, value, unit in values(part, text):
                of_key = meaning(key if unit is None or "(" in key else f"{key} ({unit})", is_main=part == main)
                of_key = of_key.average() if is_average else of_key
                columns = {"name": of_key.name, "unit": of_key.unit, "labels": of_key.labels}
                self.scalars.append((position, columns | {"value": value * of_key.factor}))
        if main is None:
            self.without_loss.append(np.array([position]))

    def add_timers(self, alike: Alike, positions: Integers) -> None:
        """Add the scalars of timer lines with the same timers. `positions` has the index of the record of each line."""
        for column in alike.columns:
            of_timer = timer_meaning(column.key)
            self.series.append(Series(of_timer, positions, column.numbers * of_timer.factor))

    def add_companion(self, companion: Companion, position: int) -> None:
        """Add the scalars and events of a companion line, such as a validation, to the record at `position`."""
        self.scalars += [(position, scalar) for scalar in companion.scalars]
        self.events += [(position, event) for event in companion.events]

    def block(self) -> ImportedBlock:
        """Return the records of the chunk as a block of columns."""
        tables = {}
        if scalars := list(self._scalar_tables()):
            tables["scalars"] = pa.concat_tables(scalars)
        if events := list(self._event_tables()):
            tables["events"] = pa.concat_tables(events, promote_options="default")
        return ImportedBlock(records=len(self.steps), tables=tables)

    def _scalar_tables(self) -> Iterable[pa.Table]:
        if self.series:
            positions = np.concatenate([series.positions for series in self.series])
            sizes = [len(series.positions) for series in self.series]
            found = [series.meaning for series in self.series]
            columns = {
                "name": _coded([of_key.name for of_key in found], sizes),
                "value": pa.array(np.concatenate([series.numbers for series in self.series])),
                "unit": _coded([of_key.unit for of_key in found], sizes),
                "labels": _coded([of_key.labels for of_key in found], sizes),
            }
            yield self._table(positions, columns)
        if self.scalars:
            yield self._listed(self.scalars, ("name", "value", "unit", "labels"))

    def _event_tables(self) -> Iterable[pa.Table]:
        for positions in self.without_loss:
            columns = {name: _coded([text], [len(positions)]) for name, text in _MISSING.items()}
            yield self._table(positions, columns)
        if self.events:
            yield self._listed(self.events, ("type", "severity", "op", "message", "details", "value"))

    def _listed(self, listed: Sequence[tuple[int, Mapping[str, Any]]], names: Sequence[str]) -> pa.Table:
        positions = np.array([position for position, _ in listed], np.int64)
        columns = {}
        for name in names:
            column = [row.get(name) for _, row in listed]
            is_number = name == "value"
            columns[name] = pa.array(column, pa.float64() if is_number else pa.string())
            columns[name] = columns[name] if is_number else columns[name].dictionary_encode()
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


def _nullable(numbers: Integers, arrow_type: pa.DataType) -> pa.Array:
    return pa.array(numbers, pa.int64(), mask=numbers == NO_NUMBER).cast(arrow_type)


def _coded(texts: Sequence[str | None], sizes: Sequence[int]) -> pa.DictionaryArray:
    """Return a dictionary-encoded column that repeats each text in `texts` as often as the number in `sizes` states."""
    distinct = list(dict.fromkeys(text for text in texts if text is not None))
    codes = np.array([-1 if text is None else distinct.index(text) for text in texts], np.int32)
    indices = np.repeat(codes, sizes)
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), pa.array(distinct, pa.string()))


def _group_losses(group: Group) -> Numbers:
    """Return the training loss of each row in `group`, as float64; NaN if the loss is NaN or absent."""
    main = main_loss(group.keys)
    absent = np.full(len(group.lines), np.nan)
    return next((column.numbers for column in group.columns if column.key == main and not column.is_average), absent)


def _row_loss(row: Row) -> float:
    """Return the training loss of a row, or NaN if the row has no loss or its loss is NaN."""
    main = main_loss(row.keys)
    text = next((text for key, text in row.parts if key == main), "")
    return next((value for _, is_average, value, _ in values(LOSS, text) if not is_average), np.nan)
