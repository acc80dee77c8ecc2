"""Compare two runs: state and figures, configuration, and the first step and tensor in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.connection import Connection
from rankscope_storage.diff.diff import ROUNDING, Divergence, Tolerance, divergence
from rankscope_storage.diff.sources import DiffSide
from rankscope_view.data.detail import RunDetail, read_detail

MOST_ROWS: Final = 5_000_000
"""Number of stored rows of both runs up to which a page compares them; above, it names the command."""

_NOT_SETTINGS: Final = ("argv", "git_commit", "cwd", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of the configuration that differs; None if a run does not have it."""

    key: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs. `divergence` is None if they have too many rows to be compared while a reader waits."""

    a: RunDetail
    b: RunDetail
    divergence: Divergence | None
    settings: tuple[Setting, ...]
    equal_settings: int


def compare(connection: Connection, a: str, b: str) -> Comparison | None:
    """Return the comparison of the runs `a` and `b`, or None if the store lacks one of them."""
    with connection.pinned():
        first, second = read_detail(connection, a), read_detail(connection, b)
        if first is None or second is None:
            return None
        rows = sum(
            sum(table["rows"].to_pylist())
            for run in (a, b)
            for table in (connection.files_table("tensor_stats", run=run), connection.files_table("scalars", run=run))
        )
        tolerance = Tolerance(relative=ROUNDING)
        found = divergence(connection, DiffSide(run=a), DiffSide(run=b), tolerance) if rows <= MOST_ROWS else None
    configs = [dict(_flat("", _json(one.facts.config))) for one in (first, second)]
    keys = sorted({*configs[0], *configs[1]})
    differing = [Setting(key=key, a=configs[0].get(key), b=configs[1].get(key)) for key in keys]
    settings = tuple(one for one in differing if one.a != one.b)
    return Comparison(a=first, b=second, divergence=found, settings=settings, equal_settings=len(keys) - len(settings))


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys of nested objects as one key with dots, without keys that describe the launch."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if prefix or key not in _NOT_SETTINGS:
                yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
