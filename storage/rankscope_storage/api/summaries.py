"""Summaries of a store: its runs, the main numbers of one run, and the anomalies of one run.

Anomalies are in causal order: a cause comes before its effects.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType, causal_key
from rankscope_storage.base.datasets import DATASETS, IMPORT_PREFIX
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.sql.first_causes import INCIDENT_GAP_STEPS
from rankscope_storage.sql.scalar_history import IS_IMPORTED, is_main_source
from rankscope_storage.sql.views import files_select

# An import and an incident have no time of the run. Logs that were imported into a live run do not change its facts.
_RUNS: Final = f"""\
WITH known AS (
  SELECT run, max(attempt) + 1 AS attempts, count(DISTINCT rank) AS ranks,
    coalesce(max(step) FILTER (attempt = shown), max(step)) AS last_step, min(ts) AS first_ts, max(ts) AS last_ts
  FROM (
    SELECT run, attempt, rank, step, ts FROM scalars WHERE {is_main_source()}
    UNION ALL
    SELECT run, attempt, rank, step, if(type IN ('import', 'incident'), NULL, ts) AS ts FROM events
    WHERE coalesce(NOT starts_with(incarnation, '{IMPORT_PREFIX}'), true)
      OR run NOT IN (SELECT run FROM attempts WHERE source_kind = 'live')
    UNION ALL
    SELECT run, NULL, NULL, last_step, NULL FROM ({{tensor_runs}})
  ) LEFT JOIN (SELECT run, attempt AS shown FROM runs WHERE source_kind = 'live') USING (run) GROUP BY run
)
SELECT run, state, coalesce(attempts, 0) AS attempts, coalesce(ranks, 0) AS ranks,
  coalesce(greatest(runs.last_step, if(state = 'failed' OR (state = 'stopped' AND source_kind = 'live'), NULL,
    known.last_step)), known.last_step) AS last_step,
  planned_steps,
  coalesce(started_at, first_ts) AS started_at, ended_at, last_ts AS last_seen_at,
  round(epoch(coalesce(ended_at, if(source_kind <> 'live' AND state NOT IN ('running', 'stalled'), NULL, last_ts))
    - coalesce(started_at, first_ts)), 1) AS seconds, source_kind, reason,
  tags, note
FROM runs FULL JOIN known USING (run)
ORDER BY 7 DESC NULLS LAST, run
"""

_EXTENT: Final = f"""\
SELECT max(attempt) + 1 AS attempts, count(DISTINCT rank) AS ranks, min(step) AS first_step, max(step) AS last_step
FROM (SELECT attempt, rank, step FROM {{scalars}} WHERE run = $run AND {is_main_source()}
      UNION ALL SELECT attempt, rank, step FROM {{tensor_stats}} WHERE run = $run)
"""

# Every rank logs each step: their mean is the loss. The loss without labels is the main one of the training. If a log
# contains a step twice, `repeat` distinguishes its records.
_LOSS: Final = f"""\
WITH logged AS (
  SELECT *, coalesce({IS_IMPORTED}, false) AS is_imported FROM scalars
  WHERE run = $run AND name = 'loss' AND {is_main_source()} AND labels IS NOT DISTINCT FROM (
    SELECT labels FROM scalars WHERE run = $run AND name = 'loss' AND {is_main_source()}
    ORDER BY labels NULLS FIRST LIMIT 1)
),
loss AS (
  SELECT attempt, position, repeat, avg(value) AS value
  FROM (
    SELECT attempt, position, NULL AS repeat, value FROM logged WHERE NOT is_imported
    UNION ALL
    SELECT attempt, position, row_number() OVER (PARTITION BY attempt, position, rank ORDER BY ordinal), value
    FROM logged WHERE is_imported
  )
  GROUP BY attempt, position, repeat
)
SELECT first(value ORDER BY attempt, position, repeat) AS loss_first,
  last(value ORDER BY attempt, position, repeat) AS loss_last, min(value) FILTER (isfinite(value)) AS loss_min
FROM loss
"""

# Every process counts from 0; importers store a rate instead.
_TOKENS: Final = f"""\
SELECT coalesce(
  (SELECT sum(tokens) / nullif(sum(seconds), 0) FROM (
    SELECT sum(tokens) AS tokens, max(seconds) AS seconds FROM (
      SELECT attempt, max(value) - min(value) AS tokens, epoch(max(ts)) - epoch(min(ts)) AS seconds
      FROM scalars WHERE run = $run AND name = 'tokens_total' AND {is_main_source()}
      GROUP BY attempt, rank, incarnation
    ) GROUP BY attempt)),
  (SELECT avg(value) FROM {{scalars}}
    WHERE run = $run AND name = 'tokens_per_second' AND isfinite(value) AND {is_main_source()})
) AS tokens_per_second
"""

_GOODPUT: Final = "SELECT goodput, wall_seconds FROM goodput WHERE run = $run AND steps > 0"

_CODE: Final = """\
SELECT max_by(git_commit, ordinal) AS git_commit, max_by(command, ordinal) AS command
FROM (
  SELECT coalesce(ordinal, 0) AS ordinal, config->>'$.git_commit' AS git_commit,
    array_to_string(CAST(config->'$.argv' AS VARCHAR[]), ' ') AS command
  FROM (SELECT ordinal, CASE WHEN json_valid(config) THEN config::JSON END AS config FROM {runs} WHERE run = $run)
)
"""

_LOST: Final = """\
SELECT coalesce(sum(coalesce(TRY_CAST(details->>'$.records' AS BIGINT),  -- negative if lost records were recovered
    TRY_CAST(details->>'$.last' AS BIGINT) - TRY_CAST(details->>'$.first' AS BIGINT) + 1)), 0)::BIGINT AS lost_records
