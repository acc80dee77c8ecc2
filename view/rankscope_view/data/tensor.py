"""One tensor of a run: its curve on all ranks with baseline and limit, its newest values, and the firings of rules."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from rankscope_contract.model.kinds import COUNT_OPS, JUDGED_OPS, OPS
from rankscope_storage.api.summaries import AnomalyRow, causal_order
from rankscope_storage.base.escaping import sql_identifier
from rankscope_storage.connection import Connection
from rankscope_storage.sql.first_causes import INCIDENT_GAP_STEPS
from rankscope_view.data.curves import Curve, CurveRequest, Firing, Line, Role, curve, on_axis
from rankscope_view.data.incidents import CAUSAL_PLACE
from rankscope_view.data.series import Floats, History, arrival_history

MOST_FIRINGS: Final = 50
MOST_LINES: Final = 16
"""Number of ranks up to which each rank has its own line in the chart of a tensor; above, the others are a range."""

OTHER_POINTS: Final = 1000
"""Limit of the number of points of each line that is not about the subject of the chart."""

# The value of a row that people read: a statistic of the finite elements alone would hide the others. Counts are exact.
_MEASURED: Final = """\
CASE WHEN nans > 0 THEN 'nan'::DOUBLE WHEN infs > 0 THEN 'inf'::DOUBLE ELSE {op}::DOUBLE END"""
_CURVE: Final = """\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, step, epoch(max(ts)) AS time, max({measured}) AS value,
  min({op})::DOUBLE AS lowest, max({op})::DOUBLE AS highest
FROM {source} WHERE run = $run AND kind = $kind AND tensor = $tensor AND step IS NOT NULL
  AND coalesce(attempt, 0) = coalesce($attempt, attempt, 0)
GROUP BY ALL HAVING value IS NOT NULL ORDER BY 1, 2"""
_BY_RANK: Final = """\
SELECT rank, coalesce(attempt, 0)::BIGINT AS attempt, step, max({op})::DOUBLE AS value,
  max({baseline})::DOUBLE AS baseline
FROM {source} WHERE run = $run AND kind = $kind AND tensor = $tensor AND step IS NOT NULL
  AND coalesce(attempt, 0) = coalesce($attempt, attempt, 0) AND rank IN (SELECT unnest($ranks)) GROUP BY ALL"""
# All of the newest row, so that a rank that is NaN now does not show its last finite value as the newest one.
_RANKS: Final = """\
WITH own AS (
  SELECT rank, step, nans, infs, {baseline} AS baseline, {measured} AS value, (coalesce(attempt, 0), step) AS place,
    max(CASE WHEN isfinite({measured}) THEN place END) OVER (PARTITION BY rank) AS finite
  FROM {source} WHERE run = $run AND kind = $kind AND tensor = $tensor
)
SELECT rank, max_by(step, place) AS step, arg_max_null(value, place) AS value,
  arg_max(step, place) FILTER (place = finite) AS finite_step,
  arg_max(value, place) FILTER (place = finite) AS finite_value,
  arg_min(step, place) FILTER (NOT isfinite(value) AND (finite IS NULL OR place > finite)) AS bad_since,
  max(value) FILTER (isfinite(value)) AS highest, arg_max(step, value) FILTER (isfinite(value)) AS highest_step,
  sum(nans)::BIGINT AS nans, sum(infs)::BIGINT AS infs, arg_max_null(baseline, place)::DOUBLE AS baseline
