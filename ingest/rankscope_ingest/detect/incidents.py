"""Group anomaly events into one incident per cause, and convert failed attempts into incidents.

The module performs no I/O. One cause can produce thousands of events: a bad gradient affects each reduced gradient and
optimizer moment after it. A firing continues an incident of its attempt in these cases:

- It is of the first step of the incident, whichever rule and rank.
- One of its rules fired for the incident before, and at most PAUSE_STEPS sampled steps lie between, whichever tensor.
- The same after a longer pause of at most `quiet_steps` steps, if the tensor is the same one, and if it is not further
  above its threshold than announced.

All others open an incident, as does a firing at a later step with a higher severity, and one with a higher severity
than announced. NaN and infinite values count as one rule. Replica divergence is found late and has its own incident.
Firings about one rank, such as a slow rank or its GPU, and firings without a step continue the open incident of their
rule (and rank), until it is resolved: those without a step after QUIET_SECONDS.

The causally first event names the incident. The incident settles when all live ranks have delivered its first step, or
after `group_wait_seconds`. It is then announced once. After a restart of the service, the incident also waits for ranks
that have not been polled yet, because these ranks may have the first cause. A resolved incident is remembered, so that
late records which belong to it do not open another incident.

**Above MESSAGES_PER_HOUR** messages of a run and severity, further incidents are listed in one message per minute.

**An incident is open until its cause is seen to be gone.** The end of a run is no such sign: an incident whose cause
lasted to the end remains open, without further messages, until a later attempt passes its step without the cause, or
until a person closes it in the store. A failure is such an incident, too, and the failure of a later attempt replaces
it: a run has one open failure.

**Each message is sent once.** When an incident settles, an event of type `incident` with state `opened` is committed
together with the records that caused it. Then the message is sent, and then such an event with state `notified` is
added. A starting service reads these events. Records up to the watermark are never polled again and cannot open the
incident again; later records join the restored incident. A message is repeated only if the service was killed between
the delivery of the message and the commit of `notified` (about 10 ms). The repeated message has the same key and
contains a note that it may be a repetition.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from rankscope_contract.model.events import (
    GPU_ECC,
    GPU_THROTTLED,
    GPU_XID,
    INGEST_LOSING,
    REPLICA_DESYNC,
    RULES_OF_MACHINES,
    EventType,
    RunState,
    causal_key,
)
from rankscope_contract.model.redaction import redacted_text
from rankscope_ingest.pipeline.rows import SYMPTOM_COLUMNS, Row
from rankscope_ingest.runs.incident import (
    SEVERITIES,
    Incident,
    Symptom,
    failure_key,
    incident_key,
    run_incident,
    subject_of,
    urgency,
)
from rankscope_ingest.runs.models import CLOCKS_DIFFER_MICROSECONDS, Attempt, AttemptKey
from rankscope_ingest.runs.text import last_reports
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_storage.base.rule_names import ENDS_WITH_RUN, RULES_OF_RUNS, RUN_FAILED, RUN_STALLED, SLOW_RANK

_CAUSAL_COLUMNS: Final = ("step", "micro_step", "kind", "vpp_stage", "pp_stage", "call_id", "op")
_LONGEST_ERROR: Final = 600
"""Maximum number of characters of an error in the reason of a run and in messages. The event has 4,096 of them."""


def parse_details(text: str | None) -> dict[str, Any]:
    """Return the JSON object in `text`, or {} if `text` contains none. All strings of the result are valid Unicode."""
    try:
        value = json.loads(text or "{}")
        # "\\ud800" is legal in JSON but not valid Unicode: neither Arrow nor a socket accepts it.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def exit_report(details: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the reason and the error message in `details`, the parsed JSON details of an exit event.

    A missing reason is returned as an empty string, a missing error message as None. A long error message is cut.
    """
    reason, error = details.get("reason"), details.get("error")
    return str(reason or ""), None if error is None else redacted_text(str(error), _LONGEST_ERROR)


