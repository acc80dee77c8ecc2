"""Import OpenMetrics text: pages of exporters, and the output of `promtool tsdb dump` and `dump-openmetrics`.

Metrics of other exporters become rows of `samples`. Rankscope's metrics (`rankscope_loss`, `rankscope_tensor_value`, …)
become rows of the datasets from which they were exported, with the step that their rank had at that time. If a dump
contains several runs, all its metrics become `samples`, because the metrics of different runs cannot be separated. To
import one run, dump it with promtool's option `--match '{run="…"}'`.

The file is ordered by series, but rows must be stored in the order of time. The samples are therefore written to a
temporary DuckDB database, which uses disk space above its memory limit. Memory use does not depend on the size of the
file.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS
from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.importer import (
    FROM_FILE,
    NOT_MINE,
    RECORD_COLUMN,
    Detection,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRun,
)
from rankscope_ingest.importers.common.lines import LogLines, shown
from rankscope_ingest.importers.openmetrics.lines import (
    LineError,
    SeriesRole,
    parse_series,
    parse_value,
    series_columns,
    split_series,
)

_COMMENT: Final = re.compile(r"#\s*(HELP|TYPE|UNIT|EOF)\b")
_END: Final = "# EOF"
_KNOWN_SERIES: Final = 200_000
_SAMPLED_LINES: Final = 200

MEMORY_LIMIT: Final = "512MB"
CHUNK_ROWS: Final = 100_000
BATCH_ROWS: Final = 100_000

_SERIES_TEXTS: Final = (
    "role", "run", "metric", "target", "labels", "scalar_labels", "name", "unit", "kind", "tensor", "op", "placement",
    "shard_group",
)  # fmt: skip
_SERIES_NUMBERS: Final = ("rank", "index", "vpp_stage", "micro_step", "call_seq")
_SERIES_SCHEMA: Final = pa.schema(
    {"id": pa.uint64(), **dict.fromkeys(_SERIES_TEXTS, pa.string()), **dict.fromkeys(_SERIES_NUMBERS, pa.int64())}
)
_SAMPLE_SCHEMA: Final = pa.schema({"id": pa.uint64(), "line": pa.int64(), "ts": pa.int64(), "value": pa.float64()})
_TENSOR_KEY: Final = (
    "rank", "kind", "tensor", '"index"', "vpp_stage", "micro_step", "call_seq", "placement", "shard_group",
)  # fmt: skip
_OPS: Final = (*VALUE_OPS, *COUNT_OPS, *BASELINE_OPS)

_TIMED: Final = "samples JOIN series USING (id) WHERE ts IS NOT NULL"
_CLOCKS: Final = f"""\
CREATE TABLE series AS SELECT DISTINCT ON (id) * FROM series_seen;
CREATE TABLE step_at AS
  SELECT coalesce(rank, -1) AS rank_key, ts, any_value(value)::BIGINT AS step
  FROM {_TIMED} AND role = '{SeriesRole.STEP}' AND abs(value) < 9e15 GROUP BY ALL;
CREATE TABLE kind_step_at AS
  SELECT coalesce(rank, -1) AS rank_key, kind, ts, any_value(value)::BIGINT AS step
  FROM {_TIMED} AND role = '{SeriesRole.KIND_STEP}' AND abs(value) < 9e15 GROUP BY ALL;
CREATE TABLE attempt_at AS
  SELECT coalesce(rank, -1) AS rank_key, ts, any_value(value)::INTEGER AS attempt
  FROM {_TIMED} AND role = '{SeriesRole.ATTEMPT}' AND value BETWEEN 0 AND 2e9 GROUP BY ALL;
