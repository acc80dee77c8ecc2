"""Open objects of a log that contain a line of text, or the numbers of a record, inside of other fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rankscope_ingest.importers.common.keys import Role, role_of
from rankscope_ingest.importers.common.values import micros

_LINES: Final = ("log", "MESSAGE", "textPayload")
"""Keys under which log drivers (Docker, Fluentd, journald, Google Cloud) write each line of a program."""
_MESSAGES: Final = ("message", "msg", "text", "event", "body", "@message", "line")
"""Keys under which logging libraries write a message, which may be a line of a log."""
_TEXTS: Final = frozenset((*_LINES, *_MESSAGES))
_PARTS: Final = ("data", "metadata", "log", "fields", "jsonPayload")
"""Keys of objects whose fields are those of the record."""
NAMES: Final = ("key", "name", "metric", "tag", "metric_name")
"""Keys whose value is the name of the number under the key `value`."""
_VALUE: Final = "value"
_OPENED: Final = frozenset((*_PARTS, _VALUE))
_ABOUT_EVENTS: Final = ("event_type", "namespace")


def text_in(document: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return the line of text in an object that only carries it, and whether the object is one of a log driver.

    Return None for an object with a counter or without text.
    """
    if _TEXTS.isdisjoint(document) or any(role_of(key) is Role.STEP for key in document):
        return None
    for keys in (_LINES, _MESSAGES):
        for key in keys:
            if isinstance(text := document.get(key), str):
                return text, keys is _LINES
    return None


def place_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time and the rank in an object that carries a line of text."""
    kept = {key: value for key, value in document.items() if role_of(key) is Role.RANK}
    times = (micros(value) for key, value in document.items() if role_of(key) is Role.TIME)
    found = next((time for time in times if time is not None), None)
    return kept if found is None else {"timestamp": found, **kept}


def opened(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object with the fields of its parts, and with a number under the name that another field contains.

    Examples: `{"data": {"loss": 2.5}}`, and `{"key": "loss", "value": 2.5}`. A value of null makes the name an event.
    """
    if _OPENED.isdisjoint(document):
        return document
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key in _PARTS and isinstance(value, Mapping):
            found |= {name: each for name, each in value.items() if name not in document}
        else:
            found[key] = value
    named = next((key for key in NAMES if isinstance(found.get(key), str)), None)
    if named is None or _VALUE not in found:
        return found
    name, value = found.pop(named), found.pop(_VALUE)
    for key in _ABOUT_EVENTS:
        found.pop(key, None)
    return {**found, "event": name} if value is None else {**found, name: value}
