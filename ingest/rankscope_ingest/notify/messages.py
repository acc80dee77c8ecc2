"""Messages about incidents, for notifiers."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_contract.model.events import Severity
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.runs import text
from rankscope_ingest.runs.incident import Incident


class NotifyError(IngestError):
    """A notifier could not deliver a message, for the reason in the text. The sender of the message may try again.

    The text does not name the receiver and contains no secret of its URL.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification. All notifications about the same incident have the same `key`."""

    key: str
    title: str
    body: str
    severity: str


def incident_message(incident: Incident, *, is_repeated: bool = False, place: text.Place = text.NO_PLACE) -> Message:
    """Return the notification of `incident`, with the command and the page of `place`.

    If `is_repeated`, the text states that it may have been delivered before.
    """
    body = text.body(incident, is_repeated=is_repeated, place=place)
    return Message(key=incident.key, title=text.title(incident), body=body, severity=incident.severity)


def resolved_message(incident: Incident, *, has_continued: bool, place: text.Place = text.NO_PLACE) -> Message:
    """Return the notification that an incident is over, with the command of `place`.

    `has_continued` is true if training continues, and false if the run ended.
    """
    title = text.resolved_title(incident, has_continued=has_continued)
    body = text.resolved_body(incident, has_continued=has_continued, place=place)
    return Message(key=f"{incident.key}:resolved", title=title, body=body, severity=Severity.INFO)