"""

# Only an export of a store has attempts. In other dumps, a decreasing step begins the next attempt.
_ATTEMPTS_BY_STEP: Final = """\
INSERT INTO attempt_at
SELECT rank_key, ts, sum(falls) OVER (PARTITION BY rank_key ORDER BY ts) AS attempt
FROM (SELECT rank_key, ts, (step < lag(step) OVER (PARTITION BY rank_key ORDER BY ts))::INTEGER AS falls FROM step_at);
UPDATE attempt_at SET attempt = 0 WHERE attempt IS NULL;
"""

_PLACED: Final = """\
SELECT value.*, step_at.step, attempt_at.attempt
FROM ({values}) value
{join} JOIN step_at ON step_at.rank_key = value.rank_key AND value.ts {at} step_at.ts
{join} JOIN attempt_at ON attempt_at.rank_key = value.rank_key AND value.ts {at} attempt_at.ts
"""

# A scraped value is repeated at each scrape: consecutive samples with equal value and step are one observation.
_ONCE: Final = "QUALIFY {same} IS DISTINCT FROM lag({same}) OVER (PARTITION BY {series} ORDER BY ts)"


_OLDEST_FIRST: Final = "ts NULLS FIRST, CASE WHEN ts IS NULL THEN line END, id, line"
"""The sort order of sample rows: by time; rows without a time come first, by line number.

