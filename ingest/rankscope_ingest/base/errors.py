"""Exceptions of the ingest service. The text of each exception is written for users and describes the fault."""

from __future__ import annotations

from rankscope_contract.model.redaction import redacted_text


class IngestError(Exception):
    """Base class of all errors that the service raises intentionally. The text of an error describes how to fix it.

    The text may repeat an address or a response, so secrets in it are masked, and it is cut if it is long.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(redacted_text(text))


class ConfigError(IngestError):
    """The configuration file is missing, unreadable or invalid."""


class DecodeError(IngestError):
    """A request or response body is malformed. The service discards the whole body."""


class FetchError(IngestError):
    """A poll failed.

    `reason` is one of a fixed set of texts and the value of the label `reason` of the counter of failed polls.
    """

    def __init__(self, reason: str, text: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class RegistrationError(IngestError):
    """The service rejects an HTTP request, such as a registration. `status` is the HTTP status of the response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class OtherServiceError(RegistrationError):
    """Another service of the store owns the run of a request. `location` is the address for the request there."""

    def __init__(self, text: str, *, location: str, shard: str) -> None:
        super().__init__(307, text)
        self.location = location
        self.shard = shard


class BusyError(IngestError):
    """The service rejects a request because it has no capacity at present.

    The client may send the same request again later.
    """


class ServiceError(IngestError):
    """The service cannot start, or must stop because of an error."""
