"""The one reader of scalars for pages, figures and summaries: it reads columns of Parquet files, without SQL.

This takes a fraction of the time of a query. Rows of rollups, and steps that a rank logged twice within an attempt, are
rare: a history with such rows is that of the view `scalar_history`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.datasets import IMPORTED_FROM
from rankscope_storage.connection import Connection
from rankscope_storage.query.column_scan import RowGroups

LOSS: Final = "loss"
LEARNING_RATE: Final = "learning_rate"
GRAD_NORM: Final = "grad_norm"
EVAL_LOSS: Final = "eval_loss"
SPEEDS: Final = (
    "tokens_per_second",
    "samples_per_second",
    "steps_per_second",
    "step_seconds",
)
"""Names of scalars that measure the speed of training. Pages show the first one that the run logged."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One scalar of a run: arrays of equal length, ordered by attempt and by position within the attempt.

    A value is the mean over the ranks and micro-batches of a step; `lowest` and `highest` are their range. `step` is
    the number in the record, or its position in the log if it has none. `cumulative` is the position of the record over
    all epochs and attempts. `time` is in UTC seconds and NaN if unknown. `stands` is false for
    superseded steps, which a later attempt repeated.
    """

    name: str
    attempt: Integers
    step: Integers
    cumulative: Integers
    time: Floats
    value: Floats
    lowest: Floats
    highest: Floats
    stands: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        """Return the number of attempts and steps with a value."""
        return len(self.value)

    def select(self, chosen: npt.NDArray[Any] | slice) -> History:
        """Return the elements that `chosen`, a mask, an array of indices or a slice, selects.

        Columns that are one array, such as value and range of a single rank, remain one.
        """
        found: dict[int, Any] = {}
        for array in (getattr(self, name) for name in _ARRAYS):
            if id(array) not in found:
                found[id(array)] = array[chosen]
        arrays = {name: found[id(getattr(self, name))] for name in _ARRAYS}
        return replace(self, **arrays)

    @property
    def standing(self) -> History:
        """Return the rows that are not superseded: the history itself if none is."""
        return self if self.stands[: 1 if is_constant(self.stands) else None].all() else self.select(self.stands)

    @property
    def is_varied(self) -> bool:
        """Return whether the ranks of any step have different values."""
        return bool((self.highest > self.lowest).any())


def is_constant(array: npt.NDArray[Any]) -> bool:
    """Return whether the array is one value that is repeated without memory."""
    return array.strides == (0,)


def restarts(attempt: Integers) -> Integers:
    """Return the first row of each later attempt."""
    return np.array([], np.int64) if is_constant(attempt) else np.flatnonzero(attempt[1:] != attempt[:-1]) + 1


_ARRAYS: Final = ("attempt", "step", "cumulative", "time", "value", "lowest", "highest", "stands")


def numbered(
    name: str, columns: Mapping[str, Any], labels: str | None, training: Sequence[tuple[int, int, int]] | None
) -> History:
    """Return the history with cumulative positions and superseded steps, by the rules of the view `scalar_history`.

    `training` has attempt, first and last position of the loss of each attempt; None for a run of one attempt.
    """
    attempt, position = columns["attempt"], columns["position"]
    others = {key: values for key, values in columns.items() if key != "position"}
    if training is None:
        return History(name=name, **others, cumulative=position, stands=np.broadcast_to(np.True_, len(position)))
    before = np.zeros(len(attempt), np.int64)
    until = np.full(len(attempt), np.iinfo(np.int64).max)
    spans = _spans(name, columns, labels, training)
    again = {
        number: max(0, spans[number][2] + 1 - spans[later][1])
        for number, later in zip(spans, list(spans)[1:], strict=False)
    }
    total, limit = 0, np.iinfo(np.int64).max
    for number in spans:
        before[attempt == number] = total
        total += again.get(number, 0)
    for number in reversed(spans):
        until[attempt == number] = limit
        limit = min(limit, spans[number][0])
    return History(name=name, **others, cumulative=position + before, stands=position < until)


def _spans(
    name: str, columns: Mapping[str, Any], labels: str | None, training: Sequence[tuple[int, int, int]]
) -> dict[int, tuple[int, int, int]]:
    """Return, by attempt, the position to which it goes back, and its first and last position.

    The loss defines where an attempt begins, unless the scalar does not count the steps of the training: the last
    position of its longest attempt is then below half or above twice that of the loss.
    """
    own: dict[int, tuple[int, int]] = {}
    for number in np.unique(columns["attempt"]).tolist():
        positions = columns["position"][columns["attempt"] == number]
        own[number] = int(positions[0]), int(positions[-1])
    loss = {attempt: (first, last) for attempt, first, last in training}
    common = [number for number in own if number in loss]
    longest = max(common, key=lambda number: own[number][1], default=None)
    is_main = labels is None or "imported_from" not in labels
    follows = name == LOSS or (longest is not None and loss[longest][1] / 2 <= own[longest][1] <= 2 * loss[longest][1])
    if not (is_main and follows):
        loss = {}
    spans = {}
    for number in sorted({*own, *loss}):
        trained = loss.get(number) or own[number]
        back = min(trained[0], own[number][0]) if number in own else trained[0]
        spans[number] = (back, *trained)
    return spans


_SERIES: Final = ("run", "name", "labels")
_ABSENT: Final = {"attempt": 0, "rank": -1, "micro_step": -1}
"""Columns that are often equal in all rows, with the number in place of null."""

_CONSTANT: Final = (*_SERIES, *_ABSENT, "position")
_NUMBERS: Final = ("step", "position", "ts", "value")
_WHOLE_ROWS: Final = 1 << 15
"""Least number of adjacent rows of one series that are read without the columns of names."""


@dataclass(frozen=True, slots=True)
class SeriesRows:
    """Rows of one scalar with one text of labels: arrays of equal length. An array of one value needs no memory."""

    attempt: Integers
    rank: Integers  # -1: none
    micro_step: Integers  # -1: none
    position: Integers
    step: Integers  # of a record without a step, its position; the same array as `position` if all are equal
    time: Floats
    value: Floats

    def select(self, chosen: Any) -> SeriesRows:
        """Return the rows that `chosen`, a mask, an array of indices or a slice, selects."""
        found = {name: getattr(self, name)[chosen] for name in SeriesRows.__slots__ if name != "step"}
        return SeriesRows(**found, step=found["position"] if self.step is self.position else self.step[chosen])


@dataclass(slots=True)
class ScalarRows:
    """Rows by run and name, then by labels."""

    parts: dict[tuple[str, str], dict[str, list[SeriesRows]]] = field(default_factory=dict)

    def main_labels(self, run: str, name: str) -> str | None:
        """Return the first labels of a scalar, empty for none; None if the run does not have it.

        Scalars of logs that were imported into a live run are kept apart.
        """
        return min(filter(is_main, self.parts.get((run, name), ())), default=None)

    def main(self, run: str, name: str, rank: int | None = None) -> SeriesRows | None:
        """Return the rows of the first labels of a scalar, of all ranks or one; None without any."""
        labels = self.main_labels(run, name)
        return None if labels is None else self.series(run, name, labels, rank)

    def series(self, run: str, name: str, labels: str, rank: int | None = None) -> SeriesRows | None:
        """Return the rows of a scalar with exactly these labels, of all ranks or one; None without any."""
        parts = self.parts.get((run, name), {}).get(labels)
        if not parts:
            return None
        rows = parts[0]
        if len(parts) > 1:
            rows = _in_one(parts, sum(len(part.value) for part in parts))
            parts[:] = [rows]  # the next call needs no copy
        if rank is not None:
            rows = rows.select(rows.rank == rank)
        return rows if len(rows.step) else None

    def add(self, run: str, name: str, labels: str | None, rows: SeriesRows) -> None:
        self.parts.setdefault((run, name), {}).setdefault(labels or "", []).append(rows)


def is_main(labels: str) -> bool:
    """Return whether these labels are not those of a log that was imported into a live run."""
    return f'"{IMPORTED_FROM}":' not in labels


def _in_one(parts: Iterable[SeriesRows], rows: int) -> SeriesRows:
    """Return adjacent parts with at most `rows` rows as one. Each part is copied before the next one is read."""
    position, time, value = np.empty(rows, np.int64), np.empty(rows), np.empty(rows)
    step, at = position, 0
    repeated: dict[str, list[Integers]] = {name: [] for name in _ABSENT}
    for part in parts:
        own = slice(at, at + len(part.value))
        if step is position and part.step is not part.position:
            step = position.copy()
        position[own], time[own], value[own] = part.position, part.time, part.value
        if step is not position:
            step[own] = part.step
        for name, arrays in repeated.items():
            arrays.append(getattr(part, name))
        at = own.stop
    others = {name: _joined(arrays) for name, arrays in repeated.items()}
    found = SeriesRows(**others, position=position, step=step, time=time, value=value)
    return found if at == rows else found.select(slice(at))


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    known = [one for one in arrays if len(one)]
    if known and all(is_constant(one) and one[0] == known[0][0] for one in known):
        return np.broadcast_to(known[0][0], sum(map(len, known)))
    return np.concatenate(arrays)


def read_rows(connection: Connection, runs: Collection[str], names: Collection[str]) -> ScalarRows:
    """Return the rows of the scalars `names` of `runs`."""
    found, wanted = ScalarRows(), sorted(runs)
    if not wanted:
        return found
    equal = {"run": wanted, "name": sorted(names)}
    groups = connection.row_groups("scalars", wanted, equal, _CONSTANT)
    whole: dict[tuple[str, str, str | None], list[tuple[Mapping[str, Any], RowGroups]]] = {}
    mixed: list[Any] = []
    for constants, own in groups.stretches(_CONSTANT):
        # Rows of one series and attempt that are not few
        if own.rows >= _WHOLE_ROWS and all(one in constants for one in (*_SERIES, *_ABSENT)):
            whole.setdefault((constants["run"], constants["name"], constants["labels"]), []).append((constants, own))
        else:
            mixed += own.groups
    for key, stretches in whole.items():
        rows = _in_one(_parts(stretches), sum(own.rows for _, own in stretches))
        if len(rows.value):
            found.add(*key, rows)
    _add_mixed(RowGroups(tuple(mixed), groups.schema), set(wanted), names, found)
    return found


def _parts(stretches: Iterable[tuple[Mapping[str, Any], RowGroups]]) -> Iterator[SeriesRows]:
    """Yield the rows of row groups that contain one series only."""
    for constants, groups in stretches:
        for batch in groups.batches([one for one in _NUMBERS if one not in constants]):
            yield _rows(_complete(batch), constants)


def _complete(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of a batch that have a position and a value."""
    place = "position" if "position" in batch.schema.names else "step"
    position, value = batch.column(place), batch.column("value")
    if place == "position" and position.null_count:
        position = pc.coalesce(position, batch.column("step"))
        batch = batch.set_column(batch.schema.get_field_index(place), place, position)
    if not position.null_count and not value.null_count:
        return batch
    return batch.filter(pc.and_(position.is_valid(), value.is_valid()))


