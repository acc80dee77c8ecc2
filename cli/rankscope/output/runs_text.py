"""Format the list of runs so that each run is one line that fits into the terminal, and the details of one run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rankscope.output.rows import cell, columns, printable
from rankscope_view.data.documents import flat, json_object
from rankscope_view.pages.format import duration

if TYPE_CHECKING:
    from rankscope_storage.connection import Connection

ALWAYS: Final = ("run", "state", "steps", "ranks", "started", "duration")
OPTIONAL: Final = ("attempts", "reason", "tags", "note", "source")
"""Columns of the list of runs that are omitted if its lines do not fit into the terminal.

The last one is omitted first.
"""

_SHORTEST_RUN: Final = 12
_GAP: Final = 2


def run_lines(rows: pa.Table, width: int | None = None) -> Iterator[str]:
    """Yield a line of headings, a line per run, and a line per run with open incidents. Times are in UTC.

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
    troubled = [row for row in rows.to_pylist() if row.get("sentence")]
    yield from (f"{printable(row['run'])}: {printable(row['sentence'])}" for row in troubled)
    if troubled:
        yield "(rankscope incidents RUN lists the open incidents of a run)"


def terminal_width() -> int | None:
    """Return the width of the terminal in characters, or None if the output is a pipe or a file.

    The variable COLUMNS replaces the width, also for a pipe or a file.
    """
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
        "state": (row["state"] or "unknown") + (f", {row['open_incidents']} open" if row.get("sentence") else ""),
        "steps": steps,
        "ranks": str(row["ranks"] or ""),
        "started": "" if row["started_at"] is None else f"{row['started_at']:%Y-%m-%d %H:%M}",
        "duration": "" if row["seconds"] is None else duration(row["seconds"]),
        "attempts": str(row["attempts"]) if row["attempts"] > 1 else "",
        "reason": row["reason"] or "",
        "tags": " ".join(f"{key}={value}" for key, value in tags.items()),
        "note": " ".join((row["note"] or "").split()),
        "source": "" if row["source_kind"] in (None, "live") else row["source_kind"],
    }
    return {name: printable(text) for name, text in texts.items()}


_APART = ("argv", "git_commit")
# Only some versions of the run row contain the configuration, so take it from the newest one that does.
_CONFIG = """\
SELECT max_by(config, coalesce(ordinal, 0)) AS config FROM runs_history WHERE run = $run AND config IS NOT NULL"""
_TIMES_AND_STEPS = ("started_at", "ended_at", "last_step", "planned_steps", "world_size", "source_kind")


def run_details(connection: Connection, run: str) -> dict[str, Any]:
    """Return the details of `run` as one JSON object. Values that the store does not have are null or empty."""
    from rankscope_storage.runs.tags import parse_tags
    from rankscope_view.data.incidents import incidents, sentence_of
    from rankscope_view.data.runs import end_sentence

    with connection.pinned():
        open_ = [one for one in incidents(connection, [run]).get(run, ()) if one.is_open]
        (known,) = connection.query("SELECT * FROM runs WHERE run = $run", {"run": run}).to_pylist()
        (started,) = connection.query(_CONFIG, {"run": run}).to_pylist()
        launches = connection.query("SELECT * FROM attempts WHERE run = $run ORDER BY attempt", {"run": run})
    return {
        "run": run,
        "state": known["state"],
        "end": end_sentence(known["state"], open_) or None,
        "open_incidents": [sentence_of(one) for one in open_],
        **{name: known[name] for name in (*_TIMES_AND_STEPS, "reason")},
        "tags": parse_tags(known["tags"]),
        "note": known["note"],
        **_code(started["config"]),
        "config": _settings(started["config"]),
        "attempts": [_launch(row) for row in launches.to_pylist()],
    }


def run_detail_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `rankscope runs show` prints. Unknown values are omitted."""
    yield from _block("run", facts["run"])
    yield from _block("state", f"{facts['state']}: {facts['reason']}" if facts["reason"] else facts["state"])
    yield from _block("end", facts["end"])
    yield from _block("open incidents", *facts["open_incidents"])
    for name in _TIMES_AND_STEPS:
        if facts[name] is not None:
            yield from _block(name.removesuffix("_at").replace("_", " "), cell(facts[name]))
    yield from _block("tags", *(f"{key}={value}" for key, value in facts["tags"].items()))
    yield from _block("note", *(facts["note"] or "").splitlines())
    yield from _block("commit", facts["git_commit"])
    yield from _block("command", " ".join(facts["argv"]) if facts["argv"] else None)
    settings = flat(facts["config"])
    yield from _block("config", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings))
    yield from _block("attempts", *map(_launch_line, facts["attempts"]))


def _launch(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("attempt", "state", "started_at", "ended_at", "last_step", "world_size", "launch_id", "reason")
    return {name: row[name] for name in names} | _code(row["config"])


def _launch_line(launch: Mapping[str, Any]) -> str:
    step = None if launch["last_step"] is None else f"step {launch['last_step']:,}"
    commit = launch["git_commit"] and f"commit {launch['git_commit'][:12]}"
    started = launch["started_at"] and cell(launch["started_at"])
    return ", ".join(
        str(part) for part in (launch["attempt"], launch["state"], started, step, commit) if part is not None
    )


def _code(config: str | None) -> dict[str, Any]:
    """Return the git commit and the command line of a launch.

    Both are None if `config` is not JSON, as for some imported logs.
    """
    document = json_object(config)
    argv, commit = document.get("argv"), document.get("git_commit")
    return {
        "git_commit": commit if isinstance(commit, str) else None,
        "argv": [str(part) for part in argv] if isinstance(argv, list) else None,
    }


def _settings(config: str | None) -> dict[str, Any]:
    return {key: value for key, value in json_object(config).items() if key not in _APART}


def _block(name: str, *texts: str | None) -> Iterator[str]:
    known = [printable(text) for text in texts if text is not None]
    yield from (f"{name if position == 0 else '':<14} {text}" for position, text in enumerate(known))