FROM (
  SELECT CASE WHEN json_valid(details) THEN details::JSON END AS details
  FROM {events} WHERE run = $run AND type = 'gap'
)
"""

_CHOSEN_ANOMALIES: Final = "run = $run AND type = $type AND (step BETWEEN $first AND $last OR $first IS NULL)"
_ANOMALIES: Final = """\
SELECT {columns} FROM {events}
WHERE {chosen}
QUALIFY rank() OVER (ORDER BY attempt NULLS FIRST, step NULLS LAST) <= $top
"""

_ANOMALY_LINES: Final = f"""\
WITH firing AS (
  SELECT *, CASE WHEN coalesce(step - lag(step) OVER same > {INCIDENT_GAP_STEPS}, true) THEN step END AS begins
  FROM {{events}} WHERE {{chosen}}
  WINDOW same AS (PARTITION BY attempt, rank, rule, kind, tensor, op, step IS NULL ORDER BY step)
),
placed AS (
  SELECT *, max(begins) OVER (
    PARTITION BY attempt, rank, rule, kind, tensor, op, step IS NULL ORDER BY step) AS first_step
  FROM firing
)
SELECT {{columns}}, min(step) || CASE WHEN max(step) > min(step) THEN '-' || max(step) ELSE '' END AS steps,
  count(*) AS firings,
  coalesce(list(DISTINCT rank ORDER BY rank) FILTER (rank IS NOT NULL), []) AS ranks