def _add_mixed(groups: RowGroups, runs: Collection[str], names: Collection[str], found: ScalarRows) -> None:
    """Add the rows of row groups that may contain several series."""
    constants = groups.constants((*_ABSENT, "position"))
    for batch in groups.batches([one for one in (*_SERIES, *_ABSENT, *_NUMBERS) if one not in constants]):
        _add(batch, runs, names, constants, found)


def _add(
    batch: pa.RecordBatch,
    runs: Collection[str],
    names: Collection[str],
    constants: Mapping[str, Any],
    found: ScalarRows,
) -> None:
    """Add the rows of a batch to `found`."""
    batch = _complete(batch)
    named = [batch.column(one) for one in _SERIES]
    codes = [_filled(column.indices, -1) for column in named]
    texts = [column.dictionary.to_pylist() for column in named]
    changes = np.logical_or.reduce([one[1:] != one[:-1] for one in codes])
    begins = np.append(0, np.flatnonzero(changes) + 1)[: batch.num_rows]
    ends = np.append(begins[1:], batch.num_rows)
    is_wanted = np.ones(len(begins), bool)
    for code, known, wanted in zip(codes, texts, (runs, names), strict=False):
        is_wanted &= np.array([one in wanted for one in known], bool)[code[begins]]
    if not is_wanted.any():
        return
    rows = _rows(batch, constants)
    for first, last in zip(begins[is_wanted].tolist(), ends[is_wanted].tolist(), strict=True):
        run, name, labels = (
            None if one[first] < 0 else known[one[first]] for one, known in zip(codes, texts, strict=True)
        )
        found.add(run or "", name or "", labels, rows.select(slice(first, last)))


