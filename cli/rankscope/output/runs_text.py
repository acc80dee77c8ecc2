"""Format the list of runs so that each run is one line that fits into the width of the terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rankscope.output.rows import columns, printable

ALWAYS: Final = ("run", "state", "steps", "ranks", "started", "duration")
OPTIONAL: Final = ("attempts", "reason", "tags", "note", "source")
"""Columns that are omitted if the lines do not fit into the terminal; the last one is omitted first."""

_SHORTEST_RUN: Final = 12
_GAP: Final = 2


def run_lines(rows: pa.Table, width: int | None = None) -> Iterator[str]:
    """Yield a line of headings, and a line per run. Times are in UTC.

    Columns that do not fit into `width` characters are omitted, and long names are shortened in the middle. If `width`
    is None, nothing is omitted or shortened.
    """
    cells = [_cells(row) for row in rows.to_pylist()]
    names = [*ALWAYS, *(name for name in OPTIONAL if any(row[name] for row in cells))]
    if width is not None:
        while len(names) > len(ALWAYS) and _width(names, cells) > width:
            names.pop()
        spare = width - _width(names, cells) + max((len(row["run"]) for row in cells), default=0)
        for row in cells:
            row["run"] = shortened(row["run"], max(_SHORTEST_RUN, spare))
    yield from columns(names, ([row[name] for name in names] for row in cells))


def terminal_width() -> int | None:
    """Return the width in characters: of COLUMNS if it is set, else of the terminal; None for a pipe or a file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def shortened(text: str, most: int) -> str:
    """Return `text` with at most `most` characters.

    A longer text is shortened in the middle: names often differ at the end.
    """
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def _width(names: Sequence[str], cells: Sequence[Mapping[str, str]]) -> int:
    return sum(max([len(name), *(len(row[name]) for row in cells)]) + _GAP for name in names) - _GAP


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    last, planned = row["last_step"], row["planned_steps"]
    steps = "" if last is None else f"{last:,}" if planned is None else f"{last:,}/{planned:,}"
    tags = json.loads(row["tags"]) if row["tags"] else {}
    texts = {
        "run": row["run"],
        "state": row["state"] or "unknown",
        "steps": steps,
        "ranks": str(row["ranks"] or ""),
        "started": "" if row["started_at"] is None else f"{row['started_at']:%Y-%m-%d %H:%M}",
        "duration": _duration(row["seconds"]),
        "attempts": str(row["attempts"]) if row["attempts"] > 1 else "",
        "reason": row["reason"] or "",
        "tags": " ".join(f"{key}={value}" for key, value in tags.items()),
        "note": " ".join((row["note"] or "").split()),
        "source": "" if row["source_kind"] in (None, "live") else row["source_kind"],
    }
    return {name: printable(text) for name, text in texts.items()}


def _duration(seconds: float | None) -> str:
    """Return a duration as text with its two largest units, such as `3 d 4 h`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    first = next(position for position, (_, size) in enumerate(units) if seconds >= size)
    (large, size), (small, smaller) = units[first], units[first + 1]
    return f"{seconds // size:.0f} {large} {seconds % size // smaller:.0f} {small}"
