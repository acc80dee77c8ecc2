"""What can go wrong in the ingest room, as one small hierarchy; every text is written for the person who reads it."""

from __future__ import annotations


class IngestError(Exception):
    """Base of all errors the service raises on purpose; its text names the fix."""


class ConfigError(IngestError):
    """The configuration file is missing, unreadable or wrong."""


class DecodeError(IngestError):
    """A body is not the record stream it claims to be; nothing of it may be taken."""


class FetchError(IngestError):
    """A poll brought nothing; `reason` is one of a few words, which label the failure counter."""

    def __init__(self, reason: str, text: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class RegistrationError(IngestError):
    """A rank may not register; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class BusyError(IngestError):
    """There is no room just now: the same request may come again later."""


class ServiceError(IngestError):
    """The service cannot start or go on."""
