"""Which attempt a step belongs to, in logs whose writers do not say: restarts, and two writers of one file.

The rule: a step smaller than the one before starts a new stream, unless another stream that was written to a moment ago
goes on with exactly this step. So a restart is a new attempt from its first step on; lines of two writers that
alternate come apart into two attempts; the same step twice stays in one attempt, both rows kept, the later one last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class AttemptCounter:
    """Counts restarts per stream, so that interleaved ranks never look like one.

    `attempts` takes many rows at once, in the order of the log; what it remembers between calls is the last row of each
    stream. A row that repeats the step before it with the very same `signature` was printed twice, not run twice.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float, int]] = {}  # step, signature, attempt

    def attempts(self, streams: Integers, steps: Integers, signatures: npt.NDArray[np.float64]) -> Integers:
        """Return the attempt, from 0, of each row. A NaN signature equals no other."""
        found = np.zeros(len(steps), np.int64)
        for stream in np.unique(streams):
            chosen = np.flatnonzero(streams == stream)
            found[chosen] = self._of_stream(int(stream), steps[chosen], signatures[chosen])
        return found

    def _of_stream(self, stream: int, steps: Integers, signatures: npt.NDArray[np.float64]) -> Integers:
        known = self._last.get(stream)
        before = (steps[0] - 1, np.nan, 0) if known is None else known
        previous = np.concatenate([[before[0]], steps[:-1]])
        same = signatures == np.concatenate([[before[1]], signatures[:-1]])
        again = (steps < previous) | ((steps == previous) & ~same)
        found: Integers = np.cumsum(again) + before[2]
        self._last[stream] = (int(steps[-1]), float(signatures[-1]), int(found[-1]))
        return found


_ALIVE_RECORDS: Final = 4
"""A stream that has not been written to for so many records is taken to have ended."""


@dataclass(slots=True)
class _Stream:
    attempt: int
    last: int
    interval: int | None
    written: int  # number of its latest record
    epoch: float | None = None

    def expects(self, interval: int | None) -> int | None:
        usual = self.interval or interval
        return None if usual is None else self.last + usual


class StepStreams:
    """The streams of one log; ranks are kept apart."""

    def __init__(self) -> None:
        self._ranks: dict[int | None, _RankStreams] = {}

    def attempt(self, rank: int | None, step: int | None, epoch: float | None = None) -> int:
        """Return the attempt, from 0, of the next record; without a step it belongs to the stream written to last.

        Steps that begin again with a later `epoch` are counted within epochs: no restart.
        """
        streams = self._ranks.setdefault(rank, _RankStreams())
        return streams.attempt(step, epoch)


class _RankStreams:
    def __init__(self) -> None:
        self._alive: list[_Stream] = []  # the one written to last comes last
        self._records = 0
        self._attempts = 0
        self._interval: int | None = None

    def attempt(self, step: int | None, epoch: float | None) -> int:
        self._records += 1
        if step is None:
            return self._alive[-1].attempt if self._alive else 0
        stream = self._in_later_epoch(step, epoch) or self._stream_of(step)
        stream.epoch = stream.epoch if epoch is None else epoch
        if step > stream.last:
            self._interval = stream.interval = step - stream.last
        stream.last, stream.written = step, self._records
        self._alive = [other for other in self._alive if other is not stream and self._is_alive(other)]
        self._alive.append(stream)
        return stream.attempt

    def _nearest_before(self, step: int, current: _Stream) -> _Stream:
        """Return the stream that is least behind `step`: one just opened has no interval to know it by."""
        behind = [other for other in self._alive if self._is_alive(other) and other.last < step]
        return max(reversed(behind), key=lambda other: other.last, default=current)

    def _in_later_epoch(self, step: int, epoch: float | None) -> _Stream | None:
        current = self._alive[-1] if self._alive else None
        is_later = current and epoch is not None and current.epoch is not None and epoch > current.epoch
        return current if is_later and current and step < current.last else None

    def _is_alive(self, stream: _Stream) -> bool:
        return self._records - stream.written <= _ALIVE_RECORDS

    def _stream_of(self, step: int) -> _Stream:
        current = self._alive[-1] if self._alive else None
        if current and step in {current.last, current.expects(self._interval)}:
            return current
        for other in self._alive[-2::-1]:
            if self._is_alive(other) and step == other.expects(self._interval):
                return other
        if current and step > current.last:
            return current if current.interval else self._nearest_before(step, current)
        opened = _Stream(self._attempts, step, None, self._records)
        self._attempts += 1
        return opened


MAX_TAGS: Final = 1_000_000
"""Tags beyond are read, but neither their descriptions nor their restarts are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the folder of a file says about it."""

    rank: int | None = None
    attempt: int = 0
    family: str | None = None


class Rewinds:
    """Counts restarts over the files of one folder: per tag, since tags may move at different paces."""

    def __init__(self) -> None:
        self.attempt = 0
        self._last: dict[int, tuple[int, int]] = {}
        self._highest: int | None = None

    def attempt_of(self, tag: bytes, step: int) -> int:
        """Return the attempt that `step` of `tag` belongs to."""
        key = hash(tag)
        last = self._last.get(key)
        if last is not None and last[0] == self.attempt and step < last[1]:
            self.attempt += 1
        if last is not None or len(self._last) < MAX_TAGS:
            self._last[key] = (self.attempt, step)
        self._highest = step if self._highest is None else max(self._highest, step)
        return self.attempt

    def restart(self, step: int) -> None:
        """Note a session that starts at `step`: what was written from there on has been abandoned."""
        if self._highest is not None and step <= self._highest:
            self.attempt += 1
            self._highest = None
