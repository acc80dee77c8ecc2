"""The JSON in the `details` of an event, as written by a rank: free text, so anything may be in it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.events import EventType


def parse_details(text: str | None) -> dict[str, Any]:
    """Return the object in `text`, {} when there is none; every text in it can be stored and sent."""
    try:
        value = json.loads(text or "{}")
        # "\\ud800" is legal in JSON, but no Unicode: neither Arrow nor a socket takes it.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def last_word(details: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return reason and error of an exit event; a reason nobody gave is the empty text, which is none that we know."""
    reason, error = details.get("reason"), details.get("error")
    return str(reason or ""), None if error is None else str(error)


def last_words(events: pa.Table | None) -> list[tuple[str, str | None, int | None]]:
    """Return what the exit events of one rank say, which is at most one: reason, error, moment in UTC µs."""
    if events is None:
        return []
    exits = events.filter(pc.equal(events["type"], EventType.EXIT))
    moments = exits["ts"].cast(pa.int64()).to_pylist()
    return [
        (*last_word(parse_details(text)), at) for text, at in zip(exits["details"].to_pylist(), moments, strict=True)
    ]
