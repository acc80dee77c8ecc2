"""What becomes of everything the service hears: rows for the store, states of runs, incidents. No I/O of its own.

It lives on the event loop: loops hand it bodies, the HTTP side hands it registrations, the service asks it once in a
while what follows from the clock.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from rankscope_contract.channel import DEFAULT_MAX_BYTES, Registration
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.divergence_handler import DivergenceHandler
from rankscope_ingest.detect.divergence_tracker import DivergenceTracker
from rankscope_ingest.detect.incidents import FailureAlerts, IncidentTracker
from rankscope_ingest.detect.stall_tracker import StallNews, StallTracker
from rankscope_ingest.detect.symptoms import firings, last_words, symptoms
from rankscope_ingest.network.dialing import Address
from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.pipeline.batcher import Batcher, PendingBatch
from rankscope_ingest.record_channel.admission import PollBudget
from rankscope_ingest.record_channel.decode import decode_one
from rankscope_ingest.record_channel.plans import PlanColumns
from rankscope_ingest.record_channel.validate import ValidBody
from rankscope_ingest.recovery import orphan_runs
from rankscope_ingest.recovery.lost_records import GivenUp, LostRecords
from rankscope_ingest.reporting.progress import RunMeter, RunProgress, run_progress
from rankscope_ingest.reporting.rows import Row, Stamp, Versions, incident_row, launch_row
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.target import Health, Target
from rankscope_ingest.runs.tracker import ENDED, Attempt, AttemptKey, RunTracker
from rankscope_ingest.targets.registry import Accepted, Registry

log = logging.getLogger(__name__)

PollNow = Callable[[str, int | None], None]
"""`urge(run, rank)` has that rank polled at once, without a rank all of the run."""

REMEMBER_SECONDS: Final = 600.0
REMEMBER_ATTEMPT_SECONDS: Final = 3600.0

AWAY_SECONDS: Final = 5.0
"""A pause between two judgements, due once a second, that shows the service itself as stopped or starved."""


class RunMonitor:
    """The service's knowledge. Implements the `Sink` of the target loops."""

    def __init__(
        self,
        *,
        registry: Registry,
        runs: RunTracker,
        incidents: IncidentTracker,
        batcher: Batcher,
        metrics: ServiceMetrics,
        clock: Callable[[], float],
        wall: Callable[[], int],
        run_starts: Mapping[str, int],
        failures_told: Iterable[str],
        last_ordinal: int,
        urge: PollNow,
        given_up: Mapping[str, GivenUp] | None = None,
        stalls: StallTracker | None = None,
        replicas: DivergenceTracker | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Take over what the parts of the service share."""
        self.registry = registry
        self.runs = runs
        self.incidents = incidents
        self.batcher = batcher
        self.room = PollBudget(lambda: batcher.free_rows, max_rows=batcher.max_pending_rows, max_bytes=max_bytes)
        self.metrics = metrics
        self._clock = clock
        self._wall = wall
        self._failures = FailureAlerts(failures_told, wait_seconds=runs.patience.failed_after_seconds)
        self.stalls = stalls or StallTracker()
        self._replicas = DivergenceHandler(
            replicas or DivergenceTracker(),
            incidents,
            metrics,
            add=self._add_event,
            stamp=self.stamp,
            urge=lambda run: urge(run, None),
        )
        self._judged_at: float | None = None
        self._poll_now = urge
        self._meters: dict[AttemptKey, RunMeter] = {}
        self._last_ordinal = last_ordinal
        self._versions = Versions(self.stamp, run_starts)
        self.losses = LostRecords(metrics, lambda target: self._meter(_key(target)), self.stamp, given_up or {})

    # What the target loops say.

    @property
    def is_full(self) -> bool:
        """Return whether pulling has to wait for the store."""
        return self.batcher.is_full

    def ordinals(self, count: int) -> int:
        """Return the first of `count` new arrival numbers: the time in µs, and always above all that the store has."""
        first = max(self._wall(), self._last_ordinal + 1)
        self._last_ordinal = first + count - 1
        return first

    def on_answer(self, target: Target) -> None:
        """Note a usable answer; a rank that drains waits for a commit, so nothing is held back for it."""
        target.liveness.heard(self._clock())
        target.gone_at = None
        if not target.is_dead:
            self.runs.heard(_key(target), target.registration.rank, target.incarnation)
        if target.health is Health.DRAINING and target.committed < target.cursor:
            self.batcher.want_flush()

    def on_failure(self, target: Target, error: FetchError) -> None:
        """Note a poll that brought nothing."""
        self.metrics.poll_failed(error.reason)
        if error.reason == "refused":
            target.liveness.refused(self._clock())
        log.info("poll failed: %s", error, extra={"target": target.name, "reason": error.reason})

    def on_drained(self, target: Target) -> None:
        """Note that a rank ends, or that the spool of a dead one does, with everything committed."""
        target.leave(self._clock())
        if not target.is_dead:
            self.runs.closed(_key(target), target.registration.rank, target.incarnation)
            return
        orphan_runs.drained(self.runs, target, self._clock(), self._wall())
        for row in self.losses.of_drained(target):
            self._add_event(row)

    def on_replaced(self, target: Target, incarnation: str) -> None:
        """Note that another process answers at the target's address: this one cannot be there any more."""
        target.liveness.refused(self._clock())
        log.info("another process answers", extra={"target": target.name, "incarnation": incarnation})

    def on_body(
        self, target: Target, body: ValidBody, plans: Mapping[str, PlanColumns], *, size: int, inflated: int
    ) -> None:
        """Take the rows of one body into the batch, move the cursor, and note what the body says."""
        now = self._clock()
        tables = {}
        if gaps := self.losses.of_body(target, body):
            tables["events"] = rows_table("events", gaps)
        if (tensors := self._versions.of_tensors(target, plans)) is not None:
            tables["tensors"] = tensors
        events = decode_one(body, "events")
        first_causes, said = symptoms(events), last_words(events)
        self.stalls.heard(_key(target), target.registration.rank, events, now)
        self._replicas.heard(decode_one(body, "hashes"), now)
        # From here on nothing may fail: rows that were taken must not be asked for again, nor the other way round.
        self.batcher.add_body(body, now)
        self.batcher.add(tables, now)
        target.cursor, target.last_ts = body.last, body.last_ts
        target.uncommitted.append((body.last, body.rows))
        self.room.learn(records=body.records, rows=body.rows, size=inflated)
        self.metrics.body_taken(body.records, size)
        self.metrics.fired(target.registration.run, target.registration.rank, firings(events))
        self._follow_run(target, body, now)
        for symptom in first_causes:
            if self.incidents.observe(symptom, now) is not None:
                self._poll_now(symptom.run, None)
        for reason, error, at in said:
            self.runs.exited(
                _key(target), target.registration.rank, reason, error, at=at, incarnation=target.incarnation
            )
        if said:
            self.batcher.want_flush()

    # What the HTTP side and the store say.

    def accept(self, registration: Registration, addresses: Iterable[Address]) -> Accepted:
        """Take a registration or heartbeat. Raises RegistrationError."""
        now = self._clock()
        accepted = self.registry.register(registration, addresses, now, is_over=self.runs.is_over)
        target = accepted.target
        register = orphan_runs.registered if target.is_dead else _registered
        attempt = register(self.runs, target, now, self._wall())
        if accepted.is_new_target:
            self.losses.recall(target)
            self._add_event(launch_row(target, self.stamp()))
        if accepted.is_new_launch:
            self._write_state(attempt)
        return accepted

    def committed(self, batch: PendingBatch, rows: Mapping[str, int], seconds: float) -> list[Target]:
        """Note a commit; return the ranks that wait to hear of it."""
        self.metrics.committed(rows, seconds, self._wall())
        waiting = []
        for incarnation, seq in batch.watermarks.items():
            target = self.registry.get(incarnation)
            if target is None:
                continue
            self._meter(_key(target)).rows_stored += target.commit(seq)
            if target.health is Health.DRAINING:
                waiting.append(target)
        return waiting

    def record_incident(self, incident: Incident, state: str) -> None:
        """Put the state of an incident into the batch."""
        self._add_event(incident_row(incident, state, self.stamp()))

    # What follows from the clock.

    def update_runs(self) -> list[Incident]:
        """Look at all runs; write what changed, leave ranks that vanished, and return failures to tell of."""
        now, wall = self._clock(), self._wall()
        self._excuse_absence(now)
        verdict = self.runs.tick(now, wall)
        for _, rank in verdict.vanished:
            if target := self.registry.get(rank.incarnation):
                self._abandon(target, now)
        for target in self._unattended_targets():
            if target.liveness.has_vanished(now, self.runs.patience):
                self._abandon(target, now)
        for attempt in verdict.changed:
            log.info("run is %s", attempt.state, extra={"run": attempt.run, "reason": attempt.reason})
            self._write_state(attempt)
            if attempt.state in ENDED:
                self.batcher.want_flush()
        for attempt in self._versions.due(self.runs.attempts(), wall):
            self._write_state(attempt)
        self.check_replicas()
        failures = self._failures.due(self.runs.attempts(), now)
        self._forget(now)
        return failures

    def check_replicas(self) -> None:
        """Tell of replicas that are no longer equal."""
        self._replicas.judge(self.runs.attempts(), self._clock())

    def check_stalls(self) -> StallNews:
        """Return what is to be done about attempts that stand still, or do no more."""
        return self.stalls.look(self.runs.attempts(), self._clock())

    def no_stacks(self, key: AttemptKey, rank: int, why: str) -> None:
        """Note that a rank that was asked where it stands gave no stacks."""
        self.stalls.refused(key, rank, why, self._clock())

    def due_incidents(self) -> list[Incident]:
        """Return the incidents to announce now; for the others, ask the ranks they wait for."""
        if not self.incidents.unsettled():
            return []
        now, steps = self._clock(), self._live_steps()
        arriving = {attempt.key for attempt in self.runs.attempts() if attempt.is_arriving(now)}
        settled = self.incidents.settle(now, steps, arriving)
        for incident in self.incidents.unsettled():
            for number in incident.awaited(steps.get(incident.attempt_key, {})):
                self._poll_now(incident.first.run, number)
        return settled

    def resolve(self) -> list[Incident]:
        """Return the incidents that are over."""
        return self.incidents.resolve(self._live_steps())

    def progress(self) -> tuple[RunProgress, ...]:
        """Return where the latest attempt of each run stands."""
        targets: dict[AttemptKey, list[Target]] = defaultdict(list)
        for target in self.registry.targets:
            targets[_key(target)].append(target)
        latest = self.runs.latest().values()
        return tuple(run_progress(attempt, self._meter(attempt.key), targets[attempt.key]) for attempt in latest)

    def _excuse_absence(self, now: float) -> None:
        """Hold nobody's silence against him while this process was stopped: it had no chance to listen."""
        away = 0.0 if self._judged_at is None else now - self._judged_at
        self._judged_at = now
        if away > AWAY_SECONDS:
            log.warning("the service did not run for %.0f s: no rank's silence counts from that time", away)
            self.runs.excuse(away, now)
            for target in self._unattended_targets():
                target.liveness.excuse(away, now)

    def _unattended_targets(self) -> Iterable[Target]:
        """Return the targets whose silence says nothing of a run any more: the process had its last word, or a heir."""
        for target in self.registry.targets:
            rank = target.registration.rank
            if target.health is not Health.GONE and not self.runs.is_live(_key(target), rank, target.incarnation):
                yield target

    def _follow_run(self, target: Target, body: ValidBody, now: float) -> None:
        key, rank = _key(target), target.registration.rank
        self.runs.stepped(key, rank, body.last_step, now, target.incarnation)
        scalars = body.nested.get("scalars")
        self._meter(key).observe(rank, scalars and scalars.columns, body.last_ts, body.last_step)

    def _abandon(self, target: Target, now: float) -> None:
        """Stop following a rank that vanished; what it had published and nobody fetched is lost."""
        target.leave(now)
        for row in self.losses.of_vanished(target):
            self._add_event(row)

    def _write_state(self, attempt: Attempt) -> None:
        version = self._versions.of_attempt(attempt, is_latest=self.runs.is_newest(attempt))
        self.batcher.add(version, self._clock())

    def _forget(self, now: float) -> None:
        for target in list(self.registry.targets):
            if target.gone_at is not None and now - target.gone_at >= REMEMBER_SECONDS and not target.uncommitted:
                self.losses.forget(target)
                self.registry.forget(target.incarnation)
        for attempt in list(self.runs.attempts()):
            if attempt.is_quiet(now, REMEMBER_ATTEMPT_SECONDS):
                self.runs.forget(attempt.key)
                self._meters.pop(attempt.key, None)

    def _add_event(self, row: Row) -> None:
        self.batcher.add({"events": rows_table("events", [row])}, self._clock())

    def stamp(self) -> Stamp:
        """Return the moment and the arrival number of a row that is made now."""
        return Stamp(self._wall(), self.ordinals(1))

    def _meter(self, key: AttemptKey) -> RunMeter:
        return self._meters.setdefault(key, RunMeter())

    def _live_steps(self) -> dict[AttemptKey, dict[int, int | None]]:
        return {
            attempt.key: {rank.number: rank.last_step for rank in attempt.live_ranks}
            for attempt in self.runs.attempts()
        }


def _key(target: Target) -> AttemptKey:
    return target.registration.run, target.attempt


def _registered(runs: RunTracker, target: Target, _now: float, wall: int) -> Attempt:
    return runs.registered(target.registration, target.attempt, target.liveness, wall)
