"""Format the event log of a run as text, JSON or Markdown."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from rankscope.output.rows import as_json, columns, printable
from rankscope.output.summary_text import TextFormat, markdown_cell, markdown_table
from rankscope_contract.model.collective_format import spans

if TYPE_CHECKING:
    from rankscope_view.data.events import EventLine, EventLog

_HEAD: Final = ("time (UTC)", "attempt", "step", "type", "severity", "ranks", "event")

_OF_GROUP: Final = {"step": "step (--type step)", "restart": "launch or exit", "incident": "anomaly or incident"}
"""Names of the groups, where the plain name would be read as a number of restarts and of incidents."""


def events_text(run: str, log: EventLog, form: TextFormat) -> str:
    """Return the lines of an event log in the format `form`; JSON has the numbers of all lines by group too."""
    from rankscope_view.pages.format import count

    if form == "json":
        return as_json({"run": run, "counts": log.counts, "lines": [asdict(line) for line in log.lines]})
    rows = [_cells(line) for line in log.lines]
    known = ", ".join(
        f"{count(number)} {_OF_GROUP.get(group, group)}" for group, number in log.counts.items() if number
    )
    total = f"{count(len(rows))} of {count(sum(log.counts.values()))} events: {known or 'none'}"
    if form == "markdown":
        lines = [f"# Events of {markdown_cell(run)}", "", total]
        return "\n".join([*lines, "", *markdown_table(_HEAD, rows)] if rows else lines) + "\n"
    return "\n".join([*(columns(_HEAD, rows) if rows else ()), f"({total})"]) + "\n"


def _cells(line: EventLine) -> tuple[str, ...]:
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
