"""What runs where, in columns: for a terminal, a file and a test alike."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rankscope.live.stack import SERVICE, Piece

HEAD = ("what", "address", "state", "log")


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return aligned lines; the last column is as wide as it likes."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def overview(pieces: Iterable[Piece], states: Mapping[str, str], left_out: Mapping[str, str]) -> list[str]:
    """Return one line per program; `left_out` says why others do not run."""
    rows = [(piece.name, piece.url, states[piece.name], shown(piece.log)) for piece in pieces]
    return columns(HEAD, [*rows, *((name, "-", why, "-") for name, why in left_out.items())])


def exports(service_url: str, token_file: Path | None) -> list[str]:
    """Return the lines that go into the training job."""
    lines = [f"export RANKSCOPE_INGEST_URL={service_url}"]
    return lines if token_file is None else [*lines, f"export RANKSCOPE_TOKEN_FILE={shlex.quote(str(token_file))}"]


def shown(path: Path) -> str:
    """Return a path as short as one would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def service_url(pieces: Iterable[Piece]) -> str:
    """Return where ranks register."""
    return next(piece.url for piece in pieces if piece.name == SERVICE)
