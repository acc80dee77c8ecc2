"""One scalar of a run over all its attempts, as arrays with one element per attempt and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
