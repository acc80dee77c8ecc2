"""Feeds the sinks of a rank on the publisher thread: one that fails holds up neither training nor the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from rankscope_exporter.guard import Guard
from rankscope_exporter.record import StepRecord
from rankscope_exporter.sinks.base import Sink

LONGEST_REST: Final = 256
"""Records that a failing sink is spared between two attempts: a disk that has room again is found within these."""


class Sinks:
    """The sinks of one session.

    A sink that raises loses that record, which is counted. It then misses the next one, after a second failure the
    next two, then four, …, and is tried again; nothing is kept for it meanwhile.
    """

    def __init__(self, sinks: Sequence[Sink], guard: Guard) -> None:
        self.by_name: Mapping[str, Sink] = {sink.name: sink for sink in sinks}
        self._guard = guard
        self._feeds = [_Feed(sink) for sink in sinks]
        self._process = os.getpid()

    @property
    def missed(self) -> dict[str, int]:
        """Return how many records each sink has not taken, by a name of the reason; without those that took all."""
        return {f"sink_{feed.sink.name}": feed.missed for feed in self._feeds if feed.missed}

    def put(self, record: StepRecord) -> None:
        """Hand `record` to every sink."""
        if os.getpid() != self._process:  # a forked child must not write for its parent
            return
        for feed in self._feeds:
            try:
                feed.put(record)
            except Exception as error:  # noqa: BLE001 - a sink may raise anything; training and the channel go on
                self._guard.report(f"sink {feed.sink.name}", error)

    def close(self) -> None:
        """Tell every sink that no record follows."""
        if os.getpid() == self._process:
            for feed in self._feeds:
                self._guard.call(f"sink {feed.sink.name}", feed.sink.close)


class _Feed:
    """One sink and how it has been doing."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.missed = 0
        self._rest = 0  # records to be spared
        self._next_rest = 1

    def put(self, record: StepRecord) -> None:
        if self._rest:
            self._rest -= 1
            self.missed += 1
            return
        try:
            self.sink.put(record)
        except BaseException:
            self.missed += 1
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            raise
        self._next_rest = 1
