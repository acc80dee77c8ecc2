"""The members of a JSON object of any size, one at a time: the tool rewrites its files whole, so one may be cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.base import Faults
from rankscope_ingest.importers.jsontext import Cut, JsonWindow, Malformed
from rankscope_ingest.importers.lines import refuse_no_text

_CHUNK_BYTES: Final = 1 << 20


def members(path: Path, faults: Faults) -> Iterator[tuple[int, str, Any]]:
    """Yield (line, key, value) of the object in the file at `path`; of a cut or damaged one what stands before that."""
    window = JsonWindow(_chunks(path, faults))
    try:
        window.take("{")
        while window.peek() != "}":
            line = window.line_here
            key = window.value()
            window.take(":")
            value = window.value()
            yield line, str(key), value
            if window.peek() == ",":
                window.take(",")
    except Cut:
        faults.add(window.line_here, f"{path.name}: the file ends in the middle")
    except Malformed as error:
        faults.add(window.line_here, f"{path.name}: {error}")


def _chunks(path: Path, faults: Faults) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if file.tell() <= _CHUNK_BYTES:
                refuse_no_text(path, chunk[:4096])
            faults.read_bytes += len(chunk)
            yield chunk