def exit_reports(events: Iterable[Row]) -> list[tuple[str, str | None, int | None, int | None]]:
    """Return (reason, error, time in UTC µs, last completed step) of the exit event among `events`.

    The list has at most one element, because a process exits once.
    """
    exits = ((parse_details(row["details"]), row["ts"]) for row in events if row["type"] == EventType.EXIT)
    return [(*exit_report(details), at, details.get("last_step")) for details, at in exits]


_RULES_BY_TYPE: Final = {EventType.XID: GPU_XID, EventType.GAP: INGEST_LOSING}
_FIRINGS: Final = {EventType.ANOMALY, EventType.GPU, *_RULES_BY_TYPE}


def symptoms(events: Iterable[Row], *, is_past: bool = False) -> list[Symptom]:
    """Return one symptom for each step with anomalies in `events`, ordered by step. All events are from one rank.

    A symptom is the causally first anomaly of a step, together with the number of anomalies of the step. An XID,
    another event of a GPU, and lost records are symptoms, too: one for each rule. With `is_past`, as for the records of
    an ended process, a symptom has the time of its record.
    """
    grouped: dict[tuple[int | None, str | None], list[Row]] = defaultdict(list)
    for row in events:
        is_found_again = row["type"] == EventType.GAP and (row["value"] or 0) <= 0
        if row["type"] in _FIRINGS and not is_found_again:
            rule = _RULES_BY_TYPE.get(row["type"]) or row.get("rule")
            grouped[row.get("step"), rule if rule in RULES_OF_MACHINES else None].append(row | {"rule": rule})
    found = (_symptom(anomalies, is_past=is_past) for anomalies in grouped.values())
    return sorted(found, key=lambda symptom: symptom.causal)


def firings(events: Iterable[Row]) -> dict[tuple[str, str], int]:
    """Return the number of rule firings in `events` by (rule, kind of tensor).

    For a firing of a rule about a scalar, the kind is the empty string.
    """
    fired = (row for row in events if row["type"] == EventType.ANOMALY and row["rule"] is not None)
    return Counter((row["rule"], row["kind"] or "") for row in fired)


def latest_events(events: Iterable[Row]) -> dict[str, float]:
    """Return the time of the latest event of each type in `events`, in UTC seconds."""
    return {row["type"]: row["ts"] / 1e6 for row in sorted(events, key=lambda row: row["ts"])}


def _symptom(anomalies: list[Row], *, is_past: bool) -> Symptom:
    """Return the symptom of one step. Of equal causes, the first row is used."""
    keys = [causal_key(**{name: row.get(name) for name in _CAUSAL_COLUMNS}) for row in anomalies]
    causal = min(keys)
    first = anomalies[keys.index(causal)]
    return Symptom(
        run=first["run"],
        attempt=first["attempt"],
        rank=first["rank"],
        step=first.get("step"),
        severity=SEVERITIES[max(urgency(row["severity"]) for row in anomalies)],
        causal=causal,
        events=len(anomalies),
        further_subjects=frozenset(
            subject_of(*(row.get(name) for name in ("rule", "tensor", "op", "value"))) for row in anomalies
        ),
        message=first["message"],
        at=first["ts"] if is_past else None,
        ts=first.get("ts"),
        **{name: first.get(name) for name in SYMPTOM_COLUMNS},
    )


MESSAGES_PER_HOUR: Final = 30
"""Number of messages per run, severity and hour above which further incidents are listed in one message per minute.

A rule with a bad threshold could cause hundreds of messages. Warnings never delay critical incidents.
"""

PAUSE_STEPS: Final = 2
"""Largest number of sampled steps without a firing of its rule, after which an incident continues with any tensor."""

QUIET_SECONDS: Final = 300.0
"""Time without a further firing after which an incident without a step is over, as the alerts of Prometheus are."""

RECOVERY_SECONDS: Final = 60.0
"""Shortest length of an incident of which the end causes a message. A shorter one is over when its message is read."""

_OF_ONE_RANK: Final = frozenset({SLOW_RANK, GPU_XID, GPU_ECC, GPU_THROTTLED})