FROM own GROUP BY rank ORDER BY rank"""
_FIRINGS: Final = """\
SELECT attempt, rank, step, rule, severity, op, value, baseline, threshold FROM events
WHERE run = $run AND type = 'anomaly' AND tensor = $tensor AND kind IS NOT DISTINCT FROM $kind
ORDER BY attempt DESC, step DESC, rank LIMIT 5000"""
_THRESHOLD: Final = """\
SELECT arg_max(threshold, ts) AS threshold FROM events
WHERE run = $run AND type = 'anomaly' AND kind = $kind AND op = $op AND rule = $rule AND threshold IS NOT NULL"""
_CONFIG: Final = "SELECT config FROM runs_history WHERE run = $run AND config IS NOT NULL ORDER BY ordinal DESC LIMIT 1"
_TURBULENCE: Final = "AnomalyTurbulence"
_LEAVING: Final = f"""\
SELECT {", ".join(field.name for field in fields(AnomalyRow))} FROM events
WHERE run = $run AND type = 'anomaly' AND tensor IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY tensor ORDER BY coalesce(attempt, 0), {CAUSAL_PLACE}) = 1
ORDER BY tensor"""
_FIRED: Final = """\
SELECT count(*) AS firings, count(*) FILTER (tensor = $tensor) AS of_tensor FROM events
WHERE run = $run AND type = 'anomaly' AND (tensor, kind) IS DISTINCT FROM ($tensor, $kind)"""
_SHAPE: Final = "SELECT shape, dtype, numel FROM tensors WHERE run = $run AND kind = $kind AND tensor = $tensor LIMIT 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The range that a rule allows around the baseline: up to `high` times it, and down to `low` times it."""

    high: float
    low: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDetail:
    """The numbers of one tensor. `ranks`, `firings` and `shape` have the columns of their queries."""

    tensor: str
    kind: str
    op: str
    ranks: tuple[dict[str, Any], ...]
    firings: tuple[dict[str, Any], ...]  # the newest first
    limit: Limit | None
    shape: dict[str, Any] | None
    firings_elsewhere: tuple[int, int] = (0, 0)  # of the run, and those of other kinds of this tensor

    @property
    def subject(self) -> dict[str, Any] | None:
        """Return the rank that the chart is about: of the first firing, or else with the highest value."""
        first = next((one["rank"] for one in reversed(self.firings) if one["rank"] is not None), None)
        found = next((row for row in self.ranks if row["rank"] == first), None) if first is not None else None
        return found or max(self.ranks, key=lambda row: (row["nans"] or 0, row["highest"] or 0), default=None)


def _columns(op: str) -> dict[str, str]:
    """Return the SQL of a statistic: its column, its value as people read it, and its baseline."""
    known = op if op in OPS else "norm"
    column = sql_identifier(known)
    return {
        "op": column,
        "measured": f"{column}::DOUBLE" if known in COUNT_OPS else _MEASURED.format(op=column),
        "baseline": sql_identifier(f"{known}_baseline") if known in JUDGED_OPS else "NULL::FLOAT",
    }


def tensor_history(
    connection: Connection, run: str, kind: str, op: str, tensor: str, *, attempt: int | None = None
) -> History:
    """Return the largest value over ranks at each sampled step, and the range of the ranks, in the order of arrival."""
    source = connection.relation("tensor_stats", run=run)
    parameters = {"run": run, "kind": kind, "tensor": tensor, "attempt": attempt}
    return arrival_history(op, connection.query(_CURVE.format(**_columns(op), source=source), parameters))


def tensor_detail(connection: Connection, run: str, kind: str, op: str, tensor: str) -> TensorDetail:
    """Return the numbers of one tensor of one kind."""
    source = connection.relation("tensor_stats", run=run)
    parameters = {"run": run, "kind": kind, "tensor": tensor}
    ranks = connection.query(_RANKS.format(**_columns(op), source=source), parameters)
    fired = connection.query(_FIRED, parameters).to_pylist()[0]
    return TensorDetail(
        tensor=tensor,
        kind=kind,
        op=op,
        ranks=tuple(ranks.to_pylist()),
        firings=tuple(connection.query(_FIRINGS, parameters).to_pylist()),
        limit=allowed_range(connection, run, kind, op),
        shape=next(iter(connection.query(_SHAPE, parameters).to_pylist()), None),
        firings_elsewhere=(fired["firings"], fired["of_tensor"]),
    )


def allowed_range(connection: Connection, run: str, kind: str, op: str) -> Limit | None:
    """Return the range around the baseline that the rule for turbulence of `run` allows.

    The newest firing of the rule has its threshold. Without a firing, the configuration of the run has it.
    """
    if op not in JUDGED_OPS:
        return None
    fired = connection.query(_THRESHOLD, {"run": run, "kind": kind, "op": op, "rule": _TURBULENCE})["threshold"]
    rule = _configured(next(iter(connection.query(_CONFIG, {"run": run})["config"].to_pylist()), None), kind, op)
    threshold = fired.to_pylist()[0] if fired.to_pylist()[0] is not None else rule.get("threshold")
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        return None
    return Limit(high=1 + threshold, low=1 / (1 + threshold) if rule.get("direction") == "both" else None)


