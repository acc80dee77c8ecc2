"""Format the list of runs and the details of a run as text, JSON or Markdown.

These are summaries, comparisons, event logs and anomalies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import pyarrow as pa
import typer

from rankscope.output.diff_text import diff_document, first_line
from rankscope.output.rows import as_json, cell, columns, printable
from rankscope_contract.model.collective_format import spans
from rankscope_view.data.documents import flat, json_object
from rankscope_view.pages.format import NOTHING, count, duration, measure, utc

if TYPE_CHECKING:
    from rankscope_storage.api.summaries import AnomalyLine, AnomalyRow
    from rankscope_storage.connection import Connection
    from rankscope_storage.diff.diff import Divergence
    from rankscope_view.data.events import EventLine, EventLog
    from rankscope_view.data.summary import Summary

RULE: Final = "=" * 60

_SHOWN: Final = ("rule", "kind", "tensor", "op", "value", "baseline", "threshold")


TextFormat = Literal["text", "json", "markdown"]
"""Formats in which a command writes a summary, a comparison or a list of events."""

FormatOption = Annotated[TextFormat, typer.Option("--format", help="Output format.")]


def summary_text(found: Summary, form: TextFormat) -> str:
    """Return the summary of a run as text with a block per section, as JSON, or as Markdown with a table per section.

    JSON has all values without rounding, and NaN and Inf as strings.
    """
    from rankscope_view.data.summary import summary_document
    from rankscope_view.pages.sections import sections, title

    if form == "json":
        return as_json(summary_document(found))
    if form == "markdown":
        lines = [f"# {markdown_cell(title(found))}"]
        for section in sections(found):
            lines += ["", f"## {section.title.capitalize()}", "", *markdown_table(("", ""), section.rows)]
        return "\n".join(lines) + "\n"
    return "\n".join([*lines_of(title(found), [(section.title, section.rows) for section in sections(found)]), ""])


def lines_of(title: str, sections: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> Iterator[str]:
    """Yield the lines of a summary, from the title and the rows of each section."""
    yield from (RULE, printable(title), RULE)
    for name, rows in sections:
        throughput = [text for key, text in rows if (name, key) == ("speed", "throughput")]
        yield f"speed: {printable(throughput[0].partition(' (')[0])}" if throughput else name
        yield from (f"  {printable(key)}: {printable(text)}" for key, text in rows)
    yield RULE


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(markdown_cell, row))} |"


def markdown_cell(text: str) -> str:
    """Return `text` with the characters escaped that have a meaning in Markdown, HTML or a table."""
    escaped = re.sub(r"([\\`*_\[\]|<>#])", r"\\\1", printable(text))
    return escaped.replace("&", "&amp;")


def anomaly_table(found: Sequence[AnomalyRow]) -> pa.Table:
    """Return the anomalies as an Arrow table with the types of their columns in the store."""
    from rankscope_storage.base.schema import dataset_schema

    schema = dataset_schema("events")
    names = tuple(asdict(found[0]) if found else schema.names)
    rows = [asdict(row) for row in found]
    return pa.table([pa.array([row[name] for row in rows], schema.field(name).type) for name in names], names=names)


def line_table(lines: Sequence[AnomalyLine]) -> pa.Table:
    """Return a table of the range of steps, the ranks, the first values and the number of firings of each line."""
    from rankscope_storage.base.schema import dataset_schema

    values = [dataset_schema("events").field(name) for name in _SHOWN]
    schema = pa.schema([("steps", pa.string()), ("ranks", pa.string()), *values, ("firings", pa.int64())])
    rows = [{**asdict(one), "ranks": spans(one.ranks) or None} for one in lines]
    return pa.Table.from_pylist(rows, schema)


_EVENT_HEAD: Final = ("time (UTC)", "attempt", "step", "type", "severity", "ranks", "event")

_OF_GROUP: Final = {"step": "step (--type step)", "restart": "launch or exit", "incident": "anomaly or incident"}
"""Names of the groups, where the plain name would be read as a number of restarts and of incidents."""


def events_text(run: str, log: EventLog, form: TextFormat) -> str:
    """Return the lines of an event log in the format `form`; JSON has the numbers of all lines by group too."""
    if form == "json":
        return as_json({"run": run, "counts": log.counts, "lines": [asdict(line) for line in log.lines]})
    rows = [_event_cells(line) for line in log.lines]
    known = ", ".join(
        f"{count(number)} {_OF_GROUP.get(group, group)}" for group, number in log.counts.items() if number
    )
    total = f"{count(len(rows))} of {count(sum(log.counts.values()))} events: {known or 'none'}"
    if form == "markdown":
        lines = [f"# Events of {markdown_cell(run)}", "", total]
        return "\n".join([*lines, "", *markdown_table(_EVENT_HEAD, rows)] if rows else lines) + "\n"
    return "\n".join([*(columns(_EVENT_HEAD, rows) if rows else ()), f"({total})"]) + "\n"


def _event_cells(line: EventLine) -> tuple[str, ...]:
    count_of_events = f" ({count(line.events)} events)" if line.events > max(1, len(line.ranks)) else ""
    cells = (
        utc(line.at, "%Y-%m-%d %H:%M:%S"),
        "" if line.attempt is None else str(line.attempt),
        "" if line.step is None else count(line.step),
        line.type,
        line.severity or "",
        spans(line.ranks),
        line.text + count_of_events,
    )
    return tuple(map(printable, cells))


def compare_text(runs: Sequence[Summary], difference: Divergence | None, form: TextFormat) -> str:
    """Return the comparison of `runs`. `difference` is the first one of two runs, if they were compared.

    Text and Markdown have the states of the runs, and only values that differ; JSON has all values.
    """
    from rankscope_view.data.comparison import STATES, compared_values, differing_settings

    values = compared_values(runs)
    settings, equal = differing_settings([one.detail for one in runs])
    if form == "json":
        return as_json(
            {
                "runs": [one.run for one in runs],
                "values": [asdict(value) | {"differs": value.differs} for value in values],
                "settings": [asdict(setting) for setting in settings],
                "equal_settings": equal,
                "difference": None if difference is None else diff_document(difference),
            }
        )
    is_markdown = form == "markdown"
    names = [printable(one.run) for one in runs]
    shown = [value for at, value in enumerate(values) if at < STATES or value.differs]
    rows = [(value.name, *map(_value_text, value.values)) for value in shown]
    lines = list(_table("States, and values that differ", ("", *names), rows, is_markdown=is_markdown))
    rows = [(printable(setting.key), *map(_value_text, setting.values)) for setting in settings]
    title = f"Settings that differ ({len(settings)}; {equal} are equal)"
    lines += _table(title, ("", *names), rows, is_markdown=is_markdown)
    if difference is not None:
        lines += ["", f"{difference.steps_compared:,} common steps: {first_line(difference)}"]
    return "\n".join(lines) + "\n"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_markdown: bool) -> Iterator[str]:
    if is_markdown:
        yield f"## {title}"
        yield ""
        yield from markdown_table(head, rows) if rows else ("none",)
        yield ""
    elif rows:
        yield title
        yield from (f"  {line}" for line in columns(head, rows))
    else:
        yield f"{title}: none"


def _value_text(value: float | str | None) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return measure(value)
    return count(value) if isinstance(value, int) else printable(value)


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
        "config": {key: value for key, value in json_object(started["config"]).items() if key not in _APART},
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


def _block(name: str, *texts: str | None) -> Iterator[str]:
    known = [printable(text) for text in texts if text is not None]
    yield from (f"{name if position == 0 else '':<14} {text}" for position, text in enumerate(known))
