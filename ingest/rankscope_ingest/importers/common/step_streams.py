"""Derive the attempts of a log from its steps: a step that is lower than the previous one begins another attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_ALIVE_RECORDS: Final = 4
"""A stream of ascending steps ends when this number of consecutive records did not belong to it."""


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


@dataclass(slots=True)
class _RankStreams:
    alive: list[_Stream] = field(default_factory=list)  # the stream of the latest record comes last
    records: int = 0
    attempts: int = 0
    interval: int | None = None

    def attempt(self, step: int | None, epoch: float | None) -> int:
        self.records += 1
        if step is None:
            return self.alive[-1].attempt if self.alive else 0
        stream = self._in_later_epoch(step, epoch) or self._stream_of(step)
        stream.epoch = stream.epoch if epoch is None else epoch
        if step > stream.last:
            self.interval = stream.interval = step - stream.last
        stream.last, stream.written = step, self.records
        self.alive = [other for other in self.alive if other is not stream and self._is_alive(other)]
        self.alive.append(stream)
        return stream.attempt

    def _in_later_epoch(self, step: int, epoch: float | None) -> _Stream | None:
        current = self.alive[-1] if self.alive else None
        if current is None or epoch is None or current.epoch is None:
            return None
        return current if epoch > current.epoch and step < current.last else None

    def _is_alive(self, stream: _Stream) -> bool:
        return self.records - stream.written <= _ALIVE_RECORDS

    def _stream_of(self, step: int) -> _Stream:
        current = self.alive[-1] if self.alive else None
        if current and step in {current.last, current.expects(self.interval)}:
            return current
        for other in self.alive[-2::-1]:
            if self._is_alive(other) and step == other.expects(self.interval):
                return other
        if current and step > current.last:
            if current.interval:
                return current
            # A stream with one record has no interval: the stream with the nearest lower step continues.
            behind = [other for other in self.alive if self._is_alive(other) and other.last < step]
            return max(reversed(behind), key=lambda other: other.last, default=current)
        self.attempts += 1
        return _Stream(self.attempts - 1, step, None, self.records)


class StepStreams:
    """Derives the attempt of each record of a log that does not contain attempts.

    A step below the previous step begins a new stream of steps, and each stream is one attempt. An exception is a step
    that continues another stream: that stream has a recent record, and its last step plus its usual interval is this
    step. A restart is therefore a new attempt from its first step on, and alternating lines of two processes that write
    one file are two attempts. A repeated step belongs to the same attempt; both records are stored, in the order of the
    log. Each rank is counted separately.
    """

    def __init__(self) -> None:
        self._ranks: dict[int | None, _RankStreams] = {}

    def attempt(self, rank: int | None, step: int | None, epoch: float | None = None) -> int:
        """Return the attempt, from 0, of the next record. A record without a step belongs to the latest stream.

        A lower step with a higher `epoch` is no restart: the log counts steps within epochs.
        """
        return self._ranks.setdefault(rank, _RankStreams()).attempt(step, epoch)