def _rows(batch: pa.RecordBatch, constants: Mapping[str, Any]) -> SeriesRows:
    """Return the rows of a batch, which all have a position and a value."""
    attempt, rank, micro = (
        _repeated(constants[name], absent, batch.num_rows) if name in constants else _filled(batch.column(name), absent)
        for name, absent in _ABSENT.items()
    )
    seconds = _microseconds(batch) / 1e6  # null becomes NaN
    value = batch.column("value").to_numpy(zero_copy_only=False)
    step = batch.column("step")
    if "position" not in batch.schema.names:
        position = steps = _filled(step, 0)
    else:
        position = _filled(batch.column("position"), 0)
        steps = _filled(pc.coalesce(step, batch.column("position")), 0)
    return SeriesRows(attempt, rank, micro, position, steps, seconds, value)


def _repeated(value: int | None, absent: int, rows: int) -> Integers:
    return np.broadcast_to(np.int64(absent if value is None else value), rows)


def _microseconds(batch: pa.RecordBatch) -> npt.NDArray[Any]:
    """Return the times of a batch, NaN where the time is null."""
    found: npt.NDArray[Any] = batch.column("ts").cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def _filled(column: Any, absent: int) -> Integers:
    known = column.fill_null(absent) if column.null_count else column
    found: Integers = known.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found