FROM placed GROUP BY attempt, rule, kind, tensor, op, first_step ORDER BY kind, tensor, op, rule
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of a run, such as its state, steps and losses. A value is None if the store does not have this value."""

    run: str
    state: str | None
    reason: str | None  # why the run is in this state
    attempts: int
    ranks: int
    first_step: int | None
    last_step: int | None
    planned_steps: int | None
    rows: Mapping[str, int]  # by dataset, only those that have any
    loss_first: float | None
    loss_last: float | None  # NaN if the run ended with NaN
    loss_min: float | None  # of finite losses
    tokens_per_second: float | None
    goodput: float | None  # time in useful steps / time since the first start of the run
    wall_seconds: float | None
    git_commit: str | None  # of the newest launch that reported one
    command: str | None  # command line, secrets masked
    lost_records: int
    bytes_on_disk: int  # including its share of files with several runs


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRow:
    """One anomaly of a run: one firing of a rule.

    Columns such as step, micro-batch, kind and pipeline stage define its position in the causal order, in which a cause
    comes before its effects.
    """

    attempt: int | None
    rank: int | None
    step: int | None
    micro_step: int | None
    ts: dt.datetime | None
    severity: str | None
    rule: str | None
    kind: str | None
    tensor: str | None
    op: str | None
    value: float | None
    baseline: float | None
    threshold: float | None
    pp_stage: int | None
    vpp_stage: int | None
    call_id: int | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyLine(AnomalyRow):
    """The first of several anomalies with one cause: one rule, tensor and statistic, and one first step on all ranks.

    On a rank, consecutive firings belong together if at most INCIDENT_GAP_STEPS steps are between them.
    """

    steps: str | None  # such as 10 or 21-59
    firings: int
    ranks: list[int]


def runs(connection: Connection) -> pa.Table:
    """Return a table with one row per run, the run with the latest start first.

    For a run without a row in the dataset `runs`, such as a run that never registered with a service, all values are
    computed from its rows in other datasets.
    """
    with connection.pinned():
        return connection.query(_RUNS.format(tensor_runs=_tensor_runs(connection)))


def _tensor_runs(connection: Connection) -> str:
    """Return a query for the name and the last step of each run in the dataset `tensor_stats`.

    For files with rows of a single run, the text of the query contains the run and its last step, taken from the Delta
    log. The query reads only files with rows of several runs.
    """
    files = connection.files_table("tensor_stats").to_pylist()
    own, shared = set(), []
    for file in files:
        if file["run_min"] is not None and file["run_min"] == file["run_max"]:
            own.add((file["run_min"], file["step_max"]))
        else:
            shared.append(f"{connection.path}/{file['path']}")
    rows = [f"SELECT {sql_string(run)} AS run, {'NULL' if step is None else step} AS last_step" for run, step in own]
    rows.append(f"SELECT run, step AS last_step FROM ({files_select('tensor_stats', shared)})")
    return " UNION ALL ".join(rows)


def summary(connection: Connection, run: str, *, with_goodput: bool = True) -> RunSummary:
    """Return the summary of `run`.

    For a run that the store does not contain, `rows` of the summary is empty. The goodput of a run with 1,000,000 steps
    takes seconds; without it, goodput and wall time are None.
    """
    with connection.pinned():
        return _summary(connection, run, with_goodput=with_goodput)


def _summary(connection: Connection, run: str, *, with_goodput: bool) -> RunSummary:
    sources = {name: connection.relation(name, run=run) for name in DATASETS}
    known = _first_row(connection, "SELECT state, reason, planned_steps, last_step FROM runs WHERE run = $run", run=run)
    extent = _first_row(connection, _EXTENT.format_map(sources), run=run)
    rows = _row_counts(connection, sources, run)
    spent = _first_row(connection, _GOODPUT, run=run) if with_goodput else {}
    return RunSummary(
        run=run,
        state=known.get("state"),
        reason=known.get("reason"),
        planned_steps=known.get("planned_steps"),
        attempts=extent["attempts"] or int(bool(rows)),
        ranks=extent["ranks"],
        first_step=extent["first_step"],
        last_step=extent["last_step"] if extent["last_step"] is not None else known.get("last_step"),
        rows=rows,
        bytes_on_disk=_bytes_on_disk(connection, rows, run),
        goodput=spent.get("goodput"),
        wall_seconds=spent.get("wall_seconds"),
        **_first_row(connection, _LOSS, run=run),
        **_first_row(connection, _TOKENS.format_map(sources), run=run),
        **_first_row(connection, _CODE.format_map(sources), run=run),
        **_first_row(connection, _LOST.format_map(sources), run=run),
    )


def anomalies(connection: Connection, run: str, *, top: int, steps: tuple[int, int] | None = None) -> list[AnomalyRow]:
    """Return the first `top` anomalies of `run` within the closed range `steps`, causes before their effects."""
    columns = ", ".join(f'"{field.name}"' for field in fields(AnomalyRow))
    rows = _of_anomalies(connection, _ANOMALIES.replace("{columns}", columns), run, steps, top=top)
    return sorted((AnomalyRow(**row) for row in rows), key=causal_order)[:top]


def anomaly_lines(connection: Connection, run: str, *, steps: tuple[int, int] | None = None) -> list[AnomalyLine]:
    """Return all anomalies of `run` within the closed range `steps`, one line for each cause, in causal order."""
    columns = ", ".join(
        f'first("{field.name}" ORDER BY step, micro_step, call_id, rank) AS "{field.name}"'
        for field in fields(AnomalyRow)
    )
    rows = _of_anomalies(connection, _ANOMALY_LINES.replace("{columns}", columns), run, steps)
    return sorted((AnomalyLine(**row) for row in rows), key=causal_order)


def _of_anomalies(
    connection: Connection, query: str, run: str, steps: tuple[int, int] | None, **more: int
) -> list[dict[str, Any]]:
    first, last = steps or (None, None)
    parameters = {"run": run, "type": EventType.ANOMALY.value, "first": first, "last": last, **more}
    text = query.format(events=connection.relation("events", run=run, steps=steps), chosen=_CHOSEN_ANOMALIES)
    found: list[dict[str, Any]] = connection.query(text, parameters).to_pylist()
    return found


def causal_order(row: AnomalyRow) -> tuple[float, ...]:
    """Return the sort key of an anomaly: attempt, position in the causal order (causes before effects), rank.

    The attempt comes first, because an anomaly cannot have its cause in a later attempt.
    """
    key = causal_key(
        step=row.step,
        micro_step=row.micro_step,
        kind=row.kind,
        vpp_stage=row.vpp_stage,
        pp_stage=row.pp_stage,
        call_id=row.call_id,
        op=row.op,
    )
    return (-1 if row.attempt is None else row.attempt, *key, -1 if row.rank is None else row.rank)


def _row_counts(connection: Connection, sources: Mapping[str, str], run: str) -> dict[str, int]:
    counts = " UNION ALL ".join(
        f"SELECT '{name}' AS dataset, count(*) AS rows FROM {source} WHERE run = $run"
        for name, source in sources.items()
    )
    return {row["dataset"]: row["rows"] for row in connection.query(counts, {"run": run}).to_pylist() if row["rows"]}


def _bytes_on_disk(connection: Connection, rows: Mapping[str, int], run: str) -> int:
    total = 0.0
    for dataset, own_rows in rows.items():
        files = connection.files_table(dataset, run=run)
        own = files.filter((pc.field("run_min") == run) & (pc.field("run_max") == run))
        (all_rows, all_bytes), (exclusive_rows, exclusive_bytes) = (
            (pc.sum(table["rows"]).as_py() or 0, pc.sum(table["size_bytes"]).as_py() or 0) for table in (files, own)
        )
        shared_rows, shared_bytes = all_rows - exclusive_rows, all_bytes - exclusive_bytes
        share = (own_rows - exclusive_rows) / shared_rows if shared_rows else 0
        total += exclusive_bytes + shared_bytes * share
    return round(total)


def _first_row(connection: Connection, query: str, **parameters: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = connection.query(query, parameters).to_pylist()
    return rows[0] if rows else {}
