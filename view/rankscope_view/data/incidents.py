"""Incidents of runs, from the events of the service, or from anomalies where no service grouped them.

The story of an incident has its anomalies in causal order, the growth before it, and a timeline.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.model.events import CLOSED, Severity, subject_name
from rankscope_storage.api.summaries import AnomalyRow, anomalies
from rankscope_storage.base.rule_names import (
    ENDS_WITH_RUN,
    RULES_OF_RUNS,
    RUN_FAILED,
    RUN_FINISHED,
    SLOW_RANK,
)
from rankscope_storage.connection import Connection
from rankscope_storage.sql.first_causes import INCIDENT_GAP_STEPS, IS_LOSS, STAGE
from rankscope_view.data.deviation import deviation_text
from rankscope_view.data.documents import json_object

_IS_OPEN_AFTER: Final = {"opened": True, "muted": True, "resolved": False, CLOSED: False}
"""True if an incident is open after a state that changes it. Other states, such as `notified`, do not change it.

A muted incident is open, and no message was sent. The cause of a resolved one was seen to be gone.
"""

STATE_TEXTS: Final = {"muted": "opened, no message was sent"}
"""Texts of the states of incidents; the text of another state is its name."""
_WORDS: Final = {"nans": "became NaN", "infs": "became infinite"}
CAUSAL_PLACE: Final = f"""\
{{step: coalesce(step, -1), micro: coalesce(micro_step, CASE WHEN {IS_LOSS} THEN 0 ELSE 1000000000 END),
  stage: {STAGE},
  call: coalesce(call_id, 1000000000), rank: rank, kind: kind, tensor: tensor, op: op, rule: rule}}"""
"""SQL of a sort key of anomalies of an attempt, which puts the first cause first."""


# The end of an attempt is the end of the cause of a stall; the end of following its log is not.
_REPORTED: Final = f"""\
SELECT run, attempt, rank, step, epoch(ts) AS at, severity, rule, kind, tensor, op, value, baseline, threshold, message,
  details, rule IN {tuple(sorted(ENDS_WITH_RUN))} AND coalesce(attempt, 0) < (SELECT coalesce(max(attempt), 0)
    + bool_or(state IN ('completed', 'failed') OR (state = 'stopped' AND source_kind = 'live'))::INTEGER
    FROM runs WHERE run = events.run) AS is_over
FROM events
WHERE type = 'incident' AND rule IS DISTINCT FROM '{RUN_FINISHED}' AND run IN (SELECT unnest($runs))
ORDER BY run, ordinal, ts, details NULLS FIRST, rank NULLS FIRST, tensor NULLS FIRST"""

_ENDS: Final = """\
SELECT run, coalesce(attempt, 0) AS attempt, max(last_step) AS last_step
FROM (SELECT run, attempt, last_step FROM attempts UNION ALL SELECT run, attempt, last_step FROM runs)
WHERE run IN (SELECT unnest($runs)) AND last_step IS NOT NULL GROUP BY ALL"""

# An import of a failed log stores the state of the attempt, and no incident. A service reports the failure of a live
# attempt when it is final which rank failed first; until then, the incident has the key of that report.
_FAILED: Final = f"""\
SELECT run, attempt, if(source_kind = 'live', NULL, last_step) AS step, last_step, reason AS message,
  epoch(ended_at) AS at, 'critical' AS severity,
  '{RUN_FAILED}' AS rule, if(source_kind = 'live', concat('{RUN_FAILED}:', attempt, ':', run),
    concat('{RUN_FAILED}-', coalesce(attempt, 0))) AS key, EXISTS (
    SELECT 1 FROM attempts AS later WHERE later.run = failed.run AND later.attempt > failed.attempt
      AND (later.state = 'completed' OR later.last_step > failed.last_step)) AS is_over
