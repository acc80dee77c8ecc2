"""Tables of msprobe's database, in the layouts of two msprobe versions, and the writing of a new database.

The tables of targets (tensor names), of metrics, of tags and of `global_stats` are those of msprobe 26.2.0. As in
msprobe 8.3.0, the statistics are in tables `metric_<id>_step_<first>_<last>` of `step_partition` steps each.
`trend_data`, which is a table in 26.2.0, is a view over these tables.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_storage.base.escaping import sql_identifier

OPS: Final = ("norm", "min", "max", "zeros", "nans", "mean")
"""Statistics in the order of the columns of `trend_data`."""

_PART_OF_VIEW: Final = 400  # SQLite allows 500 SELECTs in one UNION

DIMENSION_TABLES: Final = """\
CREATE TABLE monitoring_targets (
    target_id INTEGER PRIMARY KEY AUTOINCREMENT,
    target_name TEXT NOT NULL,
    vpp_stage INTEGER NOT NULL,
    micro_step INTEGER NOT NULL DEFAULT 0,
    UNIQUE(target_name, vpp_stage, micro_step)
);
CREATE TABLE monitoring_metrics (
    metric_id INTEGER PRIMARY KEY AUTOINCREMENT,
    metric_name TEXT UNIQUE NOT NULL
);
CREATE TABLE metric_stats (
    metric_id INTEGER NOT NULL,
    stat_name TEXT NOT NULL,
    PRIMARY KEY (metric_id, stat_name),
    FOREIGN KEY (metric_id) REFERENCES monitoring_metrics(metric_id)
) WITHOUT ROWID;
"""
"""Statements that create the tables of targets, metrics, and statistics of each metric, as in msprobe 8.3.0."""

TABLES: Final = f"""\
{DIMENSION_TABLES}CREATE TABLE monitoring_tags (
    tag_id INTEGER PRIMARY KEY AUTOINCREMENT,
    tag_name TEXT NOT NULL,
    category TEXT NOT NULL,
    metric_id INTEGER NOT NULL,
    UNIQUE(tag_name, category, metric_id),
    FOREIGN KEY (metric_id) REFERENCES monitoring_metrics(metric_id)
);
CREATE TABLE tag_target_mapping (
    tag_id INTEGER NOT NULL,
    target_id INTEGER NOT NULL,
    PRIMARY KEY (tag_id, target_id),
    FOREIGN KEY (tag_id) REFERENCES monitoring_tags(tag_id),
    FOREIGN KEY (target_id) REFERENCES monitoring_targets(target_id)
);
CREATE TABLE export_facts (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
"""
"""Statements that create the tables of the database.

The table `export_facts` is not one of msprobe's tables. It contains the name of the run, the number of steps per table,
and descriptions of the exported numbers.
"""


class OtherFileError(Exception):
    """Raised when a file exists that is no earlier database of the writer."""


@contextlib.contextmanager
def new_database(target: Path, tables: str, own_table: str) -> Iterator[sqlite3.Connection]:
    """Yield the connection of a new database with `tables`, which gets the name `target` after the block.

    An earlier database with this name is replaced. Raises OtherFileError if `target` exists and is no database with
    the table `own_table`, and OSError or sqlite3.Error if the database cannot be written.
    """
    if target.exists() and not _has_table(target, own_table):
        raise OtherFileError(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with contextlib.closing(sqlite3.connect(staged, isolation_level=None)) as database:
            # The file is new and gets its name when it is whole: no journal is needed.
            database.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; {tables} BEGIN;")
            yield database
            database.execute("COMMIT")
        staged.replace(target)
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


def _has_table(path: Path, table: str) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute(f"SELECT 1 FROM {table} LIMIT 1")
    except sqlite3.Error:
        return False
    return True


class MetricTables:
    """The metrics, targets and tables of a new database, which are written to it when they are first requested.

    Each table has the rows of one metric and of `steps` steps.
    """

    def __init__(self, database: sqlite3.Connection, steps: int) -> None:
        self.metrics: dict[str, int] = {}
        self.targets: dict[tuple[str, int, int], int] = {}
        self.partitions: dict[str, int] = {}
        self._database = database
        self._steps = steps

    def metric(self, family: str, columns: Sequence[str]) -> int:
        """Return the number of the metric of a family with the statistics `columns`."""
        if family not in self.metrics:
            metric = self.metrics[family] = len(self.metrics) + 1
            self._database.execute("INSERT INTO monitoring_metrics VALUES (?, ?)", (metric, family))
            self._database.executemany("INSERT INTO metric_stats VALUES (?, ?)", [(metric, name) for name in columns])
        return self.metrics[family]

    def target(self, target: tuple[str, int, int]) -> int:
        """Return the number of a target: its name, virtual pipeline stage and micro-batch."""
        if target not in self.targets:
            self.targets[target] = len(self.targets) + 1
            row = (self.targets[target], *target)
            self._database.execute("INSERT INTO monitoring_targets VALUES (?, ?, ?, ?)", row)
        return self.targets[target]

    def insert(
        self, family: str, columns: Sequence[str], rank: int, steps: Sequence[int], values: Sequence[Sequence[Any]]
    ) -> None:
        """Insert rows of a family. `values` are their targets, and one list of numbers for each of `columns`.

        The rows are sorted by step. A row replaces an earlier one of the same rank, step and target.
        """
        metric, marks = self.metric(family, columns), ", ".join("?" * (3 + len(columns)))
        start = 0
        for _, group in itertools.groupby(steps, key=lambda step: step // self._steps):
            piece = slice(start, start := start + len(list(group)))
            name = self.partition(metric, steps[piece.start], columns)
            rows = zip(itertools.repeat(rank), steps[piece], *(column[piece] for column in values), strict=False)
            self._database.executemany(f"INSERT OR REPLACE INTO {name} VALUES ({marks})", rows)

    def partition(self, metric: int, step: int, columns: Sequence[str]) -> str:
        """Return the name of the table that contains `step` of a metric with the statistics `columns`."""
        first = step // self._steps * self._steps
        last = first + self._steps - 1
        name = f"metric_{metric}_step_{first}_{last}"
        if name not in self.partitions:
            self.partitions[name] = metric
            self._database.execute(_partition_table(name, first, last, columns))
        return name


def _partition_table(name: str, first: int, last: int, columns: Sequence[str]) -> str:
    listed = ", ".join(f"{sql_identifier(column)} REAL DEFAULT NULL" for column in columns)
    return (
        f"CREATE TABLE {name} (rank INTEGER NOT NULL, step INTEGER NOT NULL CHECK(step BETWEEN {first} AND {last}), "
        f"target_id INTEGER NOT NULL, {listed}, PRIMARY KEY (rank, step, target_id), "
        "FOREIGN KEY (target_id) REFERENCES monitoring_targets(target_id)) WITHOUT ROWID"
    )


def global_stats_table(metrics: Sequence[str]) -> str:
    """Return the statement that creates the table `global_stats`.

    Its only row has the ranges of steps and ranks, and the statistics of each metric.
    """
    listed = "".join(f", {sql_identifier(metric)} TEXT DEFAULT NULL" for metric in metrics)
    return (
        "CREATE TABLE global_stats (min_step INTEGER DEFAULT 0, max_step INTEGER DEFAULT 0, "
        f"max_rank INTEGER DEFAULT 0{listed})"
    )


def trend_views(partitions: Mapping[str, int]) -> Iterator[str]:
    """Yield the statements that create the view `trend_data`.

    `partitions` maps the name of each table `metric_<id>_step_<first>_<last>` to the id of its metric.
    """
    selects = [
        f"SELECT rank, step, target_id, {metric} AS metric_id, {', '.join(OPS)} FROM {name}"
        for name, metric in partitions.items()
    ]
    level = 0
    while len(selects) > _PART_OF_VIEW:
        parts = [selects[start : start + _PART_OF_VIEW] for start in range(0, len(selects), _PART_OF_VIEW)]
        for number, part in enumerate(parts):
            yield f"CREATE VIEW trend_data_{level}_{number} AS {' UNION ALL '.join(part)}"
        selects = [f"SELECT * FROM trend_data_{level}_{number}" for number in range(len(parts))]
        level += 1
    if selects:
        yield f"CREATE VIEW trend_data AS {' UNION ALL '.join(selects)}"


def tags(target: str) -> set[tuple[str, str]]:
    """Return the tags of a target name, each with its category: `layers.3` is a layer, any other word is a module."""
    found = set()
    words = target.split(".")
    for before, word in zip(["", *words], words, strict=False):
        if not word.isdigit():
            found.add((word, "module"))
        elif before and not before.isdigit():
            found.add((f"{before}.{word}", "layer"))
    return found
