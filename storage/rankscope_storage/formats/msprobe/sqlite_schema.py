"""SQL text of the tables of msprobe's database, in both of its layouts.

Targets, metrics, tags and `global_stats` are those of msprobe 26.2.0. The numbers are in tables of `step_partition`
steps each, `metric_<id>_step_<first>_<last>`, as in msprobe 8.3.0. `trend_data`, a table in 26.2.0, is a view over
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.security.escaping import sql_identifier

OPS: Final = ("norm", "min", "max", "zeros", "nans", "mean")
"""Statistics in the order of `trend_data`."""

_PART_OF_VIEW: Final = 400  # SQLite allows 500 SELECTs in one UNION

TABLES: Final = """\
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
CREATE TABLE monitoring_tags (
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
CREATE TABLE metric_stats (
    metric_id INTEGER NOT NULL,
    stat_name TEXT NOT NULL,
    PRIMARY KEY (metric_id, stat_name),
    FOREIGN KEY (metric_id) REFERENCES monitoring_metrics(metric_id)
) WITHOUT ROWID;
CREATE TABLE export_facts (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
"""
"""Tables of the database. `export_facts` is not msprobe's: run, partition size, and the meaning of numbers."""


def partition_name(metric: int, first: int, last: int) -> str:
    """Return the name of the table with the steps `first` to `last` of a metric."""
    return f"metric_{metric}_step_{first}_{last}"


def partition_table(name: str, first: int, last: int, columns: Sequence[str]) -> str:
    """Return the statement that creates the table `name` for these steps."""
    listed = ", ".join(f"{sql_identifier(column)} REAL DEFAULT NULL" for column in columns)
    return (
        f"CREATE TABLE {name} (rank INTEGER NOT NULL, step INTEGER NOT NULL CHECK(step BETWEEN {first} AND {last}), "
        f"target_id INTEGER NOT NULL, {listed}, PRIMARY KEY (rank, step, target_id), "
        "FOREIGN KEY (target_id) REFERENCES monitoring_targets(target_id)) WITHOUT ROWID"
    )


def global_stats_table(metrics: Sequence[str]) -> str:
    """Return the statement that creates `global_stats`, one row with ranges and the statistics of each metric."""
    listed = "".join(f", {sql_identifier(metric)} TEXT DEFAULT NULL" for metric in metrics)
    return (
        "CREATE TABLE global_stats (min_step INTEGER DEFAULT 0, max_step INTEGER DEFAULT 0, "
        f"max_rank INTEGER DEFAULT 0{listed})"
    )


def trend_views(partitions: Mapping[str, int]) -> Iterator[str]:
    """Yield the statements that create the view `trend_data` over the tables `partitions`, which map to metric ids."""
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
    """Return the tags of a target's name with their categories: `layers.3` is a layer, any other word is a module."""
    found = set()
    words = target.split(".")
    for before, word in zip(["", *words], words, strict=False):
        if not word.isdigit():
            found.add((word, "module"))
        elif before and not before.isdigit():
            found.add((f"{before}.{word}", "layer"))
    return found