MOST_ENDED: Final = 256
"""Maximum number of open incidents of ended runs that the service keeps in memory, over all runs; the store has all."""

_HOUR_SECONDS: Final = 3600.0
_REMEMBERED: Final = 256
"""Maximum number of past incidents that the service remembers, over all runs."""


class IncidentTracker:
    """Open and past incidents of all attempts.

    An instance decides when each incident is announced and when it is resolved.
    """

    def __init__(self, *, group_wait_seconds: float, quiet_steps: int) -> None:
        self._group_wait_seconds = group_wait_seconds
        self.quiet_steps = quiet_steps
        self._open: dict[AttemptKey, list[Incident]] = defaultdict(list)
        self._over: deque[Incident] = deque(maxlen=_REMEMBERED)
        self._announced_at: dict[tuple[str, str], deque[float]] = defaultdict(deque)

    def observe(self, symptom: Symptom, now: float, *, stride: int = 1) -> Incident | None:
        """Add a symptom (the first anomaly of a rank at a step) to the incident to which it belongs.

        If it belongs to no incident, open an incident with this symptom and return the incident; otherwise return None.
        `stride` is the number of steps from one sampled step to the next.
        """
        key = symptom.run, symptom.attempt
        incidents = self._open[key]
        # The ranks of an incident have its first step; the last one in memory can be of a later step.
        for incident in sorted(incidents, key=lambda one: one.first.step == symptom.step)[::-1]:
            if self._continues(symptom, incident, stride):
                _join(incident, symptom, now)
                return None
        past = (one for one in self._over if one.attempt_key == key and one.first.rule not in _OF_ONE_RANK)
        if any(self._continues(symptom, one, stride) for one in past):
            return None
        incident = Incident(
            first=symptom,
            severity=symptom.severity,
            opened_at=now,
            seen_at=now,
            last_step=symptom.step,
            events=symptom.events,
            ranks=set() if symptom.rank is None else {symptom.rank},
        )
        incidents.append(incident)
        return incident

    def restore(self, incident: Incident) -> None:
        """Add an announced incident: that of a failure, or one that was open when an earlier service stopped."""
        self._open[incident.attempt_key].append(incident)

    def remember(self, incident: Incident) -> None:
        """Remember a past incident, so that late records of a rank do not open the incident again."""
        if incident.last_step is not None:
            self._over.append(incident)

    def open(self) -> list[Incident]:
        """Return the open incidents in memory, those of ended runs included."""
        return [incident for incidents in self._open.values() for incident in incidents]

    def unsettled(self) -> list[Incident]:
        """Return the incidents that are not announced yet, because they still wait for records of other ranks."""
        return [incident for incident in self.open() if not incident.is_settled]

    def settle(
        self,
        now: float,
        steps: Mapping[AttemptKey, Mapping[int, int | None]],
        arriving: Collection[AttemptKey] = (),
    ) -> list[Incident]:
        """Return the open incidents that must be announced now, and mark them as settled: their first cause is final.

        `now` is in monotonic seconds. `steps` contains, for each attempt, the last step of each live rank. `arriving`
        contains the attempts that have registered ranks which have not been polled yet.
        """
        settled = []
        for incident in self.unsettled():
            key = incident.attempt_key
            waited = now - incident.opened_at >= self._group_wait_seconds and key not in arriving
            if waited or _all_passed(steps.get(key, {}), incident.first.step):
                incident.is_settled, incident.fixed_key = True, incident_key(incident.first)
                incident.is_listed = self._is_above_limit(incident, now)
                settled.append(incident)
        return settled

    def resolve(self, runs: RunTracker, lasting: Collection[object] = (), now: float = 0.0) -> list[Incident]:
        """Remove the resolved incidents from the open ones and return them. Incidents not announced yet are kept.

        An incident is resolved when all live ranks are more than `quiet_steps` past its last step. After the end of the
        attempt, it is resolved if a step was sampled after its last step, or when a later attempt has passed its first
        step without it. `lasting` contains the attempts with replicas that differ now, and (attempt, rank) of the
        slow ranks. An incident without a step is resolved at `now`, in monotonic seconds, QUIET_SECONDS after its last
        anomaly.
        """
        resolved, ended = [], []
        for key, incidents in self._open.items():
            attempt, later = runs.known(key), runs.later(key)
            for incident in incidents:
                if not incident.is_settled:
                    continue
                if self._is_over(incident, runs, lasting, now) or any(self._is_passed(incident, one) for one in later):
                    resolved.append(incident)
                elif attempt is None or not attempt.live_ranks:
                    ended.append(incident)
        ended.sort(key=lambda incident: incident.opened_at)
        for incident in (*resolved, *ended[:-MOST_ENDED]):  # only the store keeps the oldest open ones of ended runs
            self._open[incident.attempt_key].remove(incident)
            self.remember(incident)
        self._open = defaultdict(list, {key: incidents for key, incidents in self._open.items() if incidents})
        return resolved

    def _continues(self, symptom: Symptom, incident: Incident, stride: int) -> bool:
        """Return whether `symptom` has the cause of `incident`. The docstring of the module lists the cases."""
        rule, first, last, step = incident.first.rule, incident.first.step, incident.last_step, symptom.step
        if rule in RULES_OF_RUNS or not _OF_ONE_RANK.isdisjoint({rule, symptom.rule}):
            return (rule, incident.first.rank) == (symptom.rule, symptom.rank)
        rules, known = ({one for one, _ in each.subjects} for each in (symptom, incident))
        if (REPLICA_DESYNC in rules) != (REPLICA_DESYNC in known):
            return False
        is_same = not symptom.subjects.isdisjoint(incident.subjects)
        if step is None or first is None or last is None:
            return is_same and step == first
        # Records can arrive together, and in any order of the ranks: the worse one of a later step is an incident.
        if (symptom.urgency - urgency(incident.severity)) * (1 if incident.is_settled else step - first) > 0:
            return False
        pause = max(first - step, step - last)
        is_pending = pause <= self.quiet_steps and is_same and not symptom.score > incident.first.score
        return step == first or (not rules.isdisjoint(known) and pause <= (PAUSE_STEPS + 1) * stride) or is_pending

    def _is_over(self, incident: Incident, runs: RunTracker, lasting: Collection[object], now: float) -> bool:
        """Return whether the cause of `incident` is seen to be gone in its own attempt, which is evaluated."""
        rule, last, attempt = incident.first.rule, incident.last_step, runs.get(incident.attempt_key)
        has_ended = attempt is None or not attempt.live_ranks
        if rule == RUN_STALLED or (rule in ENDS_WITH_RUN and has_ended):
            return True  # no rank waits any more
        if attempt is None:
            return False
        if rule == RUN_FAILED:
            is_active = attempt.state is RunState.RUNNING and _has_passed(attempt, last)
            return is_active or attempt.state is RunState.COMPLETED
        cause = {REPLICA_DESYNC: attempt.key, SLOW_RANK: (attempt.key, incident.first.rank)}.get(rule or "")
        if last is None or cause in lasting:
            return last is None and not has_ended and now - incident.seen_at >= QUIET_SECONDS
        if live := {rank.number: rank.last_step for rank in attempt.live_ranks}:
            return _all_passed(live, last + self.quiet_steps + 1)
        ranks = (attempt.ranks[number] for number in incident.ranks & attempt.ranks.keys())
        end = min((rank.last_step for rank in ranks if rank.last_step is not None), default=attempt.last_step)
        return end is not None and end >= last + attempt.sampling_interval

    def _is_passed(self, incident: Incident, later: Attempt) -> bool:
        """Return whether `later`, an attempt after that of `incident`, has passed its step without its cause."""
        if incident.first.rule == RUN_FAILED:
            has_failed = any(one.first.rule == RUN_FAILED for one in self._open.get(later.key, ()))
            return has_failed or later.state is RunState.COMPLETED or _has_passed(later, incident.first.step)
        same = (one for one in self._open.get(later.key, ()) if not one.subjects.isdisjoint(incident.subjects))
        return _has_passed(later, incident.first.step) and not any(same)

    def _is_above_limit(self, incident: Incident, now: float) -> bool:
        """Return whether MESSAGES_PER_HOUR messages of its run and severity were sent within the last hour."""
        times = self._announced_at[incident.first.run, incident.severity]
        while times and now - times[0] >= _HOUR_SECONDS:
            times.popleft()
        if len(times) >= MESSAGES_PER_HOUR:
            return True
        times.append(now)
        return False


