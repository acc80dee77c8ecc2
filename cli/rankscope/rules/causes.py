"""The causes of the faults of a run, each with a statement that shows its numbers; and the checks that did not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rankscope.rules.replay import NOT_JUDGED, SCORED, inputs_of, score_rows
from rankscope_contract.model.events import REPLICA_DESYNC, Severity
from rankscope_contract.rules.score import SCORE_RULES, kinds_of
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.rule_names import RULES_OF_RUNS, RUN_FAILED, RUN_FINISHED, RUN_STOPPED, SLOW_RANK
from rankscope_storage.connection import Connection
from rankscope_view.data.incidents import incidents, sentence_of

FAULT, HEALTHY, UNKNOWN = "fault", "healthy", "not judged"
_CAUSES: Final = "SELECT * FROM first_causes WHERE run = $run ORDER BY cause"
_MEASURED: Final = """\
SELECT (SELECT count(*) FROM tensor_stats WHERE run = $run) AS statistics,
  (SELECT count(*) FROM scalars WHERE run = $run) AS scalars,
  (SELECT count(*) FROM hashes WHERE run = $run) AS hashes,
  (SELECT count(DISTINCT rank) FROM scalars WHERE run = $run) AS ranks,
  (SELECT count(*) FROM tensor_stats WHERE run = $run AND starts_with(kind, 'act_')) AS activations,
  (SELECT count(*) FROM events WHERE run = $run AND type = 'gap') AS gaps"""
_MARGIN: Final = 3
"""Number of steps before and after an anomaly that a statement shows."""

_COLUMNS: Final = ("attempt", "last_step", "severity", "rule", "rank", "kind", "tensor", "op", "value", "threshold")
_ATTEMPTS: Final = "select attempt, state, last_step, reason from attempts"
_REPORTS: Final = "select attempt, ts, rank, step, type, rule, value, message from events"
_LOOK: Final = "read the numbers of the statement, at this step and before"
_ACTIONS: Final = {
    "AnomalyNan": "find the first tensor and rank with `rankscope anomalies`; see docs/runbooks.md#anomalynan",
    "AnomalyTurbulence": "check batch, learning rate and clipping; see docs/runbooks.md#anomalyturbulence",
    REPLICA_DESYNC: "compare the ranks with `rankscope diff RUN --ranks A B`; see docs/runbooks.md#replicadesync",
    "ParamMovedBetween": "find the code that writes this parameter outside of the optimizer; if none does, test the "
    "memory of the device",
    "AdamBooks": "check that the state of the optimizer was loaded completely; otherwise test the memory of the device",
    "ClipCap": "check that gradients are still clipped, and with the same norm",
    "WeightDrift": "check weight decay and learning rate, and whether batches repeat",
    "TensorDrift": "look at this tensor from the step on: `rankscope plot RUN --kind tensors`",
    "GradSpike": "check the batch of this step on this rank",
    "LossShift": "check the data from this step on: order, labels, repeated batches",
    "LossSpike": "check the data and the learning rate of this step",
    "LearningRateJump": "check the schedule of the learning rate after the last restart",
    "DataWait": "give the loader more workers, or look for a slow disk",
    "EvalRise": "stop early, or use more data: the model may fit the training data only",
    "ReplicasApart": "find the first kind that differs: a gradient that is not reduced, or a write on one rank only",
    "ZerosGap": "check batch and loss mask of this rank, and the layers that it skips",
    "GradGap": "check the data of this rank: a repeated batch, other labels",
    SLOW_RANK: "look at the processes, clocks and temperature of the machine of this rank",
    RUN_FAILED: "read the log of the rank that failed first; see docs/runbooks.md#runfailed",
}


def diagnose(connection: Connection, run: str) -> dict[str, Any]:
    """Return the verdict on `run`, the causes of its faults, and the checks that did not run.

    The verdict is fault, healthy, or not judged if nothing was measured. A cause of severity info is no fault. A cause
    has the columns of the view `first_causes`, a statement as `evidence`, and an action as `next`. Causes are ordered
    by attempt and step, and at one step exact rules come before others.
    """
    with connection.pinned():
        measured = connection.query(_MEASURED, {"run": run}).to_pylist()[0]
        found = connection.query(_CAUSES, {"run": run}).to_pylist()
        causes = [row | {"evidence": _evidence(row)} for row in found] + [*_others(connection, run, found)]
        causes.sort(key=lambda one: (one["attempt"] or 0, one["step"] is None, one["step"] or 0))  # stable
        for number, cause in enumerate(causes, 1):
            cause |= {"cause": number, "next": _ACTIONS.get(cause["rule"], _LOOK)}
        is_measured = any(measured[name] for name in ("statistics", "scalars", "hashes"))
        is_fault = any(cause["severity"] != Severity.INFO for cause in causes)
        verdict = FAULT if is_fault else HEALTHY if is_measured else UNKNOWN
        return {"run": run, "verdict": verdict, "causes": causes, "not_run": [*_not_run(connection, run, measured)]}


def _others(connection: Connection, run: str, found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the incidents of `run` without anomalies: failures and stalls of attempts, errors of GPUs, lost records."""
    known = {row["rule"] for row in found} | {RUN_FINISHED, RUN_STOPPED}
    for one in incidents(connection, [run]).get(run, []):
        if one.rule not in known:
            row = {name: getattr(one, name) for name in _COLUMNS} | {"firings": one.events, "message": sentence_of(one)}
            step = one.last_step if one.rule in RULES_OF_RUNS and one.last_step is not None else one.step
            source = _ATTEMPTS if one.rule in RULES_OF_RUNS else _REPORTS
            yield row | {"step": step, "evidence": f"{source} where run = {sql_string(run)} order by attempt"}