FROM attempts AS failed WHERE state = 'failed' AND run IN (SELECT unnest($runs))"""

# Without anomalies, as in most runs, this takes a fifth of the time of the statement that groups them.
_WITH_ANOMALIES: Final = """\
SELECT DISTINCT run FROM events WHERE type = 'anomaly' AND run IN (SELECT unnest($runs))"""

# A rule about one tensor or scalar, or NaN and Inf, which spread. Firings are at most INCIDENT_GAP_STEPS apart.
_GROUPED: Final = f"""\
WITH anomaly AS (
  SELECT *, {CAUSAL_PLACE} AS place, coalesce(step - lag(step) OVER earlier > {INCIDENT_GAP_STEPS}, true) AS begins
  FROM (SELECT *, if(op IN ('nans', 'infs') OR NOT isfinite(value), 'non-finite',
    concat_ws(' ', rule, coalesce(tensor, op))) AS subject FROM events
    WHERE type = 'anomaly' AND run IN (SELECT unnest($runs)))
  WINDOW earlier AS (PARTITION BY run, attempt, subject ORDER BY step NULLS FIRST)
),
numbered AS (
  SELECT *, sum(begins::INTEGER) OVER (PARTITION BY run, attempt, subject ORDER BY step NULLS FIRST) AS number
  FROM anomaly
)
SELECT run, attempt, min(step) AS step, max(step) AS last_step, epoch(min(ts)) AS at, unnest(arg_min({{
    rank: rank, rule: rule, kind: kind, tensor: tensor, op: op, value: value, baseline: baseline,
    threshold: threshold, message: message}}, place)),
  CASE WHEN bool_or(severity = 'critical') THEN 'critical' ELSE arg_min(severity, place) END AS severity,
  count(*) AS events, list(DISTINCT rank ORDER BY rank) AS ranks
FROM numbered GROUP BY run, attempt, subject, number ORDER BY min(place)"""


# The values of an incident are those of its first anomaly, and later ones can be far larger.
_SUBJECT: Final = ("run", "attempt", "rank", "rule", "kind", "tensor", "op")
_WORST: Final = f"""\
SELECT {", ".join(_SUBJECT)}, max(value) AS worst, arg_max(step, value) AS step FROM events
WHERE type = 'anomaly' AND baseline > 0 AND isfinite(value) AND value > baseline AND run IN (SELECT unnest($runs))
  AND coalesce(tensor, '') IN (SELECT unnest($tensors)) GROUP BY ALL"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A group of anomalies with one cause, or the failure or stall of an attempt. Columns are of its first cause."""

    run: str
    key: str  # unique within the run
    attempt: int | None
    rank: int | None
    step: int | None
    last_step: int | None
    severity: str
    rule: str | None
    kind: str | None
    tensor: str | None
    op: str | None
    value: float | None
    baseline: float | None
    threshold: float | None
    message: str | None
    events: int
    ranks: tuple[int, ...]
    states: tuple[tuple[float | None, str], ...]  # UTC seconds and state: opened, notified, …, resolved
    number: int = 0  # of the incident within its run, from 1, in the order of attempts and steps
    cause: str | None = None  # evidence against the rank
    closed_by: str = ""  # name of the user that closed it, and the note in quotation marks
    where: tuple[str, ...] = ()  # places in which ranks wait
    worst: float | None = None  # the largest value of the same subject, if it came after the first one

    @property
    def is_open(self) -> bool:
        """Return whether the incident is neither resolved nor closed by a person."""
        return is_open(state for _, state in self.states)

    @property
    def is_resolved(self) -> bool:
        """Return whether its cause was seen to be gone. Only then are its last step and its number of events final."""
        return any(state == "resolved" for _, state in self.states)

    @property
    def is_critical(self) -> bool:
        """Return whether the incident has the highest severity."""
        return self.severity == Severity.CRITICAL

    @property
    def is_ruin(self) -> bool:
        """Return whether training failed, or its numbers are wrong: a critical incident or one of the loss."""
        return self.rule not in {*RULES_OF_RUNS - {RUN_FAILED}, SLOW_RANK} and (self.is_critical or self.op == "loss")

    @property
    def place(self) -> str:
        """Return the end of a clause with the first step; empty without a step, or if the message has it."""
        line = f"{self.message};"
        if self.step is None or ", since step " in line or f"after step {self.step};" in line:
            return ""
        return f"{' at' if self.worst is None else ', since'} step {self.step:,}"

    @property
    def opened_at(self) -> float | None:
        """Return the time of the first report in UTC seconds."""
        return self.states[0][0] if self.states else None