def _configured(text: str | None, kind: str, op: str) -> Mapping[str, Any]:
    """Return the arguments of the rule for turbulence in a configuration; empty without a rule for `kind` and `op`."""
    try:
        rules = json.loads(text or "{}").get("rules") or []
        found = [one["args"] for one in rules if one["rule_name"] == _TURBULENCE]
        chosen = [one for one in found if op in one["ops"] and (not one.get("kinds") or kind in one["kinds"])]
    except (ValueError, AttributeError, TypeError, KeyError):  # the configuration of another tool
        return {}
    return chosen[0] if chosen else {}


def tensor_curve(
    connection: Connection, run: str, detail: TensorDetail, request: CurveRequest, attempt: int | None = None
) -> Curve:
    """Return the curve of a tensor: a line for each rank, its baseline and limit, and the points at which rules fired.

    `attempt` restricts the curve to one attempt. The range of a line is that of all ranks.
    """
    with connection.pinned():
        whole = tensor_history(connection, run, detail.kind, detail.op, detail.tensor, attempt=attempt)
        subject = detail.subject
        ranks = _shown_ranks(detail, subject)
        values, baseline = _matrix(connection, run, detail, whole, ranks=ranks, attempt=attempt)
    found = curve(whole, request)
    if subject is None or not len(whole):
        return found
    few = replace(request, points=min(request.points, OTHER_POINTS))
    lines = [
        _line(whole, one, few, Role.OTHER, f"rank {rank}") for rank, one in zip(ranks[1:], values[1:], strict=True)
    ]
    limits = [] if detail.limit is None else [one for one in (detail.limit.high, detail.limit.low) if one is not None]
    lines += [_line(whole, baseline * one, few, Role.LIMIT, f"limit {one:.3g}×") for one in limits]
    lines.append(_line(whole, baseline, few, Role.BASELINE, "baseline"))
    main = _line(whole, values[0], request, Role.SUBJECT, f"rank {ranks[0]}" if ranks[0] is not None else "value")
    drawn = [line for line in lines if line is not None and np.isfinite(line.value).any()]
    firings = _firings(whole, detail, request, dict(zip(ranks, values, strict=True)))
    return replace(found, lines=(*((main,) if main is not None else ()), *drawn), firings=firings)


def _shown_ranks(detail: TensorDetail, subject: Mapping[str, Any] | None) -> list[int | None]:
    """Return the ranks with separate lines, the subject first. Of many ranks, only those that fired have a line."""
    if subject is None:
        return []
    others = [row["rank"] for row in detail.ranks if row["rank"] != subject["rank"]]
    if len(others) >= MOST_LINES:
        fired = {one["rank"] for one in detail.firings}
        others = [rank for rank in others if rank in fired][: MOST_LINES - 1]
    return [subject["rank"], *others]


def _matrix(
    connection: Connection,
    run: str,
    detail: TensorDetail,
    whole: History,
    *,
    ranks: Sequence[int | None],
    attempt: int | None,
) -> tuple[Floats, Floats]:
    """Return the values of the ranks (rows) at the rows of `whole`, and the baseline of the first rank."""
    values = np.full((max(1, len(ranks)), len(whole)), np.nan)
    baseline = np.full(len(whole), np.nan)
    if not any(rank is not None for rank in ranks):
        values[0] = whole.value
        return values, baseline
    source = connection.relation("tensor_stats", run=run)
    parameters = {"run": run, "kind": detail.kind, "tensor": detail.tensor, "attempt": attempt, "ranks": list(ranks)}
    rows = connection.query(_BY_RANK.format(**_columns(detail.op), source=source), parameters)
    keys = whole.attempt * (1 << 40) + whole.step
    own = rows["attempt"].to_numpy() * (1 << 40) + rows["step"].to_numpy()
    at = np.minimum(np.searchsorted(keys, own), max(0, len(keys) - 1))
    known = keys[at] == own if len(keys) else np.zeros(0, bool)
    line = np.array([ranks.index(rank) for rank in rows["rank"].to_pylist()], np.int64)
    values[line[known], at[known]] = rows["value"].to_numpy(zero_copy_only=False).astype(np.float64)[known]
    first = known & (line == 0)
    baseline[at[first]] = rows["baseline"].to_numpy(zero_copy_only=False).astype(np.float64)[first]
    return values, baseline