Rows with a time are not ordered by line, because a later dump may have additional lines in between.
"""


class OpenMetrics:
    """The importer of OpenMetrics text."""

    name = "openmetrics"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that the file is OpenMetrics text.

        The confidence depends on the share of lines that are samples, and is higher if the file has TYPE and HELP
        lines.
        """
        if path.is_dir():
            return NOT_MINE
        text = head.decode("utf-8-sig", "replace")
        # Not splitlines(): a label may contain other characters that Python treats as line ends.
        lines = [line.rstrip("\r") for line in text.split("\n")[:_SAMPLED_LINES] if line.strip()]
        whole = lines[:-1] or lines
        described = sum(bool(_COMMENT.match(line)) for line in whole)
        samples = sum(_is_sample(line) for line in whole if not line.startswith("#"))
        # Many texts have lines of a word and a number, so other lines are accepted only in a file with TYPE lines.
        if not samples + described or samples + described < (0.5 if described else 0.9) * len(whole):
            return NOT_MINE
        if described:
            return Detection(
                0.95, f"{described} TYPE or HELP lines and {samples} samples in its first {len(whole)} lines"
            )
        return Detection(0.85, f"{samples} of its first {len(whole)} lines are samples of metrics")

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield the facts about the run, then rows in order of time, whatever the order of the file.

        A file that has grown therefore yields the previous rows first, in the same order.
        """
        with (
            tempfile.TemporaryDirectory(prefix="rankscope-import-") as folder,
            duckdb.connect(str(Path(folder, "samples.duckdb"))) as connection,
        ):
            pivot = Pivot(connection, folder)
            _fill(pivot, path, faults)
            pivot.close()
            runs = pivot.runs()
            yield _facts(pivot, runs)
            if len(runs) <= 1:
                yield from _blocks("scalars", pivot.scalars())
                yield from _blocks("tensor_stats", pivot.tensors())
            yield from _blocks("samples", pivot.samples(with_rankscope=len(runs) > 1))


def _fill(pivot: Pivot, path: Path, faults: Faults) -> None:
    known: dict[str, int] = {}
    ended = False
    for number, raw in LogLines(path, faults, is_valid=lambda line: _is_sample(line.decode("utf-8", "replace"))):
        line = raw.decode("utf-8", "replace").strip()
        if not line or line.startswith("#"):
            ended = ended or line == _END
            continue
        if ended:
            ended = False
            faults.add(number, f"the file continues after the end mark {_END}; the rest is imported too")
        try:
            series, rest = split_series(line)
            value, ts = parse_value(rest)
            if series not in known:
                if len(known) >= _KNOWN_SERIES:
                    known.clear()  # ids are derived from the text, so a series that returns gets the same id
                known[series] = pivot.series(series, series_columns(*parse_series(series)))
        except LineError as error:
            faults.add(number, f"{error}: {shown(raw)}")
            continue
        pivot.add(known[series], number, ts, value)


def _blocks(dataset: str, batches: Iterable[pa.RecordBatch]) -> Iterator[ImportedBlock]:
    """Yield the rows of one dataset as blocks.

    Each dataset is a separate source of records, because its number of rows grows independently of the other datasets.
    """
    schema = table_schema(dataset)
    for batch in batches:
        columns = {RECORD_COLUMN: pa.array(range(batch.num_rows), pa.int32())}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns[name] = column.cast(schema.field(name).type)
        origin = pa.array([FROM_FILE] * batch.num_rows, pa.string())
        columns["ts_origin"] = pa.compute.if_else(columns["ts"].is_valid(), origin, pa.scalar(None, pa.string()))
        yield ImportedBlock(records=batch.num_rows, tables={dataset: pa.table(columns)}, source=dataset)


def _facts(pivot: Pivot, runs: list[str]) -> ImportedRun:
    if len(runs) > 1:
        some = ", ".join(runs[:5])
        return ImportedRun(
            reason=f"the file contains metrics of {len(runs)} runs ({some}): they are stored as samples, not separated"
        )
    return ImportedRun(
        planned_steps=pivot.greatest("value", catalogue.STEPS_PLANNED.name),
        world_size=pivot.greatest("labels->>'$.world_size'", catalogue.RUN_INFO.name),
    )


def _is_sample(line: str) -> bool:
    try:
        series, rest = split_series(line.strip())
        parse_value(rest)
        parse_series(series)
    except LineError:
        return False
    return True


class Pivot:
    """A DuckDB database with the samples of one file. Files that do not fit into memory are in `folder`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: str) -> None:
        self._duckdb = connection
        self._duckdb.execute(
            f"SET memory_limit = '{MEMORY_LIMIT}'; SET temp_directory = '{folder}'; SET TimeZone = 'UTC'"
        )
        self._duckdb.from_arrow(_SERIES_SCHEMA.empty_table()).create("series_seen")
        self._duckdb.from_arrow(_SAMPLE_SCHEMA.empty_table()).create("samples")
        self._series: list[dict[str, Any]] = []
        self._samples: list[tuple[int, int, int | None, float]] = []

    def series(self, text: str, columns: dict[str, Any]) -> int:
        """Store the role (such as scalar or step) and the column values of a series; return its id.

        The id is derived from the text of the series, so it is the same in every file.
        """
        digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        self._series.append({"id": number, **columns})
        return number

    def add(self, series: int, line: int, ts: int | None, value: float) -> None:
        """Add one sample of the series with the id `series`. `ts` is in UTC µs; `line` is the line number."""
        self._samples.append((series, line, ts, value))
        if len(self._samples) >= CHUNK_ROWS:
            self._flush()

    def close(self) -> None:
        """Finish the input: write the remaining samples, and derive the steps and attempts of the rows.

        Rows can be read only after this call.
        """
        self._flush()
        self._duckdb.execute(_CLOCKS)
        if not self.is_export:
            self._duckdb.execute(_ATTEMPTS_BY_STEP)

    @property
    def is_export(self) -> bool:
        """True if the file is an export of a Rankscope store.

        In such a file, every sample is a separate row; in other files, a sample may repeat the previous one.
        """
        return bool(self._duckdb.sql(f"SELECT 1 FROM series WHERE role = '{SeriesRole.EXPORT}' LIMIT 1").fetchall())

    def runs(self) -> list[str]:
        """Return the names of the runs in the labels of Rankscope's metrics."""
        rows = self._duckdb.sql("SELECT DISTINCT run FROM series WHERE run IS NOT NULL ORDER BY run").fetchall()
        return [run for (run,) in rows]

    def greatest(self, expression: str, metric: str) -> int | None:
        """Return the highest integer from 0 that the SQL `expression` has in the samples of a metric, or None."""
        number = f"TRY_CAST({expression} AS INTEGER)"
        query = f"SELECT max({number}) FROM samples JOIN series USING (id) WHERE metric = ? AND {number} >= 0"
        ((greatest,),) = self._duckdb.execute(query, [metric]).fetchall()
        return None if greatest is None else int(greatest)

    def scalars(self) -> Iterator[pa.RecordBatch]:
        """Return the rows of the dataset `scalars`, oldest first."""
        values = (
            "SELECT id, line, ts, value, coalesce(rank, -1) AS rank_key, "
            "rank, name, unit, scalar_labels AS labels, vpp_stage, micro_step "
            f"FROM samples JOIN series USING (id) WHERE role = '{SeriesRole.SCALAR}'"
        )
        once = "" if self.is_export else _ONCE.format(same="(step, value)", series="id")
        return self._rows(
            f"SELECT step, rank, attempt, ts, vpp_stage, micro_step, name, unit, labels, value "
            f"FROM ({self._placed(values)}) {once} ORDER BY {_OLDEST_FIRST}"
        )

    def tensors(self) -> Iterator[pa.RecordBatch]:
        """Return the rows of the dataset `tensor_stats`, oldest first."""
        key = ", ".join(_TENSOR_KEY)
        ops = ", ".join(f"any_value(value) FILTER (op = '{op}') AS \"{op}\"" for op in _OPS)
        values = (
            f"SELECT min(id) AS id, ts, coalesce(rank, -1) AS rank_key, {key}, {ops} "
            f"FROM samples JOIN series USING (id) WHERE role = '{SeriesRole.TENSOR}' GROUP BY ts, {key}"
        )
        placed, once = self._placed(values), ""
        if not self.is_export:
            # The values of a kind that was not sampled at the latest step belong to an earlier step.
            placed = (
                "SELECT value.* EXCLUDE (step), coalesce(kind_step_at.step, value.step) AS step "
                f"FROM ({placed}) value ASOF LEFT JOIN kind_step_at ON kind_step_at.rank_key = value.rank_key "
                "AND kind_step_at.kind = value.kind AND value.ts >= kind_step_at.ts"
            )
            once = _ONCE.format(same="coalesce(step::VARCHAR, ts::VARCHAR)", series=key)
        listed = ", ".join(f'"{op}"' for op in _OPS)
        counts = ", ".join(f'CASE WHEN abs("{op}") < 9e18 THEN "{op}"::BIGINT END AS "{op}"' for op in COUNT_OPS)
        return self._rows(
            f"SELECT step, attempt, ts, {key}, {listed} FROM "
            f"(SELECT * REPLACE ({counts}) FROM ({placed}) {once}) ORDER BY ts NULLS FIRST, id, {key}"
        )

    def samples(self, *, with_rankscope: bool) -> Iterator[pa.RecordBatch]:
        """Return the rows of the dataset `samples`, oldest first.

        With `with_rankscope`, Rankscope's own metrics are included; the name of the run is then a label of these
        samples.
        """
        roles = "true" if with_rankscope else f"role = '{SeriesRole.SAMPLE}'"
        return self._rows(
            f"SELECT ts, target, metric, labels, value FROM samples JOIN series USING (id) WHERE {roles} "
            f"ORDER BY {_OLDEST_FIRST}"
        )

    def _placed(self, values: str) -> str:
        """Return a query that adds the step and the attempt to the rows of the query `values`.

        In a file that was exported from a Rankscope store, a row gets the step and attempt that have the same time as
        the row. In other files, it gets the latest step and attempt up to the time of the row.
        """
        join, at = ("LEFT", "=") if self.is_export else ("ASOF LEFT", ">=")
        return _PLACED.format(values=values, join=join, at=at)

    def _rows(self, query: str) -> Iterator[pa.RecordBatch]:
        yield from self._duckdb.sql(query).to_arrow_reader(BATCH_ROWS)

    def _flush(self) -> None:
        if self._series:
            seen = pa.Table.from_pylist(self._series, _SERIES_SCHEMA)
            self._duckdb.from_arrow(seen).insert_into("series_seen")
            self._series = []
        if self._samples:
            arrays = map(pa.array, zip(*self._samples, strict=True), _SAMPLE_SCHEMA.types)
            rows = pa.Table.from_arrays(list(arrays), schema=_SAMPLE_SCHEMA)
            self._duckdb.from_arrow(rows).insert_into("samples")
            self._samples = []


IMPORTER = OpenMetrics()