def _join(incident: Incident, symptom: Symptom, now: float) -> None:
    incident.seen_at = now
    incident.events += symptom.events
    incident.subjects |= symptom.subjects
    if (symptom.rule, symptom.tensor, symptom.op) == (incident.first.rule, incident.first.tensor, incident.first.op):
        incident.largest = max(incident.largest, symptom.value or 0.0)
    if symptom.rank is not None:
        incident.ranks.add(symptom.rank)
    if symptom.step is not None:
        incident.last_step = symptom.step if incident.last_step is None else max(incident.last_step, symptom.step)
    if not incident.is_settled and symptom.causal < incident.first.causal:
        incident.first = symptom
    if not incident.is_settled and symptom.urgency > urgency(incident.severity):
        incident.severity = symptom.severity


def _has_passed(attempt: Attempt, step: int | None) -> bool:
    """Return whether a step of `attempt` after `step` was sampled on all live ranks, or is the end of the attempt."""
    if not (live := attempt.live_ranks):
        return attempt.last_step is not None and (step is None or attempt.last_step > step)
    if step is None:
        return all(rank.last_step is not None for rank in live)
    first = step if attempt.first_step is None else max(step, attempt.first_step)
    return _all_passed({rank.number: rank.last_step for rank in live}, first + attempt.sampling_interval)