def _evidence(row: dict[str, Any]) -> str:
    """Return a statement that shows the numbers that the rule of the anomaly `row` has read."""
    step = row["step"]
    near = "" if step is None else f" and step between {step - _MARGIN} and {step + _MARGIN}"
    where = f"where run = {sql_string(row['run'])}{near}"
    if row["rule"] == REPLICA_DESYNC:
        return f"select step, kind, tensor, apart, norm_min, norm_max from desync {where} order by step"
    if row["tensor"] is not None:
        columns = "step, rank, kind, norm, mean, min, max, nans, infs, zeros, numel"
        tensor = sql_string(row["tensor"])
        return f"select {columns} from tensor_stats {where} and tensor = {tensor} order by step, rank, kind"
    chosen = score_rows(row["rule"]) if row["op"] == "score" else _named(row["op"] or "")
    return f"select step, rank, name, labels, value from scalars {where} and {chosen} order by step, rank"


def _named(scalar: str) -> str:
    """Return a condition for the rows of `scalar`: a name, or a name and a label, such as `learning_rate/group=0`."""
    name, _, label = scalar.partition("/")
    key, _, value = label.partition("=")
    of_label = f" and json_extract_string(labels, '$.{key}') = {sql_string(value)}" if label else ""
    return f"name = {sql_string(name)}{of_label}"


def _not_run(connection: Connection, run: str, measured: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each check that did not run, or not on all tensors or steps."""
    found = connection.query(NOT_JUDGED, {"run": run}).to_pylist()
    notes = [f"rank {note['rank']}: {note['message']}" for note in found]
    yield from notes
    scored = connection.query(SCORED, {"run": run})["rule"].to_pylist()
    for rule in SCORE_RULES if scored else ():
        is_noted = any(f"{rule.name} is not judged" in note for note in notes)
        if rule.name not in scored and not is_noted and (measured["statistics"] or not kinds_of(rule.tree)):
            yield f"{rule.name}: no step has a score; it reads {', '.join(inputs_of(rule))}, and some values before"
    if not measured["statistics"]:
        yield "rules on tensors: the run has no tensor statistics"
    elif not measured["activations"]:
        yield 'rules on activations: add "activations" to the quantities of the monitor'
    if not measured["hashes"] and measured["ranks"] > 1:
        yield 'replicas bit by bit: add "hashes" to the quantities of the monitor'
    if measured["gaps"]:
        yield f"steps of lost records: the run has {measured['gaps']} events of type gap"