def _line(whole: History, values: Floats, request: CurveRequest, role: Role, label: str) -> Line | None:
    """Return the line of `values` at the rows of `whole`; of several attempts, one after the other."""
    lowest, highest = (whole.lowest, whole.highest) if role is Role.SUBJECT else (values, values)
    drawn = curve(replace(whole, value=values, lowest=lowest, highest=highest), request).lines
    if not drawn:
        return None
    names = ("x", "step", "value", "smoothed", "low", "high")
    joined = {name: np.concatenate([getattr(line, name) for line in drawn]) for name in names}
    return Line(label=label, role=role, key=None, **joined)


def _firings(
    whole: History, detail: TensorDetail, request: CurveRequest, lines: Mapping[int | None, Floats]
) -> tuple[Firing, ...]:
    """Return the firings of rules for the tensor on the lines of their ranks. A rank without a line has none."""
    rows, x = on_axis(whole, request.axis)
    places = dict(zip(zip(rows.attempt.tolist(), rows.step.tolist(), strict=True), x.tolist(), strict=True))
    row_of = {key: at for at, key in enumerate(zip(whole.attempt.tolist(), whole.step.tolist(), strict=True))}
    found = []
    for one in detail.firings:
        key = (one["attempt"] or 0, one["step"])
        if key not in places or one["rank"] not in lines:
            continue
        value = float(lines[one["rank"]][row_of[key]])
        is_drawn = one["op"] == detail.op and math.isfinite(value)
        shown = value if is_drawn else None
        found.append(Firing(x=float(places[key]), step=one["step"], value=shown, rule=one["rule"] or "rule"))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class FiringGroup:
    """Firings of one rule on one rank at consecutive steps. `value` is the one farthest from the baseline."""

    attempt: int | None
    rank: int | None
    rule: str | None
    severity: str | None
    op: str | None
    first: int | None
    last: int | None
    times: int
    value: float | None
    baseline: float | None
    step: int | None  # of `value`

    @property
    def ratio(self) -> float | None:
        """Return the value as a multiple of its baseline; None if it is unknown."""
        if self.value is None or not self.baseline or not math.isfinite(self.value):
            return None
        return self.value / self.baseline


def firing_groups(firings: Sequence[Mapping[str, Any]]) -> list[FiringGroup]:
    """Return firings grouped by rule and rank, the earliest group first.

    Firings of a group have at most INCIDENT_GAP_STEPS between them.
    """
    listed: list[list[Mapping[str, Any]]] = []
    newest: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in sorted(firings, key=lambda one: (one["attempt"] or 0, one["step"] or 0)):
        key = (one["attempt"], one["rank"], one["rule"], one["op"])
        group = newest.get(key)
        if group is None or (one["step"] or 0) - (group[-1]["step"] or 0) > INCIDENT_GAP_STEPS:
            group = newest[key] = []
            listed.append(group)
        group.append(one)
    return [_firing_group(group) for group in listed]


def _firing_group(group: Sequence[Mapping[str, Any]]) -> FiringGroup:
    worst = max(group, key=lambda one: abs(one["value"] or 0.0) if math.isfinite(one["value"] or 0.0) else math.inf)
    same = {name: worst[name] for name in ("attempt", "rank", "rule", "severity", "op", "value", "baseline", "step")}
    return FiringGroup(**same, first=group[0]["step"], last=group[-1]["step"], times=len(group))


def first_to_leave(connection: Connection, run: str) -> list[AnomalyRow]:
    """Return the first firing of each tensor in causal order, at most eight."""
    rows = [AnomalyRow(**row) for row in connection.query(_LEAVING, {"run": run}).to_pylist()]
    return sorted(rows, key=causal_order)[:8]
