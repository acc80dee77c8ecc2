"""What a notifier is, and what it is given to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from rankscope_ingest.base.errors import IngestError


class NotifyError(IngestError):
    """The message was not delivered; it may be tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One thing to tell. `key` is the same whenever the same incident is told."""

    key: str
    title: str
    body: str
    severity: str


class Notifier(Protocol):
    """Delivers messages to one address."""

    priority: ClassVar[int]
    """Lower is asked first whether it handles a URL."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None: ...

    @classmethod
    def handles(cls, url: str) -> bool:
        """Return whether this notifier understands the address."""
        ...

    @property
    def label(self) -> str:
        """Name the address for the log, without its secrets."""
        ...

    async def send(self, message: Message) -> None:
        """Deliver, or raise NotifyError."""
        ...
