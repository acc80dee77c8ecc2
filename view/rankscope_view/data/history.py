"""Read one scalar of a run over all its attempts, as arrays with one element per attempt and step.

The arrays have the content of the view `scalar_history`. For runs without rollups in which no rank logged a step twice
within an attempt, this module calculates them from raw rows, which takes a tenth of the time of the view. In all other
cases it reads the view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_storage.connection import Connection
from rankscope_storage.sql.scalar_history import is_main_source

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
_OF_SCALAR: Final = f"""\
run = $run AND name = $name{{rank}} AND value IS NOT NULL AND labels IS NOT DISTINCT FROM $labels
  AND position IS NOT NULL
  AND ({is_main_source()} OR contains(coalesce($labels, ''), 'imported_from'))"""

_LABELS: Final = f"""\
SELECT name, labels FROM scalars WHERE run = $run AND name IN (SELECT unnest($names)) AND {is_main_source()}
GROUP BY ALL ORDER BY name, labels NULLS FIRST"""

_FACTS: Final = f"""\
SELECT count(*) AS "rows", min(rank) IS NOT DISTINCT FROM max(rank) AND count(micro_step) = 0 AS is_single,
  count(DISTINCT rank) * greatest(count(DISTINCT micro_step), 1) AS parts
FROM scalars WHERE {_OF_SCALAR}"""

_ROWS: Final = f"""\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, position, coalesce(step, position) AS step,
  epoch(ts) AS time, value, value AS lowest, value AS highest, 1::BIGINT AS parts
FROM scalars WHERE {_OF_SCALAR}"""

_STEPS: Final = f"""\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, position, coalesce(min(step), position) AS step,
  epoch(max(ts)) AS time, avg(value) AS value, min(value) AS lowest, max(value) AS highest, count(*) AS parts
FROM {{source}} WHERE {_OF_SCALAR} GROUP BY coalesce(attempt, 0), position"""

# A record of the machine has no step: its place is the last step before it of the same process.
_MEASURED: Final = """\
(SELECT scalars.* REPLACE (own.step AS step, own.step AS position) FROM scalars ASOF JOIN (
  SELECT incarnation, seq, max(step) AS step FROM scalars WHERE run = $run AND name = 'step_seconds' GROUP BY ALL
) AS own USING (incarnation, seq) WHERE scalars.run = $run AND scalars.name = $name)"""

_VIEW: Final = """\
SELECT attempt::BIGINT AS attempt, cumulative_step AS position, coalesce(step, cumulative_step) AS step,
  epoch(ts) AS time, value, lowest, highest, cumulative_step AS cumulative, stands
FROM scalar_history WHERE run = $run AND name = $name AND labels IS NOT DISTINCT FROM $labels
ORDER BY attempt, cumulative_step"""

_TRAINING: Final = f"""\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, min(position) AS first, max(position) AS last FROM scalars
WHERE run = $run AND name = 'loss' AND value IS NOT NULL AND position IS NOT NULL AND {is_main_source()}
GROUP BY ALL ORDER BY 1"""

_HAS_ROLLUPS: Final = "SELECT 1 AS found FROM scalar_rollups WHERE run = $run AND name IN ($name, 'loss') LIMIT 1"


def main_labels(connection: Connection, run: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return the labels of the main series of each scalar in `names` that `run` has: no labels, or else the first."""
    rows = connection.query(_LABELS, {"run": run, "names": list(names)}).to_pylist()
    return {row["name"]: row["labels"] for row in reversed(rows)}


def read_history(
    connection: Connection, run: str, name: str, labels: str | None = None, rank: int | None = None
) -> History:
    """Return the scalar `name` of `run` with exactly these `labels`, of all ranks or one. It may have no rows.

    Of one rank, there are only raw rows, because rollups combine ranks.
    """
    parameters = {"run": run, "name": name, "labels": labels}
    own = "" if rank is None else f" AND rank = {rank}"
    with connection.pinned():
        facts = connection.query(_FACTS.format(rank=own), parameters).to_pylist()[0]
        of_run = {"run": run, "name": name}
        if (
            rank is None
            and connection.files("scalar_rollups", run=run)
            and connection.query(_HAS_ROLLUPS, of_run).num_rows
        ):
            return _from_view(connection, parameters)
        has_steps = facts["rows"] > 0
        chosen = _ROWS if has_steps and facts["is_single"] and rank is None else _STEPS
        source = "scalars" if has_steps else _MEASURED
        rows = _sorted(connection.query(chosen.format(rank=own, source=source), parameters))
        parts = rows["parts"].to_numpy()
        table = _columns(rows)
        if has_steps and rank is None and ((parts > facts["parts"]).any() or _repeats(table)):
            return _from_view(connection, parameters)
        training = None
        if table["attempt"].size and table["attempt"].any():
            found = connection.query(_TRAINING, {"run": run}).to_pylist()
            training = [(row["attempt"], row["first"], row["last"]) for row in found]
    return numbered(name, table, labels, training)


def _sorted(rows: pa.Table) -> pa.Table:
    """Return `rows` by attempt and position. Rows of one rank usually have this order, and a check is cheaper."""
    attempt, position = (rows[name].to_numpy() for name in ("attempt", "position"))
    later = (np.diff(attempt) > 0) | ((np.diff(attempt) == 0) & (np.diff(position) >= 0))
    return rows if later.all() else rows.take(np.lexsort((position, attempt)))


def _from_view(connection: Connection, parameters: Mapping[str, Any]) -> History:
    rows = connection.query(_VIEW, parameters)
    columns = _columns(rows)
    cumulative = columns.pop("position")
    stands = rows["stands"].to_numpy(zero_copy_only=False).astype(np.bool_)
    return History(name=parameters["name"], **columns, cumulative=cumulative, stands=stands)


def _columns(rows: pa.Table) -> dict[str, Any]:
    """Return the columns of a query as arrays; an absent time becomes NaN."""
    whole = {name: rows[name].to_numpy().astype(np.int64, copy=False) for name in ("attempt", "position", "step")}
    names = ("time", "value", "lowest", "highest")
    return whole | {name: rows[name].to_numpy(zero_copy_only=False).astype(np.float64, copy=False) for name in names}


def _repeats(columns: Mapping[str, Any]) -> bool:
    """Return whether two rows, ordered by attempt and position, have the same attempt and position."""
    attempt, position = columns["attempt"], columns["position"]
    return bool(((attempt[1:] == attempt[:-1]) & (position[1:] == position[:-1])).any())


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
