"""JSON documents of a store, such as the configuration of a run and the details of an event."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def json_object(text: str | None) -> dict[str, Any]:
    """Return the object in a JSON text; empty if the text has none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values of a document. Keys of nested objects are joined by dots."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
