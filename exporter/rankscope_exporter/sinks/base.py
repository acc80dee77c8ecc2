"""One live sink: what it is told, and by whom. No threads, no catching; that is `feeding`'s."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from rankscope_contract.identity import Identity
from rankscope_exporter.copies import CopiesDoNothing
from rankscope_exporter.record import StepRecord


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
