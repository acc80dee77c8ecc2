"""The layout of a `trainer_state.json`: an object with a list of entries among its values, or the bare list.

What is damaged is counted with its line and stepped over; what ends too early ends in `Cut`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any, Final

from rankscope_ingest.errors import IngestError
from rankscope_ingest.importers.base import Faults
from rankscope_ingest.importers.checkpoints import StateFile
from rankscope_ingest.importers.jsontext import Cut, JsonWindow, Malformed
from rankscope_ingest.importers.lines import refuse_no_text
from rankscope_ingest.importers.texts import clean_text, json_text

HISTORY: Final = "log_history"
STEP: Final = "step"

_CHUNK_BYTES: Final = 1 << 16  # an error in the window costs a look at all of it
_PROBE_BYTES: Final = 4096
_MAX_FACTS: Final = 200
_FACT_CHARACTERS: Final = 8192
_NEXT_ENTRY: Final = re.compile(r"\}\s*(?:,\s*(?=\{)|(?=\]))")
_NEXT_KEY: Final = re.compile(r",\s*(?=\"\w{1,64}\"\s*:)")


def chunks(file: IO[bytes], state: StateFile, faults: Faults) -> Iterator[bytes]:
    """Yield the bytes of `file`, the progress noted. Raises IngestError on what is no text."""
    while chunk := file.read(_CHUNK_BYTES):
        if not faults.read_bytes:
            refuse_no_text(Path(state.label), chunk[:_PROBE_BYTES])
        faults.read_bytes += len(chunk)
        yield chunk


def entries(window: JsonWindow, facts: MutableMapping[str, Any], faults: Faults) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of the state at `window`; its other values go into `facts`. Raises Cut where the text ends."""
    if window.peek() == "[":
        yield from _items(window, faults)
        return
    if window.peek() != "{":
        raise IngestError(f"this is no trainer_state.json: it begins with {window.peek()!r}")
    window.take("{")
    while window.peek() != "}":
        try:
            key = window.value()
            window.take(":")
            if key == HISTORY and window.peek() == "[":
                yield from _items(window, faults)
            elif isinstance(key, str):
                _note(facts, key, window.value())
            if window.peek() != "}":
                window.take(",")
        except Malformed as error:
            faults.add(window.line_here, f"no JSON: {error}")
            window.resume_at(_NEXT_KEY)


def starts_with_entry(head: bytes) -> bool:
    """Return whether `head` begins a list of objects that have a step."""
    window = JsonWindow(iter((head,)))
    try:
        window.take("[")
        first = window.value()
    except (Cut, Malformed):
        return False
    return isinstance(first, dict) and STEP in first


def _items(window: JsonWindow, faults: Faults) -> Iterator[Mapping[str, Any]]:
    window.take("[")
    while window.peek() != "]":
        try:
            entry = window.value()
            if isinstance(entry, dict):
                yield entry
            else:
                faults.add(window.line_here, "an entry that is no object")
            if window.peek() != "]":
                window.take(",")
        except Malformed as error:
            faults.add(window.line_here, f"an entry that is no JSON: {error}")
            window.resume_at(_NEXT_ENTRY)
    window.take("]")


def _note(facts: MutableMapping[str, Any], key: str, value: Any) -> None:
    if len(facts) < _MAX_FACTS:
        facts[clean_text(key)] = json.loads(json_text(value, limit=_FACT_CHARACTERS))
