"""Export as one SQLite database with msprobe's tables, for msprobe's viewers and for other SQL clients.

There are two differences from msprobe. First, `step` is always the step of the training, and each micro-batch of a
tensor is a separate row of `monitoring_targets`. Second, numbers are not changed: an Inf is stored as Inf, and no value
is limited to 1e9. A NaN is stored as NULL, because SQLite has no NaN.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_msprobe.files.csv_layout import FEATURES, TENSOR_FAMILIES, plain
from rankscope_storage.base.errors import ExportError
from rankscope_storage.connection import Connection
from rankscope_storage.formats.export import ExportOptions, ExportReport, Progress, Selection, no_progress, require_rows
from rankscope_storage.formats.msprobe_rows import (
    FEATURE_COLUMNS,
    MsprobeCells,
    MsprobeSteps,
    Stream,
    descriptions,
    feature_cells,
    tensor_cells,
)
from rankscope_storage.formats.sqlite_schema import (
    OPS,
    TABLES,
    MetricTables,
    OtherFileError,
    global_stats_table,
    new_database,
    tags,
    trend_views,
)

HELD: Final = ("tensor_stats", "features")

_FACTS: Final = {
    "step": "counts from 0; Adam's moments have the step before which they were read",
    "nan": "NULL; the statistics of a tensor with a NaN are NULL, and `nans` is their number",
}


class Sqlite:
    """Export format `sqlite`: one database with msprobe's tables."""

    name = "sqlite"
    help = "one SQLite database with the msprobe monitor's tables, a table per family and partition of steps"
    folder = False
    suffix = ".db"

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write `run` to the SQLite database `target`, which may be an earlier export. See `ExportFormat.export`."""
        with connection.pinned():
            selection = Selection(connection, run, options)
            totals = {name: selection.count(name) for name in HELD}
            require_rows(selection, totals)
            try:
                with new_database(target, TABLES, own_table="export_facts") as database:
                    rows = _Database(database, selection).fill(progress, sum(totals.values()))
            except OtherFileError as error:
                raise ExportError(f"{target} exists and is not an export of Rankscope: choose another name") from error
            except (OSError, sqlite3.Error) as error:
                raise ExportError(f"cannot write {target}: {error}") from error
            replaced = selection.count("tensor_stats", "step IS NOT NULL") - rows["tensor_stats"]
            omitted = {
                "rows without a step": sum(selection.count(name, "step IS NULL") for name in HELD),
                "rows replaced by another row of the same step and target (an earlier attempt or call)": replaced,
                "scalars: not in these tables": selection.count("scalars"),
                "events: not in these tables": selection.count("events"),
            }
        return ExportReport(files=(target,), rows=rows, omitted=omitted)


class _Database:
    """Writer of a new SQLite database."""

    def __init__(self, database: sqlite3.Connection, selection: Selection) -> None:
        self._database = database
        self._selection = selection
        self._tables = MetricTables(database, selection.options.step_partition)
        self._targets_of: dict[int, set[int]] = {}
        self._range = (math.inf, -math.inf)

    def fill(self, progress: Progress, total: int) -> Counter[str]:
        """Write all tables, and return the numbers of written rows by dataset."""
        written: Counter[str] = Counter()
        ranks = self._ranks()
        for rank in ranks:
            for dataset, family, columns, cells in self._families(rank):
                for rows in cells:
                    written[dataset] += self._insert(family, columns, rank, rows)
                    progress(min(written.total(), total), total)
        self._finish(max(ranks))
        return written

    def _families(self, rank: int) -> Iterator[tuple[str, str, Sequence[str], Iterator[MsprobeCells]]]:
        selection = self._selection
        stream = Stream(Path(), rank, selection.options.attempt)
        numbering = MsprobeSteps.of(selection.connection, selection.run)
        described = descriptions(selection.connection, selection.run)
        only = stream.only(selection, "tensor_stats")
        for family in TENSOR_FAMILIES:
            yield "tensor_stats", family, OPS, tensor_cells(selection, family, only, numbering, described)
        only = stream.only(selection, "features")
        for family in FEATURE_COLUMNS:
            columns = tuple(FEATURES[family].columns) if family in FEATURES else OPS
            yield "features", family, columns, feature_cells(selection, family, only, numbering)

    def _ranks(self) -> list[int]:
        each = [f"SELECT rank FROM {self._selection.source(dataset)}" for dataset in HELD]
        rows = self._selection.query(f"SELECT DISTINCT coalesce(rank, 0) AS rank FROM ({' UNION '.join(each)})")
        return sorted(int(rank) for rank in rows["rank"].to_pylist())

    def _insert(self, family: str, columns: Sequence[str], rank: int, rows: MsprobeCells) -> int:
        targets = self._target_ids(rows, self._tables.metric(family, columns))
        values = [_numbers(rows.columns[column]) for column in columns]
        steps = rows.step.to_pylist()
        self._range = (min(self._range[0], steps[0]), max(self._range[1], steps[-1]))
        self._tables.insert(family, columns, rank, steps, [targets, *values])
        return len(steps)

    def _target_ids(self, rows: MsprobeCells, metric: int) -> list[int]:
        key = pc.binary_join_element_wise(rows.vpp_stage, rows.micro_step, rows.name, "\0").dictionary_encode()
        ids = []
        for text in key.dictionary.to_pylist():
            vpp, micro, name = text.split("\0", 2)
            ids.append(self._tables.target((plain(name), int(vpp), int(micro))))
        self._targets_of.setdefault(metric, set()).update(ids)
        return [ids[code] for code in key.indices.to_pylist()]

    def _finish(self, last_rank: int) -> None:
        """Write the content that depends on all rows of the export.

        This content is: tags, the ranges of steps and ranks, facts about the export, and the view `trend_data` over the
        tables with statistics.
        """
        self._tag()
        metrics = self._tables.metrics
        trends = {metric: family not in FEATURES for family, metric in metrics.items()}
        statistics = [",".join(FEATURES[family].columns if family in FEATURES else OPS) for family in metrics]
        self._database.execute(global_stats_table(list(metrics)))
        marks = ", ".join("?" * (3 + len(statistics)))
        ends = [int(step) if math.isfinite(step) else 0 for step in self._range]
        self._database.execute(f"INSERT INTO global_stats VALUES ({marks})", (*ends, last_rank, *statistics))
        partitions = self._tables.partitions
        for statement in trend_views({name: metric for name, metric in partitions.items() if trends[metric]}):
            self._database.execute(statement)
        facts = {**_FACTS, "run": self._selection.run, "step_partition": str(self._selection.options.step_partition)}
        self._database.executemany("INSERT INTO export_facts VALUES (?, ?)", facts.items())

    def _tag(self) -> None:
        names = {number: name for (name, _, _), number in self._tables.targets.items()}
        known: dict[tuple[str, str, int], int] = {}
        for metric, targets in self._targets_of.items():
            for target in sorted(targets):
                for tag, category in sorted(tags(names[target])):
                    number = known.setdefault((tag, category, metric), len(known) + 1)
                    self._database.execute("INSERT INTO tag_target_mapping VALUES (?, ?)", (number, target))
        self._database.executemany(
            "INSERT INTO monitoring_tags VALUES (?, ?, ?, ?)", ((number, *tag) for tag, number in known.items())
        )


def _numbers(column: pa.StringArray) -> list[float | None]:
    return [None if value != value else value for value in pc.cast(column, pa.float64()).to_pylist()]  # noqa: PLR0124 - NaN


EXPORT_FORMAT = Sqlite()
