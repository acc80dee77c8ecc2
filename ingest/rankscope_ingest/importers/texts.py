"""Text and JSON as every store and every reader takes them, whatever stood in the log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rankscope_contract.redaction import redacted

MAX_JSON: Final = 65_536

_MAX_DEPTH: Final = 16
_UNPRINTABLE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def clean_text(text: str, limit: int = 1000) -> str:
    """Return `text` as every store takes it."""
    return text[:limit].encode("utf-8", "replace").decode()


def json_text(value: Any, limit: int = MAX_JSON) -> str:
    """Return `value` as JSON that any reader takes: NaN and Inf as text; too long a text is told, not stored.

    Secrets are masked: a log repeats the settings that training was started with.
    """
    text = json.dumps(redacted(_plain_json(value, 0)), ensure_ascii=False, separators=(",", ":"), default=str)
    if len(text) > limit:
        return json.dumps({"left_out": f"{len(text):,} characters"})
    return text.encode("utf-8", "replace").decode()


def _plain_json(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(item, depth + 1) for item in value]
    return _UNPRINTABLE.get(repr(value), value) if isinstance(value, float) else value