def _all_passed(live: Mapping[int, int | None], step: int | None) -> bool:
    """Return whether every live rank has delivered `step`. Return True if no rank is alive."""
    if step is None:
        return not live
    return all(last is not None and last >= step for last in live.values())


CLEAR_SECONDS: Final = CLOCKS_DIFFER_MICROSECONDS / 1e6
"""Minimum time in seconds between the detection of a failure and a later sign of life of another rank.

A sign of life is a heartbeat or a response. A sign of life after this time proves that the other rank did not fail
together with the first failed rank.
"""


class FailureAlerts:
    """Decides when the failure of an attempt is announced. Each failure is announced once."""

    def __init__(self, announced: Iterable[str], *, wait_seconds: float) -> None:
        """Restore `announced`, the keys of the failures that an earlier service has announced.

        An announcement waits at most `wait_seconds` for reports of ranks that may have failed earlier or at the same
        time.
        """
        self._announced = set(announced)
        self._wait_seconds = wait_seconds

    def due(self, attempts: Iterable[Attempt], now: float) -> list[Incident]:
        """Return the incidents of failed attempts that must be announced now. `now` is in monotonic seconds."""
        due = []
        for attempt in attempts:
            key = failure_key(*attempt.key)
            if attempt.state is RunState.FAILED and key not in self._announced and self._is_clear(attempt, now):
                self._announced.add(key)
                due.append(
                    run_incident(
                        RUN_FAILED,
                        attempt,
                        rank=attempt.culprit,
                        reason=attempt.reason or "",
                        cause=attempt.evidence or "unknown",
                        reports=last_reports(attempt, now),
                        opened_at=now,
                    )
                )
        return due

    def _is_clear(self, attempt: Attempt, now: float) -> bool:
        """Return whether it is final which rank of `attempt` failed first.

        It is final if no further report of a rank can change the result.
        """
        since, live = attempt.settled_at, attempt.live_ranks
        if since is None or not live or now - since >= self._wait_seconds:
            return True
        found_at = since if attempt.judged_at is None else attempt.judged_at
        return attempt.culprit is not None and all(rank.liveness.last_sign - found_at >= CLEAR_SECONDS for rank in live)
