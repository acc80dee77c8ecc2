"""Collect the details of one run for `rankscope runs show`: state, tags, note, commit, command, configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rankscope.output.rows import cell, printable

if TYPE_CHECKING:
    from rankscope_storage.connection import Connection

_APART = ("argv", "git_commit")
# Only some versions of the run row contain the configuration, so take it from the newest one that does.
_CONFIG = """\
SELECT max_by(config, coalesce(ordinal, 0)) AS config FROM runs_history WHERE run = $run AND config IS NOT NULL"""
_WHEN = ("started_at", "ended_at", "last_step", "planned_steps", "world_size", "source_kind", "reason")


def run_details(connection: Connection, run: str) -> dict[str, Any]:
    """Return the details of `run` as one JSON object. Values that the store does not have are null or empty."""
    from rankscope_storage.runs.tags import parse_tags

    with connection.pinned():
        (known,) = connection.query("SELECT * FROM runs WHERE run = $run", {"run": run}).to_pylist()
        (started,) = connection.query(_CONFIG, {"run": run}).to_pylist()
        launches = connection.query("SELECT * FROM attempts WHERE run = $run ORDER BY attempt", {"run": run})
    return {
        "run": run,
        "state": known["state"],
        **{name: known[name] for name in _WHEN},
        "tags": parse_tags(known["tags"]),
        "note": known["note"],
        **_code(started["config"]),
        "config": _settings(started["config"]),
        "attempts": [_launch(row) for row in launches.to_pylist()],
    }


def run_detail_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `rankscope runs show` prints. Unknown values are omitted."""
    why = f": {printable(facts['reason'])}" if facts["reason"] else ""
    yield _line("run", printable(facts["run"]))
    yield _line("state", f"{facts['state']}{why}")
    for name in ("started_at", "ended_at", "last_step", "planned_steps", "world_size", "source_kind"):
        if facts[name] is not None:
            yield _line(name.removesuffix("_at").replace("_", " "), cell(facts[name]))
    yield from _block("tags", [f"{printable(key)}={printable(value)}" for key, value in facts["tags"].items()])
    yield from _block("note", [printable(line) for line in (facts["note"] or "").splitlines()])
    yield from _block("commit", [printable(facts["git_commit"])] if facts["git_commit"] else [])
    yield from _block("command", [" ".join(map(printable, facts["argv"]))] if facts["argv"] else [])
    yield from _block(
        "config", [f"{printable(key)} = {printable(_json(value))}" for key, value in _flat(facts["config"])]
    )
    yield from _block("attempts", [_launch_line(launch) for launch in facts["attempts"]])


def _launch(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("attempt", "state", "started_at", "ended_at", "last_step", "world_size", "launch_id", "reason")
    return {name: row[name] for name in names} | _code(row["config"])


def _launch_line(launch: Mapping[str, Any]) -> str:
    step = None if launch["last_step"] is None else f"step {launch['last_step']:,}"
    commit = launch["git_commit"] and f"commit {printable(launch['git_commit'][:12])}"
    started = launch["started_at"] and cell(launch["started_at"])
    return ", ".join(
        str(part) for part in (launch["attempt"], launch["state"], started, step, commit) if part is not None
    )


def _code(config: str | None) -> dict[str, Any]:
    """Return the git commit and the command line of a launch.

    Both are None if `config` is not JSON, as for some imported logs.
    """
    document = _document(config)
    argv, commit = document.get("argv"), document.get("git_commit")
    return {
        "git_commit": commit if isinstance(commit, str) else None,
        "argv": [str(part) for part in argv] if isinstance(argv, list) else None,
    }


def _settings(config: str | None) -> dict[str, Any]:
    return {key: value for key, value in _document(config).items() if key not in _APART}


def _document(config: str | None) -> dict[str, Any]:
    try:
        found = json.loads(config or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _block(name: str, lines: list[str]) -> Iterator[str]:
    for position, line in enumerate(lines):
        yield _line(name if position == 0 else "", line)


def _line(name: str, text: str) -> str:
    return f"{name:<14} {text}"
