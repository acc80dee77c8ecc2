"""The steps of a log: the step of each record, the attempts that follow from the steps, and the progress of the run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_ingest.importers.common.decisions import Choices
from rankscope_ingest.importers.common.log_names import BATCH, EPOCH, step_rank
from rankscope_ingest.importers.common.records import Record
from rankscope_ingest.importers.common.row_layout import Rows

_ALIVE_RECORDS: Final = 4
"""A stream of ascending steps ends when this number of consecutive records did not belong to it."""

_ALIVE_INTERLEAVED: Final = 100
"""A stream ends when this number of consecutive records did not belong to it, in a log with alternating streams."""

_REMEMBERED_RECORDS: Final = 1000
"""An ended stream may continue with a record of a similar value, unless this number of records came in between."""

_MAX_STREAMS: Final = 16
_OTHER_WRITER: Final = 0.1
"""Minimum relative difference between the values of two consecutive records that suggests two writers.

The values of two consecutive records of one writer rarely differ by more than this.
"""

_MAX_WRITERS: Final = 10_000


@dataclass(slots=True)
class _Stream:
    attempt: int
    last: int
    interval: int | None
    written: int  # number of its latest record among the records with a step
    epoch: float | None = None
    value: float | None = None  # first number of its latest record

    def expects(self, interval: int | None) -> int | None:
        usual = self.interval or interval
        return None if usual is None else self.last + usual

    def distance(self, value: float | None) -> float:
        if value is None or self.value is None or not math.isfinite(value) or not math.isfinite(self.value):
            return 0.0
        return abs(value - self.value) / (abs(value) + abs(self.value) or 1.0)


@dataclass(slots=True)
class _RankStreams:
    alive: list[_Stream] = field(default_factory=list)  # the stream of the latest record comes last
    writers: dict[str, _Stream] = field(default_factory=dict)
    records: int = 0
    attempts: int = 0
    interval: int | None = None
    are_interleaved: bool = False

    def attempt(self, step: int | None, epoch: float | None, writer: str | None, value: float | None) -> int:
        current = self.alive[-1] if self.alive else None
        if step is None:
            own = current if writer is None else self.writers.get(writer, current)
            return own.attempt if own else 0
        self.records += 1
        if current and len(self.alive) == 1 and writer is None and step == current.expects(None):
            stream = current  # most records: the only stream continues
        elif writer is None:
            stream = self._in_later_epoch(current, step, epoch) or self._stream_of(step, value)
        else:
            stream = self._stream_of_writer(writer, step, epoch)
        self.are_interleaved = self.are_interleaved or (stream is not current and stream.written < self.records)
        stream.epoch = stream.epoch if epoch is None else epoch
        if step > stream.last:
            self.interval = stream.interval = step - stream.last
        stream.last, stream.written, stream.value = step, self.records, value
        if len(self.alive) == 1 and stream is current:
            return stream.attempt
        oldest = self.records - _REMEMBERED_RECORDS
        others = [other for other in self.alive if other is not stream and other.written >= oldest]
        self.alive = [*others[1 - _MAX_STREAMS :], stream]
        return stream.attempt

    def _in_later_epoch(self, stream: _Stream | None, step: int, epoch: float | None) -> _Stream | None:
        if stream is None or epoch is None or stream.epoch is None:
            return None
        return stream if epoch > stream.epoch and step < stream.last else None

    def _is_alive(self, stream: _Stream) -> bool:
        return self.records - stream.written <= (_ALIVE_INTERLEAVED if self.are_interleaved else _ALIVE_RECORDS)

    def _new(self, step: int) -> _Stream:
        self.attempts += 1
        return _Stream(self.attempts - 1, step, None, self.records)

    def _stream_of_writer(self, writer: str, step: int, epoch: float | None) -> _Stream:
        stream = self.writers.get(writer)
        if stream is None or (step < stream.last and not self._in_later_epoch(stream, step, epoch)):
            stream = self._new(step)
            if len(self.writers) < _MAX_WRITERS:
                self.writers[writer] = stream
        return stream

    def _stream_of(self, step: int, value: float | None) -> _Stream:
        current = self.alive[-1] if self.alive else None
        expecting = [other for other in self.alive[:-1] if step == other.expects(self.interval)]
        if current and step in {current.last, current.expects(self.interval)}:
            return self._of_equal(current, expecting, step, value)
        if close := [other for other in expecting if self._is_alive(other) or _is_by(other, current, value)]:
            return min(reversed(close), key=lambda other: other.distance(value))
        if current and step > current.last and current.interval and not self.are_interleaved:
            return current
        # A stream with one record has no interval: the stream with the nearest lower step continues.
        behind = [other for other in self.alive if self._is_alive(other) and other.last < step]
        if current and behind and (step > current.last or self.are_interleaved):
            return max(reversed(behind), key=lambda other: other.last)
        return self._new(step)

    def _of_equal(self, current: _Stream, expecting: list[_Stream], step: int, value: float | None) -> _Stream:
        """Return the stream to which a record with `step` and `value` belongs: `current` or one of `expecting`.

        `current` is the stream of the previous record; the streams in `expecting` have `step` as their next step.
        """
        if not expecting:
            return current
        nearest = min(expecting, key=lambda other: other.distance(value))
        if _is_by(nearest, current, value):
            return nearest
        is_near = step == current.last or nearest.distance(value) <= current.distance(value)
        return nearest if self.are_interleaved and self._is_alive(nearest) and is_near else current


def _is_by(other: _Stream, current: _Stream | None, value: float | None) -> bool:
    """Return whether `value`, the first number of a record, shows that the record belongs to the stream `other`.

    It does if `value` is far from the last value of the stream `current` and much nearer to that of `other`.
    """
    far = 0.0 if current is None else current.distance(value)
    return far > _OTHER_WRITER and other.distance(value) < far / 5


class StepStreams:
    """Derives the attempt of each record of a log that does not contain attempts.

    A step below the previous step begins a new stream of steps, and each stream is one attempt. An exception is a step
    that continues another stream: that stream has a recent record, and its last step plus its usual interval is this
    step. A restart is therefore a new attempt from its first step on, and alternating lines of two processes that write
    one file are two attempts. If several streams expect a step, the record belongs to the stream whose last value is
    nearest. A repeated step belongs to the same attempt; both records are stored, in the order of the log.

    If the records contain the id of their writer, each writer has streams of its own. Each rank is counted separately.
    """

    def __init__(self) -> None:
        self._ranks: dict[int | None, _RankStreams] = {}

    @property
    def are_interleaved(self) -> bool:
        """True if records of several streams of one rank alternate in the log."""
        return any(streams.are_interleaved for streams in self._ranks.values())

    def attempt(
        self,
        rank: int | None,
        step: int | None,
        epoch: float | None = None,
        writer: str | None = None,
        value: float | None = None,
    ) -> int:
        """Return the attempt, from 0, of the next record. A record without a step belongs to the latest stream.

        A lower step with a higher `epoch` is no restart: the log counts steps within epochs. `writer` is the id of the
        process or host that wrote the record, and `value` is the first number of the record.
        """
        streams = self._ranks.get(rank)
        if streams is None:
            streams = self._ranks[rank] = _RankStreams()
        return streams.attempt(step, epoch, writer, value)

    def attempts(self, rows: Rows) -> list[int]:
        """Return the attempts of the next records, which have no writer."""
        count, steps = len(rows), rows.steps
        streams = self._ranks.get(rows.ranks[0])
        only = streams.alive[0] if streams is not None and len(streams.alive) == 1 else None
        if streams is None or only is None or only.interval is None or len({*rows.ranks}) > 1:
            return [*map(self.attempt, rows.ranks, rows.steps, rows.epochs, [None] * count, rows.firsts)]
        first, interval = only.last + only.interval, only.interval
        if steps != [*range(first, first + count * interval, interval)]:
            return [*map(self.attempt, rows.ranks, rows.steps, rows.epochs, [None] * count, rows.firsts)]
        streams.records += count  # the only stream continues
        streams.interval = interval
        only.last, only.written, only.value = first + (count - 1) * interval, streams.records, rows.firsts[-1]
        only.epoch = only.epoch if rows.epochs[-1] is None else rows.epochs[-1]
        return [only.attempt] * count


class StepCounter:
    """Selects the step of each record of one log, and counts the records that contradict the decision `choices`.

    `contradictions` has the number of these records for each contradiction.
    """

    def __init__(self, choices: Choices, contradictions: Counter[str]) -> None:
        self._choices = choices
        self._contradictions = contradictions
        self._rising: Counter[str] = Counter()  # counters that rise where the step falls
        self._last: dict[tuple[Any, ...], dict[str, int]] = {}  # per rank and writer, the last counters

    def key_of(self, record: Record) -> str | None:
        """Return the name of the counter that is the step of `record`, or None if the record has no step.

        The decision about the log gives the order of the counters; a counter that it does not contain is the last.
        """
        choices = self._choices
        if len(record.counters) == 1 and not record.plans and not choices.refused:
            return next(iter(record.counters))
        if EPOCH in choices.steps and (epoch := record.epoch()) is not None and epoch.is_integer():
            record.counters.setdefault(EPOCH, int(epoch))
        for key, value in record.plans.items():
            if key in choices.steps and value is not None:
                record.counters.setdefault(key, value)
        allowed = [key for key in record.counters if key not in choices.refused]
        if not allowed:
            return None
        preferred = [key for key in choices.steps if key in allowed]
        chosen = preferred[0] if preferred else min(allowed, key=step_rank)
        if len(record.counters) > 1:
            self._check(record, chosen)
        return chosen

    def is_plan(self, chosen: str | None) -> bool:
        """Return whether the total of the counter `chosen` is the planned number of steps of the run."""
        return chosen is not None and chosen not in {BATCH, EPOCH} and not self._choices.is_within_epoch

    def revised(self) -> Choices:
        """Return the decision with the counter as the step that rises where the chosen one falls, if there is one."""
        if not self._rising:
            return self._choices
        [(key, _)] = self._rising.most_common(1)
        refused = {*self._choices.steps, *self._choices.refused} - {key}
        return dataclasses.replace(self._choices, steps=(key,), refused=tuple(sorted(refused)), is_within_epoch=False)

    def _check(self, record: Record, chosen: str) -> None:
        """Count a record that contradicts the choice of the step: the step falls and another counter rises."""
        before = self._last.get(record.stream, {})
        if record.counters[chosen] < before.get(chosen, 0):
            rising = [key for key, value in record.counters.items() if value > before.get(key, value)]
            self._rising.update(rising[:1])
            self._contradictions.update(f"the step is {chosen}, but {key} rises where it falls" for key in rising[:1])
        self._last[record.stream] = record.counters


class TrainingProgress:
    """The last steps of a run, its planned steps, and the end that its log reports."""

    def __init__(self) -> None:
        self.planned_steps: int | None = None
        self.last_step: int | None = None
        self.end: str | None = None  # reason for the state completed
        self.has_advanced = False
        """True if the last object is a row of training, and its step is not that of the row of its rank before it.

        A row of training without a step is one, too. Checkpoints, evaluations and summaries are none.
        """
        self.last_steps: dict[int | None, int | None] = {}  # per rank, the step of the last row of training

    def step(self, step: int) -> None:
        """Update the last step, and the end if it is the last planned one."""
        self.last_step = step if self.last_step is None else max(step, self.last_step)
        if self.planned_steps and step >= self.planned_steps:
            self.end = self.end or f"the last planned step, {step}, was reached"

    def row(self, rank: int | None, step: int | None) -> None:
        """Set `has_advanced` for a row of training, after which an earlier end is none."""
        self.has_advanced = step is None or self.last_steps.get(rank) != step
        if self.has_advanced and not (self.planned_steps and step is not None and step >= self.planned_steps):
            self.end = None  # training continued
        self.last_steps[rank] = step

    def rows(self, rows: Rows) -> None:
        """Update the progress for rows of training, in order."""
        ranks, steps, totals = rows.ranks, rows.steps, {*rows.planned}
        planned = next(iter(totals)) or self.planned_steps
        known = [step for step in steps if step is not None]
        if len(totals) == len({*ranks}) == 1 and not self.end and known:
            last = max(known)
            if not planned or last < planned:  # no row is the end of the run: the last two rows suffice
                self.planned_steps = planned
                self.step(last)
                self.last_steps[ranks[0]] = steps[-2] if len(steps) > 1 else self.last_steps.get(ranks[0])
                self.row(ranks[0], steps[-1])
                return
        for rank, step, total in zip(ranks, steps, rows.planned, strict=True):
            self.planned_steps = total or self.planned_steps
            if step is not None:
                self.step(step)
            self.row(rank, step)
