"""Conversion of msprobe's CSV output to an SQLite database, in the layout of msprobe 8.3.0, which its manual describes.

The values are those of the files. NaN is stored as NULL, because SQLite has no NaN.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rankscope.msprobe import csv_rows
from rankscope_msprobe.files.csv_layout import FAMILIES, FamilyFile

if TYPE_CHECKING:
    import pyarrow as pa

DATABASE: Final = "monitor_metrics.db"
_MAX_EMPTY_TABLES: Final = 100
"""Largest number of tables of a data type that are created without rows; the name of a file can claim 10**18 steps."""

_GLOBAL_STATS: Final = """\
CREATE TABLE global_stats (
    stat_name TEXT PRIMARY KEY,
    stat_value INTEGER NOT NULL
) WITHOUT ROWID;
"""


@dataclass
class CSV2DBConfig:
    """Arguments of `csv2db`, with the names and defaults of msprobe's manual."""

    monitor_path: str
    """Output folder of the monitor, which contains the folders of the ranks."""
    time_start: str | None = None
    """Earliest time in the name of a folder to convert, such as `Dec03_21-34-40`. None sets no lower limit."""
    time_end: str | None = None
    """Latest time in the name of a folder to convert, inclusive. None sets no upper limit."""
    process_num: int = 1
    """Number of files that are read at the same time, up to 128."""
    data_type_list: list[str] | None = None
    """Data types to convert, as in the names of the files. None converts msprobe's families of tensors and `other`."""
    output_dirpath: str | None = None
    """Folder of the database. `csv2db` replaces None by the folder `<time>-csv2db` in `monitor_path`."""
    step_partition: int = 500
    """Number of steps in one table, from 10 to 10,000,000."""


def csv2db(config: CSV2DBConfig) -> None:
    """Write msprobe's CSV files to the database `monitor_metrics.db`. An earlier database with this name is replaced.

    The tables are those of msprobe 8.3.0: `monitoring_targets`, `monitoring_metrics`, `metric_stats`, `global_stats`,
    and for each data type and partition of steps `metric_<id>_step_<first>_<last>`. The path is printed.

    Raises ValueError if an argument is wrong, if no folder is in the range of times, or if a file with the name of the
    database is not such a database.
    """
    from rankscope_storage.formats.sqlite_schema import DIMENSION_TABLES, OtherFileError, new_database

    processes = csv_rows.checked_number("process_num", config.process_num)
    partition = csv_rows.checked_number("step_partition", config.step_partition, 10, 10_000_000)
    types = csv_rows.checked_types(config.data_type_list, tuple(FAMILIES))
    ranks = csv_rows.rank_files(config.monitor_path, config.time_start, config.time_end)
    folder = csv_rows.output_folder(config.monitor_path, config.output_dirpath, "csv2db")
    config.output_dirpath = str(folder)
    target = folder / DATABASE
    files = {family: _files(ranks, family) for family in types}
    columns = {
        family: csv_rows.statistics_of(csv_rows.file_columns(path for _, path in found))
        for family, found in files.items()
    }
    statistics = {family: names for family, names in columns.items() if names}
    jobs = [(rank, family) for rank in ranks for family in statistics]
    try:
        with new_database(target, DIMENSION_TABLES + _GLOBAL_STATS, own_table="monitoring_metrics") as connection:
            database = _Database(connection, partition, statistics)
            # As in msprobe, the names of the files determine the first and the last step.
            database.describe([file for family in statistics for file, _ in files[family]], max(ranks))
            for (rank, family), table in csv_rows.in_parallel(
                lambda job: csv_rows.family_rows(ranks[job[0]], job[1]), jobs, processes
            ):
                if table is not None:
                    database.insert(rank, family, table)
    except OtherFileError as error:
        raise ValueError(
            f"{target} is not a database that csv2db or msprobe wrote: choose another output_dirpath"
        ) from error
    except sqlite3.Error as error:
        raise OSError(f"cannot write {target}: {error}") from error
    print(f"{database.rows:,} rows of {len(ranks)} ranks; output has been saved to: {target}")


class _Database:
    """Writer of a new SQLite database, within a transaction of `connection`.

    `statistics` contains the names of the statistics of each msprobe data type.
    """

    def __init__(self, connection: sqlite3.Connection, partition: int, statistics: Mapping[str, Sequence[str]]) -> None:
        from rankscope_storage.formats.sqlite_schema import MetricTables

        self.rows = 0
        self._connection = connection
        self._partition = partition
        self._statistics = statistics
        self._tables = MetricTables(connection, partition)
        for family, columns in statistics.items():
            self._tables.metric(family, columns)

    def describe(self, files: Sequence[FamilyFile], last_rank: int) -> None:
        """Write the ranges of steps and ranks, and create the tables of each data type for all steps in `files`."""
        first, last = min((file.first for file in files), default=0), max((file.last for file in files), default=0)
        facts = {"max_rank": last_rank, "min_step": first, "max_step": last, "step_partition_size": self._partition}
        self._connection.executemany("INSERT INTO global_stats VALUES (?, ?)", facts.items())
        for family in self._statistics:
            for step in range(first // self._partition * self._partition, last + 1, self._partition)[
                :_MAX_EMPTY_TABLES
            ]:
                self._table(family, step)

    def insert(self, rank: int, family: str, table: pa.Table) -> None:
        """Insert the rows of one rank and one msprobe family into the database; `table` is sorted by step."""
        statistics = self._statistics[family]
        present = {*table.column_names}
        columns = [
            table[name].to_pylist() if name in present else [None] * len(table)
            for name in ("name", "vpp_stage", "micro_step", *statistics)
        ]
        names, vpp, micro, *numbers = columns
        targets = [self._tables.target((*key, max(0, one))) for *key, one in zip(names, vpp, micro, strict=True)]
        self._tables.insert(family, statistics, rank, table["step"].to_pylist(), [targets, *numbers])
        self.rows += len(table)

    def _table(self, family: str, step: int) -> str:
        columns = self._statistics[family]
        return self._tables.partition(self._tables.metric(family, columns), step, columns)


def _files(ranks: Mapping[int, Sequence[csv_rows.Files]], family: str) -> list[tuple[FamilyFile, Path]]:
    return [file for folders in ranks.values() for files in folders for file in files.get(family, ())]
