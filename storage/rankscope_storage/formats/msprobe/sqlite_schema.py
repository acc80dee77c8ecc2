"""SQL text of the tables of msprobe's database, in the layouts of two msprobe versions.

The tables of targets (tensor names), of metrics, of tags and of `global_stats` are those of msprobe 26.2.0. As in
msprobe 8.3.0, the statistics are in tables `metric_<id>_step_<first>_<last>` of `step_partition` steps each.
`trend_data`, which is a table in 26.2.0, is a view over these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.security.escaping import sql_identifier

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


def partition_name(metric: int, first: int, last: int) -> str:
    """Return the name of the table with the rows of `metric` from step `first` to step `last`."""
    return f"metric_{metric}_step_{first}_{last}"


def partition_table(name: str, first: int, last: int, columns: Sequence[str]) -> str:
    """Return the statement that creates the table `name` for the steps `first` to `last`."""
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
