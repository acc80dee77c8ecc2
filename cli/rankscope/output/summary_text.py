"""Format the output of `rankscope summary` and `rankscope anomalies`; `rankscope demo` prints both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import pyarrow as pa

from rankscope.output.rows import cell

if TYPE_CHECKING:
    from rankscope_storage.api.summaries import AnomalyRow, RunSummary

SHOWN = ("step", "rank", "rule", "kind", "tensor", "op", "value", "baseline", "threshold")
"""Columns of the list of anomalies in the output format `table`. The other formats have all columns."""


def summary_lines(found: RunSummary) -> Iterator[str]:
    """Yield the lines that `rankscope summary` prints. Unknown values are omitted."""
    yield f"run        {cell(found.run)}, {found.state or 'state unknown'}"
    if found.reason:
        yield f"reason     {cell(found.reason)}"
    ranks = f"on {found.ranks} rank{'' if found.ranks == 1 else 's'}" if found.ranks else "ranks unknown"
    yield f"launches   {found.attempts}, {ranks}"
    yield f"steps      {_steps(found)}"
    if found.loss_last is not None:
        first, last, lowest = (cell(value) for value in (found.loss_first, found.loss_last, found.loss_min))
        yield f"loss       first {first}, last {last}, lowest {lowest}"
    if found.tokens_per_second is not None:
        yield f"speed      {found.tokens_per_second:,.0f} tokens/s"
    if found.goodput is not None and found.wall_seconds is not None:
        yield f"goodput    {found.goodput:.1%} of {_duration(found.wall_seconds)} in steps that were not superseded"
    if code := _code(found):
        yield f"code       {code}"
    yield f"incidents  {found.incidents}{', see rankscope anomalies' if found.incidents else ''}"
    yield f"lost       {found.lost_records} records"
    rows = ", ".join(f"{count:,} {dataset}" for dataset, count in found.rows.items())
    yield f"stored     {rows or 'nothing'}; {_size(found.bytes_on_disk)}"


def _code(found: RunSummary) -> str:
    commit = found.git_commit and f"commit {cell(found.git_commit[:12])}"
    return ", ".join(filter(None, (commit, found.command and cell(found.command))))


def _steps(found: RunSummary) -> str:
    if found.last_step is None:
        return "none yet"
    planned = "" if found.planned_steps is None else f" of {found.planned_steps:,} planned"
    first = "up to" if found.first_step is None else f"{found.first_step:,} to"
    return f"{first} {found.last_step:,}{planned}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def anomaly_table(found: Sequence[AnomalyRow], columns: Sequence[str] | None = None) -> pa.Table:
    """Return the anomalies as an Arrow table with `columns`; None selects all columns."""
    from rankscope_storage.base.schema import dataset_schema

    schema = dataset_schema("events")
    names = columns or tuple(asdict(found[0]) if found else schema.names)
    rows = [asdict(row) for row in found]
    return pa.table(
        [pa.array([row[name] for row in rows], schema.field(name).type) for name in names], names=list(names)
    )
