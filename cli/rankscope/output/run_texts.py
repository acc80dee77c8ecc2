"""Format summaries, comparisons, event logs and anomalies of runs as text, JSON or Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final, Literal

import pyarrow as pa
import typer

from rankscope.output.diff_text import diff_document, first_line
from rankscope.output.rows import as_json, columns, printable
from rankscope_contract.model.collective_format import spans

if TYPE_CHECKING:
    from rankscope_storage.api.summaries import AnomalyLine, AnomalyRow
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
    from rankscope_view.pages.format import count

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
    from rankscope_view.pages.format import count, utc

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
    from rankscope_view.pages.format import NOTHING, count, measure

    if value is None:
        return NOTHING
    if isinstance(value, float):
        return measure(value)
    return count(value) if isinstance(value, int) else printable(value)
