"""Convert a store of schema version 1, once: it gets the corrected times and the positions that version 2 stores.

Schema version 1 stored times with the jumps of the clocks of ranks, and views calculated the positions of imported
scalars. One commit replaces all files whose rows change. The first step of the upgrade raises the schema version, which
earlier releases refuse. Until the last step, this release refuses to read the store. A process that is killed in
between leaves a store that the next upgrade completes. The old files remain on disk until vacuum deletes them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from rankscope_storage.base.datasets import DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import STORE_VERSION, conform
from rankscope_storage.files.encoding import DataFile, discard, read_file, write_file
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.files.sorting import file_mantissa_bits
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.shard_lock import all_shards, shard_numbers
from rankscope_storage.log.snapshot import RowRanges, Snapshot
from rankscope_storage.query.sql_script import write_sql_script
from rankscope_storage.sql.goodput import CLOCK_JUMPS, JUMPS
from rankscope_storage.sql.scalar_history import IS_IMPORTED
from rankscope_storage.sql.views import files_select

TRANSACTION: Final = "schema"
"""Name of the transaction that the commit with the converted files increments to the schema version."""

_TRIES: Final = 5
_TIMED: Final = [name for name in DATASETS if name not in {"samples", *DIMENSIONS, *ROLLUPS.values()}]

_EPOCHS: Final = f"name = 'epoch' AND isfinite(value) AND step IS NOT NULL AND {IS_IMPORTED}"
_PLACES: Final = f"""\
CREATE TABLE place AS
WITH with_epoch AS (
  SELECT run, coalesce(attempt, 0) AS attempt, incarnation, seq, step, floor(value) AS epoch
  FROM scalars WHERE {_EPOCHS}
),
of_loss AS (
  -- An evaluation may count its own batches: if the log has a loss, the steps of the loss decide.
  SELECT *, bool_or(has_loss) OVER (PARTITION BY run) AS any_loss
  FROM (
    SELECT *, (run, incarnation, seq) IN (
      SELECT (run, incarnation, seq) FROM scalars WHERE name = 'loss' AND {IS_IMPORTED}) AS has_loss
    FROM with_epoch
  )
),
part AS (
  SELECT *, first_step <= lag(last_step) OVER (PARTITION BY run, attempt ORDER BY epoch) AS restarts
  FROM (
    SELECT run, attempt, epoch, min(step) AS first_step, max(step) AS last_step
    FROM of_loss WHERE has_loss OR NOT any_loss GROUP BY run, attempt, epoch
  )
),
epochs AS (
  SELECT run, epoch, (sum(steps) OVER (PARTITION BY run ORDER BY epoch) - steps)::BIGINT AS steps_before
  FROM (
    SELECT run, epoch, max(last_step) + (min(min(first_step)) OVER (PARTITION BY run) = 0)::INTEGER AS steps,
      bool_or(bool_or(restarts)) OVER (PARTITION BY run) AS restart
    FROM part GROUP BY run, epoch
  )
  WHERE restart
),
within_epochs AS (
  SELECT DISTINCT run, incarnation, seq, step FROM scalars
  WHERE step IS NOT NULL AND {IS_IMPORTED} AND run IN (SELECT run FROM epochs)
),
behind_epochs AS (
  SELECT run, incarnation, seq, step + steps_before AS position
  FROM (
    SELECT within_epochs.*, with_epoch.epoch FROM within_epochs
    ASOF JOIN with_epoch ON within_epochs.run = with_epoch.run AND within_epochs.incarnation = with_epoch.incarnation
      AND within_epochs.seq >= with_epoch.seq
  ) JOIN epochs USING (run, epoch)
),
-- The records of runs with records without a step, in groups of a record with a step and those behind it without one.
record AS (
  SELECT *, count(position) OVER (PARTITION BY run, rank, attempt, incarnation ORDER BY seq) AS part_number
  FROM (
    SELECT DISTINCT run, rank, coalesce(attempt, 0) AS attempt, incarnation, seq, coalesce(position, step) AS position
    FROM scalars LEFT JOIN behind_epochs USING (run, incarnation, seq)
    WHERE {IS_IMPORTED} AND run IN (SELECT run FROM scalars WHERE step IS NULL AND {IS_IMPORTED})
  )
),
between_steps AS (
  SELECT run, rank, attempt, incarnation, seq, coalesce(
      first_value(position) OVER in_part + row_number() OVER in_part - 1,
      min(position) FILTER (part_number = 1) OVER (PARTITION BY run, rank, attempt, incarnation)
        - count(*) OVER (PARTITION BY run, rank, attempt, incarnation, part_number) + row_number() OVER in_part - 1
    ) AS position
  FROM record WINDOW in_part AS (PARTITION BY run, rank, attempt, incarnation, part_number ORDER BY seq)
),
crowded AS (  -- runs in which more records are without a step than fit between two steps of a scalar
  SELECT DISTINCT run
  FROM (
    SELECT run, seq > lag(seq) OVER earlier AND position <= lag(position) OVER earlier
      AND (step IS NULL OR lag(step) OVER earlier IS NULL) AS is_behind
    FROM scalars JOIN between_steps USING (run, incarnation, seq) WHERE {IS_IMPORTED}
    WINDOW earlier AS (
      PARTITION BY run, scalars.rank, between_steps.attempt, incarnation, name, labels ORDER BY seq)
  )
  WHERE is_behind
),
source AS (
  SELECT run, rank, incarnation, (sum(records) OVER earlier)::BIGINT AS records_before
  FROM (
    SELECT run, rank, incarnation, max(seq) + 1 AS records, min(attempt) AS attempt, min(ordinal) AS arrived
    FROM scalars WHERE {IS_IMPORTED} AND (step IS NULL OR run IN (SELECT run FROM crowded))
    GROUP BY run, rank, incarnation
  )
  WINDOW earlier AS (PARTITION BY run, rank ORDER BY attempt, arrived, incarnation
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT run, incarnation, seq, min(position) AS position FROM (
  SELECT run, incarnation, seq, position FROM behind_epochs
  WHERE run NOT IN (SELECT run FROM between_steps)
  UNION ALL
  SELECT between_steps.run, between_steps.incarnation, seq,
    CASE WHEN position IS NULL OR between_steps.run IN (SELECT run FROM crowded)
      THEN coalesce(records_before, 0) + seq + 1 ELSE position END
  FROM between_steps LEFT JOIN source
    ON between_steps.run = source.run AND between_steps.incarnation = source.incarnation
      AND between_steps.rank IS NOT DISTINCT FROM source.rank
) GROUP BY ALL
"""
"""Statement that calculates the positions of the imported records whose position may not be their step.

Usually, the position is the step. If the steps of a log restart with each epoch, the steps of the previous epochs are
added. A record without a step has the position of the record with a step before it, plus the number of records without
a step in between, so that the positions of a scalar have the order of its log. If they do not fit between two steps, or
if the log has no steps, the position of each record is its number, from 1, in its log; earlier logs of the run count
too."""

_CORRECTED: Final = f"""\
SELECT CASE WHEN offset_us IS NULL THEN given.ts ELSE make_timestamptz(epoch_us(given.ts) - offset_us) END AS ts
FROM given LEFT JOIN {JUMPS} AS jump ON given.run = jump.run AND given.incarnation = jump.incarnation
  AND given.seq >= jump.seq AND given.seq < jump.next_seq
ORDER BY number"""
_PLACED: Final = "SELECT position FROM given LEFT JOIN place USING (run, incarnation, seq) ORDER BY number"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeReport:
    """Report of an upgrade: the numbers of files that were replaced, and of their rows.

    `is_converted` is false if the store had the current schema version already.
    """

    is_converted: bool = True
    files: int = 0
    rows: int = 0


def upgrade(root: Location, sync: Sync) -> UpgradeReport:
    """Convert the store at `root` to the current schema version, unless it has this version already.

    Services that write the store must stop first. Raises ShardLockError, which names such a service on this machine. A
    service on another machine loses its shards, and stops at its next commit. Raises StoreError if the disk fails.
    """
    log = Log.open(root, sync, may_be_older=True)
    if log.is_current:
        return UpgradeReport(is_converted=False)
    with all_shards(root, "rankscope store upgrade"):
        log.begin_upgrade()
        change = log.replace_files(lambda: _conversion(log, sync), tries=_TRIES)
        log.end_upgrade()
    write_sql_script(root)
    added = () if change is None else change.added
    return UpgradeReport(files=len(added), rows=sum(file.rows for file in added))


def _conversion(log: Log, sync: Sync) -> Change | None:
    """Write the files with changed rows, and return the change that replaces the old ones and stops other services.

    Returns None if another process has converted the files, as two processes can do at the same time in a bucket.
    """
    if log.transaction(TRANSACTION) == STORE_VERSION:
        return None
    taken = {name: number + 1 for name, number in shard_numbers(log).items()}
    added: list[DataFile] = []
    removed: list[DataFile] = []
    snapshot = log.snapshot()
    try:
        with _database(snapshot) as database:
            for file in _candidates(database, snapshot):
                dataset, path = file.dataset, log.root / file.path
                rows = conform(read_file(path, dataset), dataset)
                converted = _converted(database, rows, dataset)
                if not converted.equals(rows):
                    bits = file_mantissa_bits(file.path)
                    added.append(write_file(log.root, dataset, file.part, converted, sync, mantissa_bits=bits))
                    removed.append(file)
    except (OSError, pa.ArrowException, duckdb.Error) as error:
        discard(log.root, added)
        raise StoreError(f"cannot upgrade {log.root}: {error}") from error
    return Change(added=added, removed=removed, transactions={TRANSACTION: STORE_VERSION, **taken})


def _database(snapshot: Snapshot) -> duckdb.DuckDBPyConnection:
    """Return a database with the view of the jumps of clocks, and the table of the positions of imported records."""
    database = duckdb.connect(config={"threads": 1})
    filesystem(snapshot.root).attach(database)
    database.execute("SET TimeZone = 'UTC'")
    for dataset, columns in (("events", "*"), ("scalars", "* EXCLUDE (position)")):
        files = snapshot.paths(dataset, RowRanges())
        database.execute(f"CREATE VIEW {dataset} AS SELECT {columns} FROM ({files_select(dataset, files)})")
    database.execute(CLOCK_JUMPS)
    database.execute(_PLACES)
    return database


def _candidates(database: duckdb.DuckDBPyConnection, snapshot: Snapshot) -> list[DataFile]:
    """Return the files that can contain rows of the runs whose times or positions change."""
    found: dict[str, DataFile] = {}
    for source, datasets in ((JUMPS, _TIMED), ("place", ["scalars"])):
        runs = [run for (run,) in database.execute(f"SELECT DISTINCT run FROM {source}").fetchall()]
        for run, dataset in itertools.product(runs, datasets):
            files = snapshot.of(dataset, RowRanges.of(run)).to_pylist()
            found |= {file["path"]: DataFile.from_snapshot(file) for file in files}
    return list(found.values())


def _converted(database: duckdb.DuckDBPyConnection, rows: pa.Table, dataset: str) -> pa.Table:
    """Return `rows` with corrected times and, for scalars, with positions."""
    given = rows.select(["run", "incarnation", "seq", "ts"]).append_column("number", pa.array(range(rows.num_rows)))
    database.register("given", given)
    changed = {"ts": _CORRECTED} | ({"position": _PLACED} if dataset == "scalars" else {})
    for name, query in changed.items():
        column = database.sql(query).to_arrow_table().column(name).cast(rows.schema.field(name).type)
        rows = rows.set_column(rows.schema.get_field_index(name), name, column.combine_chunks())
    database.unregister("given")
    return rows