_ATTEMPT: Final = 1 << 40
"""Distance of the keys of two attempts, which is larger than any step."""


def main_series(
    connection: Connection, run: str, names: Collection[str], rank: int | None = None, rows: ScalarRows | None = None
) -> dict[str, History]:
    """Return the main series of the scalars `names` that `run` has, of all ranks or one.

    `rows` has the rows of `names`, if they were read before.
    """
    rows = rows or read_rows(connection, [run], names)
    labels = {name: rows.main_labels(run, name) for name in names}
    if rank is None:
        labels |= dict(_rolled_up(connection, run, [name for name, text in labels.items() if text is None]))
    chosen = [(name, text) for name, text in labels.items() if text is not None]
    return {name: one for (name, _), one in all_series(connection, run, chosen, rank, rows).items()}


def all_series(
    connection: Connection,
    run: str,
    series: Collection[tuple[str, str]],
    rank: int | None = None,
    rows: ScalarRows | None = None,
) -> dict[tuple[str, str], History]:
    """Return the series of `run` by name and labels that have rows, of all ranks or one.

    Labels are empty for a scalar without labels. `rows` has the rows of all names, if they were read before.
    """
    rows = rows or read_rows(connection, [run], {name for name, _ in series})
    has_rollups = rank is None and bool(connection.files("scalar_rollups", run=run))
    training: list[tuple[int, int, int]] | None = None
    histories = {}
    for name, labels in series:
        found = rows.series(run, name, labels, rank)
        columns, has_repeats = ({}, False) if found is None else by_step(found)
        if has_rollups or (has_repeats and rank is None):
            histories[name, labels] = _of_view(connection, run, name, labels)
        elif columns:
            if training is None and columns["attempt"].any():
                training = _training(connection, run, rows)
            own = training if columns["attempt"].any() else None
            histories[name, labels] = numbered(name, columns, labels or None, own)
    return {key: one for key, one in histories.items() if len(one)}


_VIEW: Final = """\
SELECT attempt::BIGINT AS attempt, coalesce(step, cumulative_step) AS step, cumulative_step AS cumulative,
  epoch(ts) AS time, value, lowest, highest, stands
FROM scalar_history WHERE run = $run AND name = $name AND coalesce(labels, '') = $labels
ORDER BY attempt, cumulative_step"""
_ROLLED_UP: Final = """\
SELECT name, coalesce(labels, '') AS labels FROM scalar_rollups
WHERE run = $run AND name IN (SELECT unnest($names)) AND step IS NOT NULL GROUP BY ALL ORDER BY ALL"""


def _of_view(connection: Connection, run: str, name: str, labels: str) -> History:
    columns = columns_of(connection.query(_VIEW, {"run": run, "name": name, "labels": labels}))
    return History(name=name, **columns | {"stands": columns["stands"].astype(np.bool_)})


def columns_of(rows: pa.Table) -> dict[str, Any]:
    """Return the columns of a query by name as arrays: times and values as double, in which null is NaN."""
    arrays = {name: rows[name].to_numpy(zero_copy_only=False) for name in rows.column_names}
    return arrays | {name: arrays[name].astype(np.float64) for name in ("time", "value", "lowest", "highest")}


