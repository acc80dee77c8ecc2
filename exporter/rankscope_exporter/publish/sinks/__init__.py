"""Sinks: outputs of a rank's records in addition to the record channel. To add a sink, add a module to this package.

`MonitorConfig.sinks` contains the names and settings of the sinks to use: `{"csv": {"folder": "out"}, "api": {}}`. The
publisher thread passes each published record to every sink, in order; the training thread never calls a sink.

`Monitor.sink("api")` returns the sink with this name. Its methods `rows(*kinds, step=None)` and `features(*kinds,
step=None)` may be called in any thread. A sink that fails delays neither training nor other sinks.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.discovery import extension, import_folder
from rankscope_exporter.process.errors import ConfigError, ErrorBoundary
from rankscope_exporter.process.inert import CopiesDoNothing
from rankscope_exporter.process.validation import listed
from rankscope_exporter.records.record import StepRecord


class Sink(CopiesDoNothing, abc.ABC):
    """An output for the records of one rank, from `attach` to `detach`.

    A sink is created in `attach` and performs no I/O then. Only the publisher thread calls `put` and `close`. The
    caller counts and logs exceptions of these methods, so a sink logs nothing. Data that a sink has not written when
    `put` returns may be lost: the process may be killed or forked at any time. A copy of a sink has the same settings,
    but receives and stores no records.
    """

    name: ClassVar[str]
    """The name of the sink in a configuration."""
    options_class: ClassVar[type[Any]]
    """The class of the sink's settings, a frozen dataclass.

    Its constructor raises ValueError for an invalid value.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Store the arguments of the constructor, which are needed to copy the sink."""
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
        self.__dict__.update({**state, "is_copy": True, "put": _do_nothing, "close": _do_nothing})

    @abc.abstractmethod
    def put(self, record: StepRecord) -> None:
        """Process a published record. The sink may keep it: records do not change after publication."""

    def close(self) -> None:
        """Close the output. No record is passed to the sink afterwards."""


def _do_nothing(*_: Any) -> None: ...  # replaces `put` and `close` in a copy of a sink


LONGEST_PAUSE: Final = 256
"""Maximum number of records that a failing sink skips between two attempts, for example while a disk is full."""


class Sinks:
    """The sinks of one session.

    If a sink raises an exception, it does not receive the record again, and the loss is counted. The sink then skips
    the next record; after further consecutive failures it skips 2, 4, 8, … records, at most 256, before the next
    attempt. Skipped records are counted and not stored.
    """

    def __init__(self, sinks: Sequence[Sink], boundary: ErrorBoundary) -> None:
        self.by_name: Mapping[str, Sink] = {sink.name: sink for sink in sinks}
        self._boundary = boundary
        self._feeds = [_Feed(sink) for sink in sinks]
        self._process = os.getpid()

    @property
    def missed(self) -> dict[str, int]:
        """Return the number of missed records under the key `sink_<name>`, without sinks that missed none."""
        return {f"sink_{feed.sink.name}": feed.missed for feed in self._feeds if feed.missed}

    def put(self, record: StepRecord) -> None:
        """Pass `record` to every sink."""
        if os.getpid() != self._process:  # a forked child must not write for its parent
            return
        for feed in self._feeds:
            try:
                feed.put(record)
            except Exception as error:  # noqa: BLE001 - a sink may raise anything; training and the channel go on
                self._boundary.report(f"sink {feed.sink.name}", error)

    def close(self) -> None:
        """Close every sink."""
        if os.getpid() == self._process:
            for feed in self._feeds:
                self._boundary.call(f"sink {feed.sink.name}", feed.sink.close)


class _Feed:
    """One sink, the number of records that it has missed, and the number of records that it will skip."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.missed = 0
        self._pause = 0  # number of records to skip
        self._next_pause = 1

    def put(self, record: StepRecord) -> None:
        if self._pause:
            self._pause -= 1
            self.missed += 1
            return
        try:
            self.sink.put(record)
        except BaseException:
            self.missed += 1
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            raise
        self._next_pause = 1


def sink_classes() -> dict[str, type[Sink]]:
    """Return all sink classes by name."""
    extension("sinks")
    return _imported()


def _imported() -> dict[str, type[Sink]]:
    import_folder(__name__)
    return {cls.name: cls for cls in sorted(Sink.__subclasses__(), key=lambda cls: cls.name)}


def sink_class(name: str) -> type[Sink]:
    """Return the class of the sink `name`.

    Raises ConfigError for an unknown name; the text suggests the most similar name.
    """
    classes = _imported()
    if name not in classes:
        classes = sink_classes()
    if name not in classes:
        raise ConfigError(f"sinks: {name!r} is unknown; valid names are {listed(classes, name)}")
    return classes[name]
