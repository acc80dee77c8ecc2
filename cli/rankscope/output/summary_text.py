"""Format the output of `rankscope summary` and `rankscope anomalies`; `rankscope demo` prints both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final, Literal

import pyarrow as pa
import typer

from rankscope.output.rows import as_json, printable
from rankscope_contract.model.collective_format import spans

if TYPE_CHECKING:
    from rankscope_storage.api.summaries import AnomalyLine, AnomalyRow
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
