"""What becomes of everything the service hears: rows for the store, states of runs, incidents. No I/O of its own.

It lives on the event loop: loops hand it bodies, the HTTP side hands it registrations, the service asks it once in a
while what follows from the clock.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rankscope_contract.protocol.channel import DEFAULT_MAX_BYTES, Registration
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.divergence_handler import DivergenceHandler
from rankscope_ingest.detect.divergence_tracker import DivergenceTracker
from rankscope_ingest.detect.incidents import FailureAlerts, IncidentTracker
from rankscope_ingest.detect.stall_tracker import StallNews, StallTracker
from rankscope_ingest.network.dialing import Address
from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.pipeline.batcher import Batcher, PendingBatch
from rankscope_ingest.record_channel.admission import PollBudget
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """State of earlier runs of the service, read from the store at the start."""

    run_starts: Mapping[str, int] = field(default_factory=dict)
    failures_told: Iterable[str] = ()
    last_ordinal: int = 0
    given_up: Mapping[str, GivenUp] = field(default_factory=dict)
    stalls: StallTracker | None = None
    replicas: DivergenceTracker | None = None


class RunMonitor:
    """The service's knowledge. `RecordSink` adds the records that arrive."""

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
        urge: PollNow,
        restored: RestoredState | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Take over the parts that the service shares, and the state that it read from the store."""
        restored = restored or RestoredState()
        self.registry = registry
        self.runs = runs
        self.incidents = incidents
        self.batcher = batcher
        self.poll_budget = PollBudget(lambda: batcher.free_rows, max_rows=batcher.max_pending_rows, max_bytes=max_bytes)
        self.metrics = metrics
        self.clock = clock
        self.wall = wall
        self._failures = FailureAlerts(restored.failures_told, wait_seconds=runs.patience.failed_after_seconds)
        self.stalls = restored.stalls or StallTracker()
        self.replicas = DivergenceHandler(
            restored.replicas or DivergenceTracker(),
            incidents,
            metrics,
            add=self.add_event,
            stamp=self.stamp,
            urge=lambda run: urge(run, None),
        )
        self._judged_at: float | None = None
        self.poll_now = urge
        self._meters: dict[AttemptKey, RunMeter] = {}
        self._last_ordinal = restored.last_ordinal
        self.versions = Versions(self.stamp, restored.run_starts)
        self.losses = LostRecords(
            metrics, lambda target: self.meter(attempt_key(target)), self.stamp, restored.given_up
        )

    def ordinals(self, count: int) -> int:
        """Return the first of `count` new arrival numbers: the time in µs, and always above all that the store has."""
        first = max(self.wall(), self._last_ordinal + 1)
        self._last_ordinal = first + count - 1
        return first

    # What the HTTP side and the store say.

    def accept(self, registration: Registration, addresses: Iterable[Address]) -> Accepted:
        """Take a registration or heartbeat. Raises RegistrationError."""
        now = self.clock()
        accepted = self.registry.register(registration, addresses, now, is_over=self.runs.is_over)
        target = accepted.target
        register = orphan_runs.registered if target.is_dead else _registered
        attempt = register(self.runs, target, now, self.wall())
        if accepted.is_new_target:
            self.losses.recall(target)
            self.add_event(launch_row(target, self.stamp()))
        if accepted.is_new_launch:
            self._write_state(attempt)
        return accepted

    def committed(self, batch: PendingBatch, rows: Mapping[str, int], seconds: float) -> list[Target]:
        """Note a commit; return the ranks that wait to hear of it."""
        self.metrics.committed(rows, seconds, self.wall())
        waiting = []
        for incarnation, seq in batch.watermarks.items():
            target = self.registry.get(incarnation)
            if target is None:
                continue
            self.meter(attempt_key(target)).rows_stored += target.commit(seq)
            if target.health is Health.DRAINING:
                waiting.append(target)
        return waiting

    def record_incident(self, incident: Incident, state: str) -> None:
        """Put the state of an incident into the batch."""
        self.add_event(incident_row(incident, state, self.stamp()))

    # What follows from the clock.

    def update_runs(self) -> list[Incident]:
        """Look at all runs; write what changed, leave ranks that vanished, and return failures to tell of."""
        now, wall = self.clock(), self.wall()
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
        for attempt in self.versions.due(self.runs.attempts(), wall):
            self._write_state(attempt)
        self.check_replicas()
        failures = self._failures.due(self.runs.attempts(), now)
        self._forget(now)
        return failures

    def check_replicas(self) -> None:
        """Tell of replicas that are no longer equal."""
        self.replicas.judge(self.runs.attempts(), self.clock())

    def check_stalls(self) -> StallNews:
        """Return what is to be done about attempts that stand still, or do no more."""
        return self.stalls.look(self.runs.attempts(), self.clock())

    def no_stacks(self, key: AttemptKey, rank: int, why: str) -> None:
        """Note that a rank that was asked where it stands gave no stacks."""
        self.stalls.refused(key, rank, why, self.clock())

    def due_incidents(self) -> list[Incident]:
        """Return the incidents to announce now; for the others, ask the ranks they wait for."""
        if not self.incidents.unsettled():
            return []
        now, steps = self.clock(), self._live_steps()
        arriving = {attempt.key for attempt in self.runs.attempts() if attempt.is_arriving(now)}
        settled = self.incidents.settle(now, steps, arriving)
        for incident in self.incidents.unsettled():
            for number in incident.awaited(steps.get(incident.attempt_key, {})):
                self.poll_now(incident.first.run, number)
        return settled

    def resolve(self) -> list[Incident]:
        """Return the incidents that are over."""
        return self.incidents.resolve(self._live_steps())

    def progress(self) -> tuple[RunProgress, ...]:
        """Return where the latest attempt of each run stands."""
        targets: dict[AttemptKey, list[Target]] = defaultdict(list)
        for target in self.registry.targets:
            targets[attempt_key(target)].append(target)
        latest = self.runs.latest().values()
        return tuple(run_progress(attempt, self.meter(attempt.key), targets[attempt.key]) for attempt in latest)

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
            if target.health is not Health.GONE and not self.runs.is_live(
                attempt_key(target), rank, target.incarnation
            ):
                yield target

    def _abandon(self, target: Target, now: float) -> None:
        """Stop following a rank that vanished; what it had published and nobody fetched is lost."""
        target.leave(now)
        for row in self.losses.of_vanished(target):
            self.add_event(row)

    def _write_state(self, attempt: Attempt) -> None:
        version = self.versions.of_attempt(attempt, is_latest=self.runs.is_newest(attempt))
        self.batcher.add(version, self.clock())

    def _forget(self, now: float) -> None:
        for target in list(self.registry.targets):
            if target.gone_at is not None and now - target.gone_at >= REMEMBER_SECONDS and not target.uncommitted:
                self.losses.forget(target)
                self.registry.forget(target.incarnation)
        for attempt in list(self.runs.attempts()):
            if attempt.is_quiet(now, REMEMBER_ATTEMPT_SECONDS):
                self.runs.forget(attempt.key)
                self._meters.pop(attempt.key, None)

    def add_event(self, row: Row) -> None:
        """Put a row of `events` into the batch."""
        self.batcher.add({"events": rows_table("events", [row])}, self.clock())

    def stamp(self) -> Stamp:
        """Return the moment and the arrival number of a row that is made now."""
        return Stamp(self.wall(), self.ordinals(1))

    def meter(self, key: AttemptKey) -> RunMeter:
        """Return the counters of an attempt."""
        return self._meters.setdefault(key, RunMeter())

    def _live_steps(self) -> dict[AttemptKey, dict[int, int | None]]:
        return {
            attempt.key: {rank.number: rank.last_step for rank in attempt.live_ranks}
            for attempt in self.runs.attempts()
        }


def attempt_key(target: Target) -> AttemptKey:
    """Return the run and attempt of a target."""
    return target.registration.run, target.attempt


def _registered(runs: RunTracker, target: Target, _now: float, wall: int) -> Attempt:
    return runs.registered(target.registration, target.attempt, target.liveness, wall)