def _rolled_up(connection: Connection, run: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield name and first labels of those scalars of `names` of which `run` has only rollups."""
    if names and connection.files("scalar_rollups", run=run):
        found = connection.query(_ROLLED_UP, {"run": run, "names": list(names)}).to_pylist()
        yield from ((row["name"], row["labels"]) for row in reversed(found) if is_main(row["labels"]))


def arrival_history(name: str, rows: pa.Table) -> History:
    """Return the rows of a query as a history whose positions are those in the order of arrival."""
    columns = columns_of(rows)
    later = np.minimum.accumulate(np.append(columns["step"], np.iinfo(np.int64).max)[::-1])[::-1][1:]
    return History(name=name, **columns, cumulative=np.arange(len(rows)), stands=columns["step"] < later)


# A record of the machine has no step: its place is the last step before it of the same process.
_MEASURED: Final = """\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, own.step AS step, epoch(max(ts)) AS time, avg(value) AS value,
  min(value) AS lowest, max(value) AS highest
FROM scalars ASOF JOIN (
  SELECT incarnation, seq, max(step) AS step FROM scalars WHERE run = $run AND name = 'step_seconds' GROUP BY ALL
) AS own USING (incarnation, seq)
WHERE scalars.run = $run AND scalars.name = $name AND coalesce(labels, '') = $labels AND value IS NOT NULL
  AND (rank = $rank OR $rank IS NULL)
GROUP BY coalesce(attempt, 0), own.step ORDER BY 1, 2"""


def read_measured(connection: Connection, run: str, name: str, labels: str, rank: int | None) -> History:
    """Return a series of which the records have no step, such as those of the machine."""
    columns = columns_of(connection.query(_MEASURED, {"run": run, "name": name, "labels": labels, "rank": rank}))
    columns["position"] = columns["step"]
    training = _training(connection, run, ScalarRows()) if columns["attempt"].any() else None
    return numbered(name, columns, labels or None, training)


def _training(connection: Connection, run: str, rows: ScalarRows) -> list[tuple[int, int, int]]:
    """Return attempt, first and last position of the loss of each attempt; `rows` may have the losses."""
    known = rows if (run, LOSS) in rows.parts else read_rows(connection, [run], [LOSS])
    series = known.parts.get((run, LOSS), {})
    losses = [one for labels, parts in series.items() if is_main(labels) for one in parts]
    if not losses:
        return []
    attempt, position = (np.concatenate([getattr(one, name) for one in losses]) for name in ("attempt", "position"))
    found = []
    for number in range(int(attempt.min()), int(attempt.max()) + 1):
        own = position[attempt == number]
        if len(own):
            found.append((number, int(own.min()), int(own.max())))
    return found


def by_step(rows: SeriesRows) -> tuple[dict[str, Any], bool]:
    """Return mean, lowest and highest value of each attempt and position, and whether a rank logged one twice."""
    has_one = all(is_constant(one) for one in (rows.attempt, rows.rank, rows.micro_step))
    if has_one and (rows.position[1:] > rows.position[:-1]).all():
        return _alone(rows, {name: getattr(rows, name) for name in _PLACE}), False
    key = rows.attempt * _ATTEMPT + rows.position
    if not (key[1:] > key[:-1]).all():
        order = np.argsort(key, kind="stable")  # fast, because the rows are a few sorted ranges
        rows = rows.select(order)
        key = key[order]
    begins = np.append(0, np.flatnonzero(key[1:] != key[:-1]) + 1)
    columns = {name: getattr(rows, name)[begins] for name in _PLACE}
    if len(begins) == len(key):
        return _alone(rows, columns), False
    counts = np.diff(np.append(begins, len(key)))
    parts = len(np.unique(rows.rank)) * len(np.unique(rows.micro_step))
    means = {
        "time": np.fmax.reduceat(rows.time, begins),
        "value": np.add.reduceat(rows.value, begins) / counts,
        "lowest": np.minimum.reduceat(rows.value, begins),
        "highest": np.maximum.reduceat(rows.value, begins),
    }
    return columns | means, bool(counts.max() > parts)


_PLACE: Final = ("attempt", "position", "step")


def _alone(rows: SeriesRows, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of rows of which each has an attempt and position of its own."""
    return {**columns, "time": rows.time, "value": rows.value, "lowest": rows.value, "highest": rows.value}


def pairs(connection: Connection, dataset: str, run: str, first: str, second: str) -> set[tuple[str, str]]:
    """Return the different pairs of two columns of names in the rows of `run`; null is an empty text."""
    groups, mixed = connection.row_groups(dataset, [run], {"run": [run]}, (first, second)).split_constant(
        ("run", first, second)
    )
    found = {(own[first] or "", own[second] or "") for own, _ in groups.stretches((first, second))}
    for batch in mixed.batches(["run", first, second]):
        run_, *columns = (batch.column(name) for name in ("run", first, second))
        names, others = ([*column.dictionary.to_pylist(), ""] for column in columns)
        at, behind = (column.indices.fill_null(len(column.dictionary)).to_numpy() for column in columns)
        numbers = at * len(others) + behind
        if run_.dictionary.to_pylist() != [run]:
            numbers = numbers[run_.indices.to_numpy() == run_.dictionary.index(run).as_py()]
        for number in np.flatnonzero(np.bincount(numbers, minlength=len(names) * len(others))).tolist():
            found.add((names[number // len(others)], others[number % len(others)]))
    return found
