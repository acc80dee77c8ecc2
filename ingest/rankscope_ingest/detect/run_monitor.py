"""Convert registrations and polled records into rows for the store, run states and incidents.

The module performs no I/O. All methods run on the event loop. `RecordSink` passes polled records, HTTP handlers pass
registrations, and the periodic jobs of the service call the methods for decisions that depend on time, such as dead
ranks and stalled runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from rankscope_contract.model.events import REPLICA_DESYNC
from rankscope_contract.wire.channel import NOTHING, STATE_RUNNING, Registration
from rankscope_ingest.base.addresses import Address
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.base.service_clock import ServiceClock, steady_microseconds
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.divergence import (
    MAX_EVENTS,
    DivergenceTracker,
    StragglerTracker,
    converged_row,
    diverged_row,
    divergence_symptom,
)
from rankscope_ingest.detect.history import History
from rankscope_ingest.detect.incidents import (
    RECOVERY_SECONDS,
    FailureAlerts,
    IncidentTracker,
    exit_reports,
    firings,
    latest_events,
    symptoms,
)
from rankscope_ingest.detect.rank_scores import RankScores, symptoms_between
from rankscope_ingest.detect.stall_tracker import StallTracker
from rankscope_ingest.live.progress import RunMeter, RunProgress, run_progress
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.live.tails import LiveTails
from rankscope_ingest.pipeline.flusher import Batcher, PendingBatch
from rankscope_ingest.pipeline.rows import LostRecords, Row, Stamp, Versions, clock_row, incident_row, launch_row
from rankscope_ingest.record_channel.bodies import PlanColumns, ValidBody
from rankscope_ingest.record_channel.loop import PollBudget
from rankscope_ingest.runs.incident import MUTED, OPENED, RESOLVED, Incident, Symptom
from rankscope_ingest.runs.models import Attempt, AttemptKey, Health, Target
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_ingest.spools.orphan_spools import drain_orphan, register_orphan
from rankscope_ingest.targets.registry import Accepted, AttemptNumbers, Registry
from rankscope_storage.base.rule_names import SLOW_RANK
from rankscope_storage.base.service_catalogue import BYTES_INGESTED, RECORDS_INGESTED, SCRAPE_FAILURES

log = logging.getLogger(__name__)

PollNow = Callable[[str, int | None], None]
"""Callable `poll_now(run, rank)` that polls a rank immediately. If `rank` is None, it polls all ranks of the run."""

OVERLAP_SECONDS: Final = 3.0
"""Time for which two attempts of a run train together before this is reported: one process may be ending.

A rank without events is polled every 5 s, so that ranks print it within 10 s."""

REMEMBER_SECONDS: Final = 600.0
REMEMBER_ATTEMPT_SECONDS: Final = 3600.0

PAUSE_SECONDS: Final = 5.0
"""Minimum time in seconds between two updates of the run states that counts as a pause of the service.

