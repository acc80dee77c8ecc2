"""Base class of a sink, and the dispatcher that feeds the sinks of a rank on the publisher thread.

A sink that fails holds up neither training nor other sinks.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from rankscope_contract.model.identity import Identity
from rankscope_exporter.base.copies import CopiesDoNothing
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.records.step_record import StepRecord


class Sink(CopiesDoNothing, abc.ABC):
    """Takes the records of one rank between attach and detach.

    A sink is made at attach and does no I/O then. `put` and `close` are called on the publisher thread alone. Whatever
    they raise is counted and named by the caller, so a sink says nothing itself; what it has not written by the time
    `put` returns it must be able to lose, since a process may be killed at any moment, or be forked.

    A copy is made of the same settings, and takes and holds no records.
    """

    name: ClassVar[str]
    """What configurations call it."""
    options_class: ClassVar[type[Any]]
    """A frozen dataclass whose fields are the settings; it raises ValueError on what cannot be meant."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Keep what the sink is made of, for its copies."""
        made = super().__new__(cls)
        made._made_of = arguments, named
        return made

    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    @abc.abstractmethod
    def __init__(self, options: Any, identity: Identity) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return {"_made_of": self._made_of}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        arguments, named = state["_made_of"]
        type(self).__init__(self, *arguments, **named)
        self.__dict__.update({**state, "is_copy": True, "put": _take_nothing, "close": _take_nothing})

    @abc.abstractmethod
    def put(self, record: StepRecord) -> None:
        """Take a record that was published; it is never changed afterwards, and may be kept."""

    def close(self) -> None:
        """Take note that no record follows."""


def _take_nothing(*_: Any) -> None:
    """Do nothing: `put` and `close` of a copy."""


LONGEST_REST: Final = 256
"""Records that a failing sink is spared between two attempts: a disk that has room again is found within these."""


class Sinks:
    """The sinks of one session.

    A sink that raises loses that record, which is counted. It then misses the next one, after a second failure the
    next two, then four, …, and is tried again; nothing is kept for it meanwhile.
    """

    def __init__(self, sinks: Sequence[Sink], boundary: ErrorBoundary) -> None:
        self.by_name: Mapping[str, Sink] = {sink.name: sink for sink in sinks}
        self._boundary = boundary
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
                self._boundary.report(f"sink {feed.sink.name}", error)

    def close(self) -> None:
        """Tell every sink that no record follows."""
        if os.getpid() == self._process:
            for feed in self._feeds:
                self._boundary.call(f"sink {feed.sink.name}", feed.sink.close)


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