def incidents(connection: Connection, runs: Sequence[str]) -> dict[str, list[Incident]]:
    """Return the incidents of each run in `runs` that has any: open ones first, then ruins, severe and early ones."""
    found: dict[str, list[Incident]] = {}
    reported: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in connection.query(_REPORTED, {"runs": list(runs)}).to_pylist():
        details = json_object(row.pop("details"))
        reported.setdefault((row["run"], str(details.get("key"))), []).append(row | {"details": details})
    closings = {key: rows for key, rows in reported.items() if rows[0]["details"].get("state") == CLOSED}
    for (run, key), rows in reported.items():
        if (run, key) not in closings:
            found.setdefault(run, []).append(_reported(key, rows))
    # A service or `watch` may have reported only the end of a run, such as that of a log.
    ungrouped = [run for run in runs if all(one.rule in RULES_OF_RUNS for one in found.get(run, ()))]
    if ungrouped:
        ungrouped = connection.query(_WITH_ANOMALIES, {"runs": ungrouped})["run"].to_pylist()
    failed = {(one.run, one.attempt or 0) for listed in found.values() for one in listed if one.rule == RUN_FAILED}
    groups = _groups(connection, ungrouped) if ungrouped else ()
    failures = (one for one in _failures(connection, runs) if (one.run, one.attempt or 0) not in failed)
    for one in (*groups, *failures):
        if (one.run, one.key) in closings:
            last = _reported(one.key, closings[one.run, one.key])
            one = replace(one, states=(*one.states, *last.states), closed_by=last.closed_by)  # noqa: PLW2901 - its end
        found.setdefault(one.run, []).append(one)
    later = [one for one in itertools.chain(*found.values()) if one.baseline and math.isfinite(one.value or math.nan)]
    chosen = {"runs": [one.run for one in later], "tensors": [one.tensor or "" for one in later]}
    rows = connection.query(_WORST, chosen).to_pylist() if later else []
    largest = {tuple(row[name] for name in _SUBJECT): row for row in rows}
    for run, listed in found.items():
        ordered = (_with_worst(one, largest) for one in sorted(listed, key=in_order))
        numbered = [replace(one, number=number) for number, one in enumerate(ordered, start=1)]
        found[run] = sorted(numbered, key=lambda one: (not one.is_open, not one.is_ruin, not one.is_critical))
    return found


