"""One live sink: what it is told, and by whom. No threads, no catching; that is `feeding`'s."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from rankscope_contract.identity import Identity
from rankscope_exporter.record import StepRecord


class Sink(abc.ABC):
    """Takes the records of one rank between attach and detach.

    A sink is made at attach and does no I/O then. `put` and `close` are called on the publisher thread alone. Whatever
    they raise is counted and named by the caller, so a sink says nothing itself; what it has not written by the time
    `put` returns it must be able to lose, since a process may be killed at any moment, or be forked.
    """

    name: ClassVar[str]
    """What configurations call it."""
    options_class: ClassVar[type[Any]]
    """A frozen dataclass whose fields are the settings; it raises ValueError on what cannot be meant."""

    @abc.abstractmethod
    def __init__(self, options: Any, identity: Identity) -> None: ...

    @abc.abstractmethod
    def put(self, record: StepRecord) -> None:
        """Take a record that was published; it is never changed afterwards, and may be kept."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Take note that no record follows."""