Updates are due once a second. A longer time means that the service was suspended or had no CPU time.
"""


class RunMonitor:
    """State of all runs, ranks and incidents. Converts registrations and polled records into rows."""

    def __init__(
        self,
        config: ServiceConfig,
        history: History,
        *,
        batcher: Batcher,
        metrics: ServiceMetrics,
        poll_now: PollNow,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = lambda: time.time_ns() // 1000,
        steady: Callable[[], int] = steady_microseconds,
    ) -> None:
        """Restore the state in `history`.

        `clock` returns monotonic seconds, `wall` UTC µs, and `steady` µs of a clock that shows jumps of `wall`.
        """
        heartbeat_seconds = config.runs.heartbeat_seconds
        self.registry = Registry(
            networks=config.service.allowed_networks,
            heartbeat_seconds=heartbeat_seconds,
            ttl_seconds=3 * heartbeat_seconds,
            attempts=AttemptNumbers(history.launches),
            lives=history.processes,
        )
        self.runs = RunTracker(config.runs)
        self.incidents = IncidentTracker(
            group_wait_seconds=config.notify.group_wait_seconds, quiet_steps=config.notify.quiet_steps
        )
        history.restore(self.runs, self.incidents)
        self.stalls = StallTracker(history.open_stalls)
        self.replicas = DivergenceTracker(history.diverged)
        self.replicas.add(history.hashes, history.read_at)
        self.stragglers = StragglerTracker(clock)
        self.rank_scores = RankScores()
        self.batcher = batcher
        self.poll_budget = PollBudget(
            batcher.free_rows, max_rows=batcher.max_pending_rows, max_bytes=config.ingest.max_bytes
        )
        self.metrics = metrics
        self.poll_now = poll_now
        self.tails = LiveTails(lambda run: poll_now(run, None), kept_seconds=config.ingest.flush_after_seconds + 5.0)
        self.clock = clock
        self.wall = wall
        self._service_clock = ServiceClock(wall, steady)
        self._repeat_seconds = config.notify.repeat_seconds
        self.versions = Versions(self.stamp, history.run_starts)
        self.losses = LostRecords(
            metrics,
            lambda target: self.meter(target.attempt_key),
            self.stamp,
            history.given_up,
        )
        self._failures = FailureAlerts(history.announced_failures, wait_seconds=config.runs.failed_after_seconds)
        self._meters: dict[AttemptKey, RunMeter] = {}
        self._last_ordinal = history.last_ordinal
        self._updated_at: float | None = None
        self._commits_with_states = 0
        self.shared_names: dict[str, str] = {}  # sentences about runs of two trainings at the same time

    def may_have_states(self, commit: Collection[str]) -> bool:
        """Return whether a commit with rows of these datasets may contain a new state of a run."""
        if "attempts" not in commit or not self._commits_with_states:
            return False
        self._commits_with_states -= 1
        return True

    def ordinals(self, count: int) -> int:
        """Reserve `count` new arrival numbers; return the first one.

        An arrival number is the present time in UTC µs, increased if necessary so that it is higher than all arrival
        numbers in the store.
        """
        first = max(self.wall(), self._last_ordinal + 1)
        self._last_ordinal = first + count - 1
        return first

    def stamp(self) -> Stamp:
        """Return the time and the arrival number of a new row."""
        return Stamp(self.wall(), self.ordinals(1))

    def meter(self, key: AttemptKey) -> RunMeter:
        """Return the counters of the progress of an attempt, such as stored rows, lost records and speed.

        The counters are created at the first call for the attempt.
        """
        return self._meters.setdefault(key, RunMeter())

    def add_event(self, row: Row) -> None:
        """Add one row of the dataset `events` to the current batch."""
        self.batcher.add({"events": rows_table("events", [row])}, self.clock())
        self.metrics.happened(row["run"], {row["type"]: row["ts"] / 1e6})

    def record_incident(self, incident: Incident, state: str) -> None:
        """Add an event to the current batch which records that `incident` reached the state `state`.

        If the incident was found in records of an ended process, it opens at the time of its first record, and is
        resolved at the end of the run.
        """
        stamp, key = self.stamp(), incident.attempt_key
        at = incident.first.at if state in {OPENED, MUTED, RESOLVED} else None  # a message has the time of its delivery
        if at is not None and state == RESOLVED:
            at = next((one.ended_at for one in (*reversed(self.runs.later(key)), self.runs.known(key)) if one), None)
        self.add_event(incident_row(incident, state, replace(stamp, ts=min(at or stamp.ts, stamp.ts))))

    # Calls by HTTP handlers and by the flusher.

    def accept(self, registration: Registration, addresses: Iterable[Address]) -> Accepted:
        """Accept a registration or heartbeat of a rank. Raises RegistrationError if it is rejected."""
        self._check_clock()
        now, wall, jumped = self.clock(), self.wall(), self._service_clock.jumped
        accepted = self.registry.register(registration, addresses, now, is_over=self.runs.is_over)
        target = accepted.target
        if target.is_dead:
            attempt = register_orphan(self.runs, target, now, wall, jumped)
        else:
            attempt = self.runs.registered(target.registration, target.attempt, target.liveness, wall, jumped)
        if accepted.is_new_target:
            self.losses.recall(target)
            self.add_event(launch_row(target, self.stamp()))
        if accepted.is_new_launch:
            self._write_state(attempt)
            self.batcher.want_flush()  # a person waits for the run to be in the list
        return accepted

    def committed(self, batch: PendingBatch, rows: Mapping[str, int], seconds: float) -> list[Target]:
        """Record a commit of `batch`; return the ranks that wait for the commit of their last records before they exit.

        `rows` contains the number of rows by dataset, `seconds` the duration of the commit.
        """
        self.metrics.committed(rows, seconds, self.wall())
        waiting = []
        for incarnation, seq in batch.watermarks.items():
            target = self.registry.get(incarnation)
            if target is None:
                continue
            self.meter(target.attempt_key).rows_stored += target.commit(seq)
            if target.health is Health.DRAINING:
                waiting.append(target)
        return waiting

    def progress(self) -> tuple[RunProgress, ...]:
        """Return, for each run, the progress of the latest attempt, such as its state, step and loss."""
        targets: dict[AttemptKey, list[Target]] = defaultdict(list)
        for target in self.registry.targets:
            targets[target.attempt_key].append(target)
        latest = self.runs.latest().values()
        found = (run_progress(attempt, self.meter(attempt.key), targets[attempt.key]) for attempt in latest)
        return tuple(replace(one, notice=self.shared_names.get(one.run)) for one in found)

    # Decisions that depend on time.

    def update_runs(self) -> list[Incident]:
        """Update the states of all runs, and return the incidents of failed attempts that must be announced now."""
        self._check_clock()
        now, wall = self.clock(), self.wall()
        self._exclude_pause(now)
        changed, vanished = self.runs.tick(now, wall)
        for rank in vanished:
            if target := self.registry.get(rank.incarnation):
                self._abandon(target, now)
        for target in self._unattended_targets():
            if target.liveness.has_vanished(now, self.runs.limits):
                self._abandon(target, now)
        for attempt in changed:
            log.info(
                "state of the run changed to %s", attempt.state, extra={"run": attempt.run, "reason": attempt.reason}
            )
            self._write_state(attempt)
            if (other := self._shown(attempt)) is not attempt:
                self._write_state(other)
        self._check_names()
        due = self.versions.due(self.runs.attempts(), wall)
        for attempt in due:
            self._write_state(attempt)
        if changed or any(one.has_ended for one in due):
            self.batcher.want_flush()
            self._commits_with_states = 2  # one may be under way
        self.check_replicas()
        self.check_stragglers()
        failures = self._failures.due(self.runs.attempts(), now)
        for failure in failures:
            self.incidents.restore(failure)
        self._forget(now)
        return failures

    def _check_names(self) -> None:
        """Report each run whose name two trainings use at the same time."""
        known, self.shared_names = self.shared_names, {}
        for older, newest in self.runs.simultaneous(OVERLAP_SECONDS):
            sentence = (
                f"two trainings have the same run name {older.run!r} at the same time: attempts {older.number} and "
                f"{newest.number}. Both are stored, but as one run: set another RANKSCOPE_RUN for one of them"
            )
            self.shared_names[older.run] = sentence
            if older.run not in known:
                log.warning("%s", sentence)
                for target in self.registry.targets:
                    target.has_notice |= target.registration.run == older.run
                self.poll_now(older.run, None)

    def check_replicas(self) -> None:
        """Add events for replicas that diverged or are equal again.

        The first divergence of an attempt opens an incident.
        """
        now = self.clock()
        changes = self.replicas.check([attempt.key for attempt in self.runs.attempts()], now)
        for converged in changes.converged:
            self.add_event(converged_row(converged, self.stamp()))
        for key, found in changes.by_attempt().items():
            for item in found[:MAX_EVENTS]:
                self.add_event(diverged_row(item, self.stamp()))
                self.metrics.fired(key[0], item.rank, {(REPLICA_DESYNC, item.kind): 1})
            if key in changes.opened:
                self.observe(divergence_symptom(found), now)

    def observe(self, symptom: Symptom, now: float) -> None:
        """Add a symptom to its incident. If it opens one, poll all ranks of the run, which may have its first cause."""
        attempt = self.runs.get((symptom.run, symptom.attempt))
        stride = 1 if attempt is None else attempt.sampled_every
        if self.incidents.observe(symptom, now, stride=stride) is not None:
            self.poll_now(symptom.run, None)

    def check_stragglers(self) -> None:
        """Add an event for each rank that has become slow; while the rank is slow, its incident is open."""
        for row, is_new in self.stragglers.check((attempt.key for attempt in self.runs.attempts()), self.stamp):
            if is_new:
                self.add_event(row)
                self.metrics.fired(row["run"], row["rank"], {(SLOW_RANK, ""): 1})
            for symptom in symptoms([row]):
                self.incidents.observe(symptom if is_new else replace(symptom, events=0), self.clock())

    def check_ranks(self) -> None:
        """Add an event for each rule between ranks that fires."""
        live = {attempt.key: [rank.number for rank in attempt.live_ranks] for attempt in self.runs.attempts()}
        if not (rows := list(self.rank_scores.check(live, self.stamp))):
            return
        for row in rows:
            self.add_event(row)
            self.metrics.fired(row["run"], row["rank"], {(row["rule"], row["kind"]): 1})
        for symptom in symptoms_between(rows):
            self.observe(symptom, self.clock())

    def due_incidents(self) -> list[Incident]:
        """Return the incidents that must be announced now.

        If another incident waits for records of ranks, poll these ranks immediately.
        """
        self.check_ranks()  # here: its events belong to the incidents of the same records
        if not self.incidents.unsettled():
            return []
        now, steps = self.clock(), self._live_steps()
        arriving = {attempt.key for attempt in self.runs.attempts() if attempt.is_arriving(now)}
        settled = self.incidents.settle(now, steps, arriving)
        for incident in settled:
            self.metrics.settled(incident)
        for incident in self.incidents.unsettled():
            for number in incident.awaited(steps.get(incident.attempt_key, {})):
                self.poll_now(incident.first.run, number)
        return settled

    def resolve_incidents(self) -> list[Incident]:
        """Add an event with state `resolved` to the current batch for each open incident that is now resolved.

        Return those whose end causes a message: they lasted for RECOVERY_SECONDS, and their attempt continues.
        """
        slow = {(key, rank) for key, ranks in self.stragglers.reported.items() for rank in ranks}
        resolved = self.incidents.resolve(self.runs, self.replicas.diverged | slow, self.clock())
        for incident in resolved:
            self.record_incident(incident, RESOLVED)
            self.batcher.want_flush()
        lasted = (one for one in resolved if one.seen_at - one.began_at >= RECOVERY_SECONDS and not one.is_muted)
        return [one for one in lasted if self._is_live(one)]

    def due_reminders(self) -> list[tuple[Incident, float]]:
        """Return the open incidents of live attempts with a last message of `repeat_seconds` ago, and their age."""
        now, every = self.clock(), self._repeat_seconds
        known = (*self.incidents.open(), *self.stalls.open()) if every else ()
        due = [one for one in known if one.is_settled and now - one.told_at >= every and self._is_live(one)]
        for incident in due:
            incident.told_at = now
        return [(one, now - one.began_at) for one in due if not one.is_muted]

    def _is_live(self, incident: Incident) -> bool:
        attempt = self.runs.get(incident.attempt_key)
        return attempt is not None and bool(attempt.live_ranks)

    def _live_steps(self) -> dict[AttemptKey, dict[int, int | None]]:
        return {
            attempt.key: {rank.number: rank.last_step for rank in attempt.live_ranks}
            for attempt in self.runs.attempts()
        }

    def _check_clock(self) -> None:
        """Correct later times of all attempts if the wall clock was set, and add an event to each active attempt."""
        jump = self._service_clock.check()
        if not jump:
            return
        log.warning("the clock of this host was set by %.1f s; later figures are corrected by it", jump / 1e6)
        self.runs.set_clock(jump)
        self.versions.set_clock(jump)
        for attempt in self.runs.attempts():
            if not attempt.has_ended:
                self.add_event(clock_row(attempt, jump, self.stamp()))

    def _exclude_pause(self, now: float) -> None:
        """Exclude a pause of this process from the timeouts of the ranks.

        During a pause the service could not receive heartbeats or responses.
        """
        pause = 0.0 if self._updated_at is None else now - self._updated_at
        self._updated_at = now
        if pause > PAUSE_SECONDS:
            log.warning(
                "the service did not run for %.0f s; this time does not count toward the timeouts of ranks", pause
            )
            self.runs.exclude(pause, now)
            for target in self._unattended_targets():
                target.liveness.exclude(pause, now)

    def _unattended_targets(self) -> Iterable[Target]:
        """Yield the targets that `RunTracker.tick` does not check for timeouts.

        These are targets whose process has sent an exit report or was replaced by a newer process.
        """
        for target in self.registry.targets:
            rank = target.registration.rank
            if not target.is_gone and not self.runs.is_live(target.attempt_key, rank, target.incarnation):
                yield target

    def _abandon(self, target: Target, now: float) -> None:
        """Stop polling a dead rank. Published records of the rank that were not polled are counted as lost."""
        target.leave(now)
        for row in self.losses.of_unread(target, "the process vanished before the service polled these records"):
            self.add_event(row)

    def _shown(self, attempt: Attempt) -> Attempt:
        """Return the attempt whose state is that of the run of `attempt`, also if it is no longer evaluated."""
        later = self.runs.later(attempt.key)
        if not later and not attempt.has_ended:
            return attempt  # the usual case; to find an older one that trains, all attempts are read
        return self.runs.latest().get(attempt.run) or [attempt, *later][-1]

    def _write_state(self, attempt: Attempt) -> None:
        version = self.versions.of_attempt(attempt, is_latest=self._shown(attempt) is attempt)
        self.batcher.add(version, self.clock())

    def _forget(self, now: float) -> None:
        """Remove targets and attempts that ended long ago, to bound the memory of the service."""
        for target in list(self.registry.targets):
            if target.gone_at is not None and now - target.gone_at >= REMEMBER_SECONDS and not target.uncommitted:
                self.losses.forget(target)
                self.registry.forget(target.incarnation)
        for attempt in list(self.runs.attempts()):
            if attempt.is_quiet(now, REMEMBER_ATTEMPT_SECONDS):
                self.runs.forget(attempt.key)
                self._meters.pop(attempt.key, None)


class RecordSink:
    """Updates the state of the run monitor `monitor` with polled records and with the results of polls."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self.poll_budget = monitor.poll_budget
        self.ordinals: Callable[[int], int] = monitor.ordinals

    def on_answer(self, target: Target) -> None:
        """Record a successful poll of a target.

        A rank is draining while its process waits, before it exits, until its last records are committed. If a draining
        rank has uncommitted records, request an early flush.
        """
        target.liveness.note_sign(self._monitor.clock())
        target.gone_at = None
        if not target.is_dead:
            self._monitor.runs.answered(target.attempt_key, target.registration.rank, target.incarnation)
        if target.health is Health.DRAINING and target.committed < target.cursor:
            self._monitor.batcher.want_flush()

    def on_failure(self, target: Target, error: FetchError) -> None:
        """Record and log a failed poll of a target. A process that reported its exit is gone, if all of it was read."""
        monitor, identity = self._monitor, (target.attempt_key, target.registration.rank, target.incarnation)
        has_all = NOTHING < target.head <= target.cursor and not target.is_dead
        if has_all and error.reason == "refused" and not monitor.runs.is_live(*identity):
            self.on_drained(target)  # its answer to the last poll was lost
            return
        monitor.metrics.count(SCRAPE_FAILURES, 1, error.reason)
        if error.reason == "refused":
            target.liveness.note_refusal(monitor.clock())
        log.info("poll failed: %s", error, extra={"target": target.name, "reason": error.reason})

    def on_drained(self, target: Target) -> None:
        """Stop polling a rank, or the spool of a dead process, because all of its records are read and committed.

        Record that the process has ended. Published records that the spool of a dead process does not contain are
        counted as lost.
        """
        now = self._monitor.clock()
        target.leave(now)
        if not target.is_dead:
            self._monitor.runs.closed(target.attempt_key, target.registration.rank, target.incarnation)
            return
        if target.registration.state == STATE_RUNNING:  # the records were copied while the process was running
            target.liveness.last_sign = math.inf
            return
        drain_orphan(self._monitor.runs, target, now, self._monitor.wall())
        for row in self._monitor.losses.of_unread(
            target, "the process died, and its spool does not contain these records"
        ):
            self._monitor.add_event(row)

    def on_replaced(self, target: Target, incarnation: str) -> None:
        """Record that another process responds at the address of `target`.

        The process of `target` can therefore no longer run at this address.
        """
        target.liveness.note_refusal(self._monitor.clock())
        log.info(
            "another process responds at the address of the target",
            extra={"target": target.name, "incarnation": incarnation},
        )

    def on_body(
        self, target: Target, body: ValidBody, plans: Mapping[str, PlanColumns], *, size: int, inflated: int
    ) -> None:
        """Add the rows of one poll response to the batch, and evaluate its events, tensor hashes and steps.

        The read position of the target advances to the last record of the response. `size` is the number of bytes
        received, `inflated` the number of bytes after decompression.
        """
        monitor = self._monitor
        now, key, rank = monitor.clock(), target.attempt_key, target.registration.rank
        tables = {}
        events, hashes = body.rows_of("events"), body.rows_of("hashes")
        if gaps := monitor.losses.of_body(target, body, events):
            tables["events"] = rows_table("events", gaps)
        if (tensors := monitor.versions.of_tensors(target, plans)) is not None:
            tables["tensors"] = tensors
        first_causes, exits, fired = [], [], {}
        if events:
            exits = exit_reports(events)
            fired = firings(events)
            monitor.stalls.add(key, rank, events, now)
        if events or gaps:
            first_causes = symptoms([*events, *gaps], is_past=target.is_dead)
        monitor.replicas.add(hashes, now)
        monitor.stragglers.add(key, rank, body)
        monitor.rank_scores.add(key, rank, body)
        # No exception may occur from here on: rows in the batch must not be polled again, and cursor and batch must
        # agree.
        monitor.batcher.add_body(body, now)
        monitor.batcher.add(tables, now)
        target.cursor, target.last_ts = body.last, body.last_ts
        target.uncommitted.append((body.last, body.rows))
        monitor.poll_budget.learn(records=body.records, rows=body.rows, size=inflated)
        monitor.metrics.count(RECORDS_INGESTED, body.records)
        monitor.metrics.count(BYTES_INGESTED, size)
        monitor.metrics.fired(key[0], rank, fired)
        if events or gaps:
            monitor.metrics.happened(key[0], latest_events([*events, *gaps]))
        monitor.runs.stepped(key, rank, body.last_step, now, target.incarnation)
        scalars = body.nested.get("scalars")
        monitor.tails.add(body)
        columns, steps = scalars and scalars.columns, None
        if scalars is not None:
            records = scalars.records
            steps = lambda position: body.columns["step"][int(records[position])].as_py()  # noqa: E731 - called here
        monitor.meter(key).observe(rank, columns, body.last_ts, body.last_step, steps)
        for symptom in first_causes:
            monitor.observe(symptom, now)
        for reason, error, at, step in exits:
            monitor.runs.exited(key, rank, reason, error, at=at, step=step, incarnation=target.incarnation)
        if exits:
            monitor.batcher.want_flush()
