"""One tensor of a run: its curve over all ranks, its newest value on each rank, and the firings of rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_contract.model.kinds import JUDGED_OPS, OPS
from rankscope_contract.security.escaping import sql_identifier
from rankscope_storage.connection import Connection
from rankscope_view.data.history import History

MOST_FIRINGS: Final = 50

_CURVE: Final = """\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, step, epoch(max(ts)) AS time,
  CASE WHEN max(nans) > 0 THEN 'nan'::DOUBLE WHEN max(infs) > 0 THEN 'inf'::DOUBLE ELSE max({op})::DOUBLE END AS value,
  min({op})::DOUBLE AS lowest, max({op})::DOUBLE AS highest, max({baseline})::DOUBLE AS baseline
FROM {source} WHERE run = $run AND kind = $kind AND tensor = $tensor AND step IS NOT NULL
GROUP BY ALL HAVING value IS NOT NULL ORDER BY 1, 2"""
_RANKS: Final = """\
SELECT rank, arg_max(step, (coalesce(attempt, 0), step)) AS step,
  arg_max({op}, (coalesce(attempt, 0), step))::DOUBLE AS value, max({op})::DOUBLE AS highest,
  arg_max(step, {op}) AS highest_step, sum(nans)::BIGINT AS nans, sum(infs)::BIGINT AS infs
FROM {source} WHERE run = $run AND kind = $kind AND tensor = $tensor GROUP BY rank ORDER BY rank"""
_FIRINGS: Final = """\
SELECT attempt, rank, step, rule, severity, op, value, baseline, threshold FROM events
WHERE run = $run AND type = 'anomaly' AND tensor = $tensor AND kind IS NOT DISTINCT FROM $kind
ORDER BY attempt DESC, step DESC, rank LIMIT $most"""
_LEAVING: Final = """\
SELECT attempt, arg_min(rank, step) AS rank, min(step) AS step, kind, tensor FROM events
WHERE run = $run AND type = 'anomaly' AND tensor IS NOT NULL
GROUP BY attempt, kind, tensor ORDER BY attempt, step, tensor LIMIT 8"""
_SHAPE: Final = "SELECT shape, dtype, numel FROM tensors WHERE run = $run AND kind = $kind AND tensor = $tensor LIMIT 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDetail:
    """The numbers of one tensor. `ranks`, `firings` and `shape` have the columns of their queries."""

    tensor: str
    kind: str
    op: str
    ranks: tuple[dict[str, Any], ...]
    firings: tuple[dict[str, Any], ...]
    baseline: float | None
    shape: dict[str, Any] | None


def _column(op: str) -> tuple[str, str]:
    known = op if op in OPS else "norm"
    return sql_identifier(known), sql_identifier(f"{known}_baseline") if known in JUDGED_OPS else "NULL::FLOAT"


def tensor_history(connection: Connection, run: str, kind: str, op: str, tensor: str) -> History:
    """Return the largest value over ranks at each sampled step, and the range of the ranks, in the order of arrival."""
    column, baseline = _column(op)
    source = connection.relation("tensor_stats", run=run)
    query = _CURVE.format(op=column, baseline=baseline, source=source)
    rows = connection.query(query, {"run": run, "kind": kind, "tensor": tensor})
    columns = {
        name: rows[name].to_numpy(zero_copy_only=False).astype(np.float64)
        for name in ("time", "value", "lowest", "highest")
    }
    attempt, step = (rows[name].to_numpy().astype(np.int64) for name in ("attempt", "step"))
    later = np.minimum.accumulate(np.append(step, np.iinfo(np.int64).max)[::-1])[::-1][1:]
    return History(name=op, attempt=attempt, step=step, cumulative=np.arange(len(step)), stands=step < later, **columns)


def tensor_detail(connection: Connection, run: str, kind: str, op: str, tensor: str) -> TensorDetail:
    """Return the numbers of one tensor of one kind."""
    column, baseline = _column(op)
    source = connection.relation("tensor_stats", run=run)
    parameters = {"run": run, "kind": kind, "tensor": tensor}
    latest = connection.query(
        f"SELECT arg_max({baseline}, (coalesce(attempt, 0), step))::DOUBLE AS baseline FROM {source} "
        "WHERE run = $run AND kind = $kind AND tensor = $tensor",
        parameters,
    )
    return TensorDetail(
        tensor=tensor,
        kind=kind,
        op=op,
        ranks=tuple(connection.query(_RANKS.format(op=column, source=source), parameters).to_pylist()),
        firings=tuple(connection.query(_FIRINGS, parameters | {"most": MOST_FIRINGS}).to_pylist()),
        baseline=latest["baseline"].to_pylist()[0],
        shape=next(iter(connection.query(_SHAPE, parameters).to_pylist()), None),
    )


def first_to_leave(connection: Connection, run: str) -> list[dict[str, Any]]:
    """Return the tensors whose rules fired first, at most eight."""
    found: list[dict[str, Any]] = connection.query(_LEAVING, {"run": run}).to_pylist()
    return found