def _with_worst(one: Incident, largest: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Incident:
    row = largest.get(tuple(getattr(one, name) for name in _SUBJECT))
    is_later = row is not None and one.step != row["step"] and _covers(one, row["step"])
    return replace(one, worst=row["worst"]) if row and is_later else one


def in_order(one: Incident) -> tuple[int, int, str]:
    """Return the sort key of an incident in the order of attempts and steps."""
    return one.attempt or 0, one.step or 0, one.key


def _groups(connection: Connection, runs: Sequence[str]) -> Iterator[Incident]:
    """Yield the groups of anomalies of `runs`. A group is resolved if a later step is stored without its rule.

    The step is one of the same attempt, or one of a later attempt after the first step of the group.
    """
    ends: dict[str, dict[int, int]] = {}
    for row in connection.query(_ENDS, {"runs": list(runs)}).to_pylist():
        ends.setdefault(row["run"], {})[row["attempt"]] = row["last_step"]
    found: dict[tuple[str, int | None], list[Incident]] = {}
    for one in map(_grouped, connection.query(_GROUPED, {"runs": list(runs)}).to_pylist()):
        _add(one, found.setdefault((one.run, one.attempt), []))
    groups = list(itertools.chain(*found.values()))
    lasting = {(one.run, one.attempt or 0, one.rule) for one in groups if not _is_over(one, ends)}
    for one in groups:
        known = ends.get(one.run, {}).items()
        later = [number for number, end in known if number > (one.attempt or 0) and end > (one.step or 0)]
        is_over = _is_over(one, ends) or any((one.run, number, one.rule) not in lasting for number in later)
        yield replace(one, states=(*one.states, (None, "resolved"))) if is_over else one


def _add(new: Incident, groups: list[Incident]) -> None:
    """Add `new` to the group that it continues, as the service does, or else to the `groups` of its attempt.

    It continues a group with the same first step, or one that is as severe and has not ended, or whose rule fires for
    other tensors after a pause of at most two steps.
    """
    for at, one in reversed(list(enumerate(groups))):
        has_ended = (new.step or 0) > (one.last_step or 0) + 3 * (one.rule == new.rule)
        if one.step == new.step or (not has_ended and one.is_critical >= new.is_critical):
            severity = (new if new.is_critical else one).severity
            last = None if one.last_step is None else max(one.last_step, new.last_step or 0)
            ranks = tuple(sorted({*one.ranks, *new.ranks}))
            groups[at] = replace(one, severity=severity, last_step=last, events=one.events + new.events, ranks=ranks)
            return
    groups.append(new)


def _is_over(one: Incident, ends: Mapping[str, Mapping[int, int]]) -> bool:
    return (one.last_step or 0) < ends.get(one.run, {}).get(one.attempt or 0, 0)


def _failures(connection: Connection, runs: Sequence[str]) -> Iterator[Incident]:
    """Yield the failures of attempts. A failure is resolved if a later attempt passes its step."""
    for row in connection.query(_FAILED, {"runs": list(runs)}).to_pylist():
        states = ((row.pop("at"), "opened"), *([(None, "resolved")] if row.pop("is_over") else []))
        absent: dict[str, Any] = dict.fromkeys(("rank", "kind", "tensor", "op", "value", "baseline", "threshold"))
        yield Incident(**row, **absent, events=1, ranks=(), states=states)


def _reported(key: str, rows: Sequence[dict[str, Any]]) -> Incident:
    first, details = rows[0], rows[-1]["details"]
    ends = (row["details"] for row in reversed(rows) if row["details"].get("state") == CLOSED)
    closed: dict[str, Any] = next(ends, {})
    columns = {name: value for name, value in first.items() if name not in {"at", "details", "is_over"}}
    states = [(row["at"], str(row["details"].get("state"))) for row in rows]
    over = [(None, "resolved")] if first["is_over"] and is_open(state for _, state in states) else []
    return Incident(
        **columns,
        key=key,
        last_step=details.get("last_step"),
        events=int(details.get("events") or len(rows)),
        ranks=tuple(_numbers(details.get("ranks"))),
        states=(*states, *over),
        cause=details.get("cause"),
        closed_by=" ".join(filter(None, (closed.get("user"), f"“{note}”" if (note := closed.get("note")) else None))),
        where=tuple(str(place) for place in details.get("where") or ()),
    )


def _grouped(row: dict[str, Any]) -> Incident:
    columns = {name: value for name, value in row.items() if name not in {"at", "ranks"}}
    key = f"{row['attempt'] or 0}-{'' if row['step'] is None else row['step']}"
    return Incident(**columns, key=key, ranks=tuple(_numbers(row["ranks"])), states=((row["at"], "opened"),))


def _numbers(values: Iterable[Any] | None) -> list[int]:
    return [value for value in values or () if isinstance(value, int)]


def happening(one: Incident) -> str:
    """Return a clause about the first cause of an incident with its largest value: `loss 9.7, 8 times its median`."""
    if one.op in _WORDS and one.tensor is not None:
        return f"{_quantity(one.kind)} {_WORDS[one.op]}"
    is_finite = one.value is not None and math.isfinite(one.value)
    if one.value is not None and one.rule not in RULES_OF_RUNS and (one.baseline or not is_finite):
        name = one.op or subject_name(one.tensor, None) or "value"
        text = deviation_text(name, one.worst or one.value, one.baseline, one.rule, "up to " if one.worst else "")
        return f"{_quantity(one.kind)} {text}".strip() if is_finite else text
    line = (one.message or one.rule or "reported").partition("\n")[0]
    return line.removesuffix(f", step {one.step}")  # sentences end with the step


def sentence_of(one: Incident) -> str:
    """Return a clause about an incident with its rank, tensor and step, which begins with a capital letter."""
    what = happening(one)
    if (name := subject_name(one.tensor, None)) is not None:
        quantity = _quantity(one.kind)
        what = f"{quantity} of {name} {what.removeprefix(quantity).lstrip()}"
    where = "" if one.rank is None or what.startswith("rank") else f"rank {one.rank}: "
    clause = f"{where}{what}{one.place}"
    return f"{clause[:1].upper()}{clause[1:]}"


def closing_columns(one: Incident) -> dict[str, Any]:
    """Return the columns of an event that ends an incident, with `details` as a mapping."""
    names = ("run", "attempt", "rank", "step", "severity", "rule", "kind", "tensor", "op", "value", "baseline")
    details = {"key": one.key, "events": one.events, "ranks": list(one.ranks), "last_step": one.last_step}
    known = {name: getattr(one, name) for name in (*names, "threshold")}
    return known | {"message": f"closed: {sentence_of(one)}", "details": details}


def _quantity(kind: str | None) -> str:
    for prefix, word in (("grad", "gradient"), ("act_grad", "activation gradient"), ("act", "activation")):
        if kind and kind.startswith(prefix):
            return word
    return {"param_before": "weight", "param_after": "weight"}.get(kind or "", (kind or "").replace("_", " "))


def utc(seconds: float | None) -> dt.datetime | None:
    """Return the time `seconds` after 1970 in UTC; None if it is unknown or outside of the calendar."""
    try:
        return None if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None


_BEFORE: Final = 60
_AFTER: Final = 30
_NEWEST: Final = 2**62  # a step after all others
_LAYER: Final = re.compile(r"^(.*?\b\d+)\b")
_CHECKPOINTS: Final = """\
SELECT max(step) FILTER (step < $first) AS before, min(step) FILTER (step >= $first) AS after FROM events
WHERE run = $run AND (type = 'checkpoint' OR details->>'$.phase' = 'checkpoint') AND coalesce(attempt, 0) = $attempt
  AND step <= $last"""
_ATTEMPTS: Final = """\
SELECT type, coalesce(attempt, 0) AS attempt, epoch(min(if(type = 'launch', coalesce(started_at, ts), ts))) AS at,
  arg_min(message, ts) AS message, min(step) AS step
FROM events LEFT JOIN (SELECT attempt, started_at FROM attempts WHERE run = $run) USING (attempt) WHERE run = $run
  AND ((type = 'exit' AND coalesce(attempt, 0) = $attempt) OR (type = 'launch' AND coalesce(attempt, 0) = $attempt + 1))
  AND ts IS NOT NULL GROUP BY ALL"""
_FAMILIES: Final = {
    "activations": "act_",
    "gradients": "grad_",
    "weights": "param_",
    "optimizer state": ("exp_avg", "momentum"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened at a time in UTC seconds. `icon` names its mark."""

    at: float | None
    icon: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyGroup:
    """The first anomaly of a layer by one rule, with its number of others, their tensors and ranks."""

    first: AnomalyRow
    others: int
    tensors: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The content of the page of an incident beyond its first cause."""

    groups: tuple[AnomalyGroup, ...]  # in causal order
    total: int
    steps: tuple[int, int]  # first and last step of its anomalies
    ranks: tuple[int, ...]  # with an anomaly
    safe_checkpoint: int | None  # step of the newest checkpoint before the first sign
    bad_checkpoint: int | None  # step of the first checkpoint after it
    growth: tuple[AnomalyRow, ...]  # firings for the tensor of the first cause before it
    moments: tuple[Moment, ...]
    not_measured: tuple[str, ...]  # families of quantities without a row near the step
    beside: tuple[str | None, str | None]  # keys of the incidents before and after it, by step


def window(one: Incident) -> tuple[int, int]:
    """Return the steps around the first step of an incident."""
    step = one.step or 0
    return max(0, step - _BEFORE), step + 2 * _AFTER


def incident_story(connection: Connection, one: Incident, found: Sequence[Incident]) -> Story:
    """Return the story of an incident, which is one of those `found` in its run."""
    steps = window(one)
    listed = anomalies(connection, one.run, top=1_000_000, steps=(steps[0], _NEWEST))
    growth = tuple(each for each in listed if one.rule not in RULES_OF_RUNS and _grows(each, one))
    own = shared_anomalies(listed, found)[one.key]
    keys = [each.key for each in sorted(found, key=in_order)]
    at = keys.index(one.key)
    own_steps = (own[0].step or 0, own[-1].step or 0) if own else steps
    safe, bad = _checkpoints(connection, one, growth, own_steps[1])
    return Story(
        groups=tuple(grouped(own)),
        total=len(own),
        steps=own_steps,
        ranks=tuple(sorted({*one.ranks, *(each.rank for each in own if each.rank is not None)})),
        safe_checkpoint=safe,
        bad_checkpoint=bad,
        growth=growth,
        moments=_moments(connection, one, growth),
        not_measured=tuple(unmeasured(connection, one.run, steps)),
        beside=(keys[at - 1] if at else None, next(iter(keys[at + 1 :]), None)),
    )


def counted(connection: Connection, found: Sequence[Incident]) -> list[Incident]:
    """Return the incidents `found` of a run, of which those not resolved have all their anomalies up to now."""
    lasting = [one for one in found if not one.is_resolved and one.rule not in RULES_OF_RUNS]
    shares = shared_anomalies(anomalies(connection, found[0].run, top=1_000_000), found) if lasting else {}
    return [replace(one, events=max(one.events, len(shares.get(one.key, ())))) for one in found]


def shared_anomalies(listed: Sequence[AnomalyRow], found: Sequence[Incident]) -> dict[str, list[AnomalyRow]]:
    """Return the anomalies in `listed`, in the order of steps, of each incident in `found`, by its key.

    The anomalies of a step belong to the incidents that began there, else to the latest one with the same rule and
    tensor, else to the latest one. A resolved incident has no anomalies after its last step. Of another one, the last
    step is that of its newest report, because a service reports a change of the state only.
    """
    own: dict[str, list[AnomalyRow]] = {one.key: [] for one in found}
    subjects = {one.key: {(one.rule, subject_name(one.tensor, one.op))} for one in found}
    peers: dict[int, list[Incident]] = {}
    same_tensor: dict[tuple[str | None, int | None, int], list[Incident]] = {}
    for one in sorted((one for one in found if one.rule not in RULES_OF_RUNS), key=in_order):
        peers.setdefault(one.attempt or 0, []).append(one)
        same_tensor.setdefault((one.tensor, one.rank, one.attempt or 0), []).append(one)
    place = lambda row: (row.attempt or 0, -1 if row.step is None else row.step)  # noqa: E731 - a sort key
    for (attempt, at), rows in itertools.groupby(sorted(listed, key=place), key=place):
        anomalies_of_step, step = list(rows), None if at < 0 else at
        active = [one for one in peers.get(attempt, ()) if _covers(one, step)]
        began = [one for one in active if one.step == step]
        if candidates := began or active:
            named = {(row.rule, subject_name(row.tensor, row.op)) for row in anomalies_of_step}
            holder = next((one for one in reversed(candidates) if named & subjects[one.key]), candidates[-1])
            subjects[holder.key] |= named
            for one in began or [holder]:
                own[one.key] += anomalies_of_step
            continue
        for row in anomalies_of_step:  # earlier signs of tensors, too weak to have an incident
            for one in same_tensor.get((row.tensor, row.rank, attempt), ()):
                if _grows(row, one) and (row.step or 0) >= window(one)[0]:
                    own[one.key].append(row)
    return own


def _covers(one: Incident, step: int | None) -> bool:
    if one.step is None or step is None:
        return one.step is step
    return one.step <= step and (not one.is_resolved or one.last_step is None or step <= one.last_step)


def _grows(each: AnomalyRow, one: Incident) -> bool:
    is_before = each.step is not None and one.step is not None and each.step < one.step
    same = (each.tensor, each.rank, each.attempt or 0) == (one.tensor, one.rank, one.attempt or 0)
    return is_before and bool(each.baseline) and same


def _moments(connection: Connection, one: Incident, growth: Sequence[AnomalyRow]) -> tuple[Moment, ...]:
    found = [
        Moment(
            at=at,
            icon="incident" if state in {"opened", "muted"} else "info",
            text=f"incident {STATE_TEXTS.get(state, state)}{f' by {one.closed_by}' if state == CLOSED else ''}",
        )
        for at, state in one.states
        if at is not None
    ]
    for first in growth[:1]:
        seconds = None if first.ts is None else first.ts.timestamp()
        where = "" if first.rank is None else f" on rank {first.rank}"
        found.append(Moment(at=seconds, icon="warning", text=f"{first.rule}{where}, step {first.step:,}"))
    for row in connection.query(_ATTEMPTS, {"run": one.run, "attempt": one.attempt or 0}).to_pylist():
        has_begun = row["type"] == "launch"
        reason = "" if has_begun or not row["message"] else f": {row['message'].splitlines()[0]}"
        text = f"attempt {row['attempt']} {'was started' if has_begun else 'ended'}{reason}"
        found.append(Moment(at=row["at"], icon="restart", text=text))
    return tuple(sorted(found, key=lambda moment: moment.at or 0.0))


def grouped(found: Sequence[AnomalyRow]) -> list[AnomalyGroup]:
    """Return anomalies grouped by layer and rule, in the order of the first one of each group.

    The layer is the name of a tensor up to its first number. Other tensors and scalars are groups of their own.
    """
    groups: dict[tuple[str | None, str | None], list[AnomalyRow]] = {}
    for row in found:
        name = subject_name(row.tensor, row.op) or ""
        layer = layer_of.group(1) if (layer_of := _LAYER.match(name)) else name
        groups.setdefault((layer, row.rule), []).append(row)
    return [
        AnomalyGroup(
            first=rows[0],
            others=len(rows) - 1,
            tensors=len({row.tensor for row in rows}),
            ranks=tuple(sorted({row.rank for row in rows if row.rank is not None})),
        )
        for rows in groups.values()
    ]


def _checkpoints(
    connection: Connection, one: Incident, growth: Sequence[AnomalyRow], last: int
) -> tuple[int | None, int | None]:
    """Return the step of the newest checkpoint before the first sign of an incident, and of the first one after it.

    Only checkpoints of its attempt, up to the step `last`, are considered.
    """
    signs = [row.step for row in growth if row.step is not None] + ([] if one.step is None else [one.step])
    if not signs:
        return None, None
    parameters = {"run": one.run, "attempt": one.attempt or 0, "first": min(signs), "last": last}
    row = connection.query(_CHECKPOINTS, parameters).to_pylist()[0]
    return row["before"], row["after"]


def unmeasured(connection: Connection, run: str, steps: tuple[int, int]) -> list[str]:
    """Return the families of quantities without a row in the closed range `steps`."""
    source = connection.relation("tensor_stats", run=run, steps=steps)
    rows = connection.query(
        f"SELECT DISTINCT kind FROM {source} WHERE run = $run AND step BETWEEN $first AND $last",
        {"run": run, "first": steps[0], "last": steps[1]},
    )
    kinds = rows["kind"].to_pylist()
    return [name for name, prefix in _FAMILIES.items() if not any(kind.startswith(prefix) for kind in kinds)]


def is_open(states: Iterable[str]) -> bool:
    """Return whether an incident is open after `states`, in order."""
    changes = [_IS_OPEN_AFTER[state] for state in states if state in _IS_OPEN_AFTER]
    return changes[-1] if changes else True
