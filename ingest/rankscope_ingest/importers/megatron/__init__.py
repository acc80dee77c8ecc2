"""Text logs of Megatron-LM and its relatives: a row for every few iterations, and what is printed between the rows.

    [2025-02-28 16:26:20] iteration 1/ 1000 | consumed samples: 256 | … | lm loss: 1.217489E+01 | grad norm: 5.127 |

The walk is in `reading`; rows that look alike are read a column at a time (`columns`), all
others one by one (`rows`). A row that breaks off is counted with its line and not stored: half a number is no number.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported
from rankscope_ingest.importers.common.lines import MAX_LINE_BYTES, refuse_no_text
from rankscope_ingest.importers.megatron.reading import Reading
from rankscope_ingest.importers.megatron.rows import HEAD_PATTERN

CHUNK_BYTES: Final = 8 << 20

_HEAD: Final = re.compile(HEAD_PATTERN.encode())
_ARGUMENTS: Final = re.compile(rb"^ +\w+ \.{3,} \S", re.MULTILINE)
_SEARCHED_BYTES: Final = 16 << 20
_PROBE_BYTES: Final = 4096


class MegatronText:
    """The importer."""

    name = "megatron"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Look for rows; a long list of arguments may stand before the first, so the file is searched further."""
        rows = len(_HEAD.findall(head))
        if rows:
            return Detection(0.95, f"{rows} of its first lines are rows `iteration N/ M | …`")
        if path.is_dir() or not (_ARGUMENTS.search(head) or b"megatron" in head.lower()):
            return NOT_MINE
        if _has_row(path):
            return Detection(0.9, "rows `iteration N/ M | …` behind a long preamble")
        return NOT_MINE

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield a block per stretch of the log, then what it says of the run."""
        reading = Reading(faults)
        buffer = b""
        for data in _stretches(path, faults):
            buffer += data
            cut = buffer.rfind(b"\n") + 1 if data else len(buffer)
            if cut:
                block, used = reading.take(buffer[:cut], is_last=not data)
                buffer = buffer[used:]
                if block is not None:
                    yield block
        yield reading.run()


def _stretches(path: Path, faults: Faults) -> Iterator[bytes]:
    """Yield the bytes of a file, and nothing at its end; of a line too long to be held, its beginning only."""
    with path.open("rb") as file:
        data = file.read(CHUNK_BYTES)
        refuse_no_text(path, data[:_PROBE_BYTES])
        faults.read_bytes += len(data)
        length = 0  # of the line that has no end yet
        begin = data.removeprefix(codecs.BOM_UTF8)
        while data:
            end = begin.find(b"\n") if length > MAX_LINE_BYTES else 0
            if end >= 0 and begin:
                begin = begin[end:]
                length = len(begin) - 1 - begin.rfind(b"\n") if b"\n" in begin else length + len(begin)
                over = length - MAX_LINE_BYTES - 1
                yield begin[: len(begin) - over] if over > 0 else begin
            data = file.read(CHUNK_BYTES)
            faults.read_bytes += len(data)
            begin = data
    yield b""


def _has_row(path: Path) -> bool:
    with path.open("rb") as file:
        searched = 0
        before = b""
        while searched < _SEARCHED_BYTES and (data := file.read(1 << 20)):
            if _HEAD.search(before + data):
                return True
            before = data[-200:]
            searched += len(data)
    return False


IMPORTER = MegatronText()
