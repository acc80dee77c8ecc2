"""Follow one log: read it, import it, and report the changes of its condition."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import tenacity

from rankscope_contract.model.events import RunState, Severity
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import unkept_notes
from rankscope_ingest.importers.common.log_identity import has_equal_beginning, stored_path
from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.runs.incident import MUTED, OPENED, RESOLVED, Incident
from rankscope_ingest.watch.anomalies import LogAnomalies
from rankscope_ingest.watch.files import FileState, LogFile, LogUnreadableError, RemoteClock
from rankscope_ingest.watch.follower import Follower, Part
from rankscope_ingest.watch.intake import FOLLOWED, UNFOLLOWED, LogIntake, OnCommit, WatchStore
from rankscope_ingest.watch.judge import ENDS, Condition, Facts, Verdict, judge
from rankscope_ingest.watch.reports import RULES, Reporter, condition_incident, log_report, unreadable_incident
from rankscope_ingest.watch.rows import LogRows
from rankscope_ingest.watch.ssh import Ask, UntrustedHostError
from rankscope_storage.base.errors import ShardLostError, StoreError
from rankscope_storage.base.rule_names import LOG_UNREADABLE, RUN_FAILED, RUN_FINISHED, RUN_STOPPED, SLOW_STEPS

log = logging.getLogger(__name__)

SETTLED_BYTES: Final = 1 << 16
"""Size of a log from which its format and its step do not change when the log grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """The condition of a followed log, for the display."""

    address: str
    run: str
    condition: Condition
    reason: str
    step: int | None = None
    planned_steps: int | None = None
    silence: float | None = None
    """Seconds since the last row."""
    values: int = 0
    """Number of values and events that this process has added to the store."""
    clock: str = ""
    unreadable: str | None = None
    """Reason why the log cannot be read; None if it can be read."""
    worst: str | None = None
    """Severity of the worst open incident of an anomaly; None without one."""

    @property
    def state(self) -> str:
        """Return the condition of the training, or `unreadable`."""
        return "unreadable" if self.unreadable else self.condition.value

    @property
    def is_normal(self) -> bool:
        """Return whether the log can be read, and the training is undisturbed and has no open incident."""
        normal = {Condition.WAITING, Condition.TRAINING, Condition.FINISHED}
        return self.unreadable is None and self.worst is None and self.condition in normal

    @property
    def has_ended(self) -> bool:
        """Return whether the training has ended according to the log."""
        return self.condition in ENDS.values()


OnChange = Callable[[LogStatus], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that a session calls, the counters of its notifications, and its sources of time."""

    on_change: OnChange = lambda _: None
    on_commit: OnCommit = lambda *_: None
    deliveries: Deliveries | None = None
    ask: Ask | None = None
    now: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class LogWatcher:
    """Follows one log. `poll` reads it once, `run` polls it until it is cancelled."""

    def __init__(
        self,
        section: WatchSection,
        *,
        run: str,
        file: LogFile,
        follower: Follower,
        store: WatchStore,
        reporter: Reporter,
        hooks: Hooks,
    ) -> None:
        self._section = section
        self.run_name = run
        self._file = file
        self._address = str(file.address)
        self._follower = follower
        self._store = store
        self._reporter = reporter
        self._intake = LogIntake(store, run, section)
        self.hooks = hooks
        self._rows = LogRows()
        self._clock = RemoteClock()
        self._open: dict[str, Incident] = {}
        self._incidents = LogAnomalies(run, self._address)
        self._unreported: list[Incident] = []  # of anomalies
        self._unreadable_since: float | None = None
        self._began_at = hooks.now()
        self._seen_at: float | None = None  # time at which the log was first seen with content
        self._imported: FileState | None = None
        self._refusal: str | None = None  # reason why the present content of the log cannot be imported
        self._values_stored = 0
        self._unkept: set[str] = set()  # names that were printed
        self.status = LogStatus(
            address=self._address, run=run, condition=Condition.WAITING, reason="the log was not read yet"
        )

    async def begin(self, *, sends_again: bool) -> None:
        """Read the incidents and the state that an earlier process has stored.

        With `sends_again`, messages that the earlier process may not have sent are sent now.
        """
        await self._store.run(self._intake.restore)
        for incident, state in await self._store.run(lambda: self._store.incidents_of(self.run_name)):
            self._reporter.remember(incident)
            if incident.log is None or incident.log.address != self._address:
                continue
            incident.is_muted = state == MUTED
            if sends_again and state == OPENED:
                self._reporter.send_again(incident)
            if incident.first.op is not None:  # of anomalies, not of a condition
                self._incidents.restore(incident, is_open=state != RESOLVED)
            elif state != RESOLVED:
                if (earlier := self._open.get(incident.first.rule)) is not None:
                    self._incidents.restore(earlier, is_open=True)
                self._open[incident.first.rule] = incident

    async def run(self) -> None:
        """Poll the log until this coroutine is cancelled. After an error, the pauses become longer."""
        wait = tenacity.wait_random_exponential(multiplier=1.0, max=self._section.max_backoff_seconds)
        while True:
            retry = tenacity.retry_if_exception_type(Exception) & tenacity.retry_if_not_exception_type(ShardLostError)
            await tenacity.AsyncRetrying(retry=retry, wait=wait, sleep=self.hooks.sleep)(self.poll)
            await self.hooks.sleep(self._section.poll_seconds)

    async def poll(self) -> None:
        """Read and import the new part of the log, and report a change of its condition.

        Raises LogUnreadableError if the log cannot be read; this is reported, too. Raises StoreError if the rows cannot
        be stored; the next call stores them.
        """
        now = self.hooks.now()
        part: Part | None = None
        try:
            async for part in self._follower.parts(self._store.known.get(self.run_name, [])):
                await self._take(part, now)
            self._clock.set(await self._file.clock())
            self._can_read()
            if part is not None and (self._imported == part.state or not part.state.size):
                await self._judge(part.state, now)
        except LogUnreadableError as error:
            self._cannot_read(error, now)
            raise
        except ShardLostError:
            raise
        except Exception as error:
            self._cannot_import(error)
            raise
        self._reporter.announce_due(now)

    async def end(self) -> None:
        """Store that the log is no longer followed, unless the log contains the end of the run."""
        self._resolve(RunState.STOPPED)
        await self._store.run(lambda: self._intake.write_state(RunState.STOPPED, UNFOLLOWED, at_once=True))

    async def _take(self, part: Part, now: float) -> None:
        """Import a part of the log if it has new bytes, and add its rows."""
        if part.note is not None:
            log.warning("%s: %s", self._address, part.note)
        if part.has_grown and self._imported is not None:
            self._clock.observe_change(part.state.modified, now)
        if not part.is_old and (self._imported == part.state or not self._is_due(part, now)):
            return
        try:
            is_first = self._intake.incarnation is None
            report = await self._store.run(lambda: self._intake.import_file(part.path))
        except IngestError as error:
            self._refusal = str(error)
            self._imported = self._imported if part.is_old else part.state
            return
        self._refusal = None
        self._values_stored += report.rows_stored
        for text in unkept_notes([name for name in report.unkept if name not in self._unkept]):
            log.warning("%s: %s", self.run_name, text)
        self._unkept.update(report.unkept)
        is_live, attempt = self._imported is not None, self._rows.attempt
        added = await self._add_rows(
            None if is_first else part.state.modified, has_anomalies=is_first or report.anomalies > 0
        )
        last = self._rows.last
        if is_live and added and last is not None and last.written is not None and not part.is_old:
            self._clock.observe_row(last.written, part.state.modified)
        if not part.is_old:
            self._imported = part.state
        # A log that has just begun is first imported when it is settled.
        if self._rows.attempt > attempt and (is_live or now > (self._seen_at or now)):
            self._report_restart(now)
            step = next((row.step for row in self._rows.rows), None)
            log.warning(
                "%s: training was started again as attempt %d, step %s", self.run_name, self._rows.attempt, step
            )

    async def _add_rows(self, modified: float | None, *, has_anomalies: bool) -> int:
        """Add the new rows and anomalies in the store, and return the number of the rows."""
        if (stream := self._intake.stream) is None:
            return 0
        rows, seq = self._rows, self._rows.last_seq(stream)
        scalars, events = await self._store.run(lambda: self._store.recent(self.run_name, stream, seq))
        added = rows.add(scalars, events, modified)
        if has_anomalies:
            reported = self._incidents.last_seqs.get(stream, -1)
            anomalies = await self._store.run(lambda: self._store.anomalies(self.run_name, stream, reported))
            steps = [row.step for row in rows.rows if row.step is not None]
            stride = max(1, (steps[-1] - steps[0]) // (len(steps) - 1)) if len(steps) > 1 else 1
            self._unreported += self._incidents.observe(anomalies, time.monotonic(), stride=stride)
        return added

    def _report_restart(self, now: float) -> None:
        """Report the failure of the attempt before the present one, unless the log showed it before the restart."""
        if (before := self._intake.failed_before) is None or RUN_FAILED in self._open:
            return
        verdict, number = Verdict(condition=Condition.FAILED, reason=before["reason"]), before["attempt"]
        found = condition_incident(verdict, self._rows, run=self.run_name, address=self._address, attempt=number)
        if found is not None:
            log.critical("%s: failed at step %s: %s", self.run_name, found.first.step, verdict.reason)
            self._open[RUN_FAILED] = found  # the next verdict resolves it
            self._announce(found, now, wait_seconds=0.0)

    def _is_due(self, part: Part, now: float) -> bool:
        """Return whether the log must be imported now.

        A log that has just begun waits: the format and the step are decided with its first import.
        """
        state = part.state
        if not state.size:
            return False
        known = (log for log in self._store.known.get(self.run_name, ()) if log.path == stored_path(part.path))
        self._seen_at = now if self._seen_at is None else self._seen_at
        return (
            self._imported is not None
            or self._intake.incarnation is not None
            or state.size >= SETTLED_BYTES
            or now - self._seen_at >= self._section.settle_seconds
            or any(has_equal_beginning(part.path, log.marks) for log in known)  # by an earlier process
            or self._clock.now(now) - state.modified >= self._section.settle_seconds
        )

    async def _judge(self, state: FileState, now: float) -> None:
        last, remote = self._rows.last, self._clock.now(now)
        modified = self._rows.arrived_at or state.modified
        if last is None:
            silence = now - self._began_at
        else:
            moment = modified if last.written is None else self._clock.moment(last.written, modified)
            silence = max(0.0, remote - moment)
        slow = self._open.get(RULES[Condition.SLOW][0])
        facts = Facts(
            silence=silence,
            quiet=float("inf") if self.status.has_ended else remote - state.modified,
            clock=self._clock.source,
            ending=self._intake.ending,
            slow_since=None if slow is None else slow.first.baseline,
        )
        verdict = judge(self._rows, facts, self._section)
        if verdict.condition is Condition.WAITING and self._refusal is not None:
            verdict = dataclasses.replace(verdict, reason=self._refusal)
        if verdict.condition is not Condition.FINISHED:
            self._report(verdict, now)
        self._report_anomalies(now)
        self._resolve(next((state for state, end in ENDS.items() if end is verdict.condition), RunState.RUNNING))
        shown = self._incidents.with_open(verdict)
        if verdict.condition is Condition.FINISHED:
            self._report(shown, now)
        run_state = RunState.STALLED if verdict.condition is Condition.STALLED else RunState.RUNNING
        reason = verdict.reason if run_state is RunState.STALLED else FOLLOWED
        await self._store.run(lambda: self._intake.write_state(run_state, reason))
        self._set(
            condition=verdict.condition,
            reason=shown.reason,
            silence=None if last is None else silence,
            worst=shown.severity,
        )

    def _report(self, verdict: Verdict, now: float) -> None:
        """Announce the incident of a new condition, and resolve the incidents of conditions that are over."""
        rule = RULES[verdict.condition][0] if verdict.condition in RULES else None
        for known, incident in list(self._open.items()):
            # A stall does not end slow steps: no further step shows that they are over.
            is_kept = known in {rule, LOG_UNREADABLE} or (
                verdict.condition is Condition.STALLED and known == RULES[Condition.SLOW][0]
            )
            if not is_kept:
                del self._open[known]
                if known != RUN_FINISHED:
                    self._reporter.resolve(incident, has_continued=verdict.condition not in ENDS.values())
        if rule is None or rule in self._open:
            return
        found = condition_incident(verdict, self._rows, run=self.run_name, address=self._address)
        if found is not None:
            self._open[rule] = found
            self._announce(found, now)

    def _report_anomalies(self, now: float) -> None:
        """Print and announce the incidents of new anomalies; only store slow steps that are reported as RunSlow."""
        unreported, self._unreported = self._unreported, []
        for incident in unreported:
            incident.is_muted |= incident.first.rule == SLOW_STEPS and RULES[Condition.SLOW][0] in self._open
            self._announce(incident, now)

    def _resolve(self, state: RunState) -> None:
        """Resolve, without a message, anomalies and failures of earlier attempts whose cause is gone."""
        for known in (RUN_FAILED, RUN_STOPPED):
            if known in self._open and self._open[known].first.attempt < self._rows.attempt:
                self._incidents.restore(self._open.pop(known), is_open=True)
        for incident in self._incidents.resolved(self._rows.last_steps, state):
            self._reporter.resolve(incident, has_continued=False)

    def _announce(self, incident: Incident, now: float, *, wait_seconds: float | None = None) -> None:
        incident.log = log_report(self._rows, incident.first, self._section.message_rows, self._intake.planned_steps)
        machine = self._file.address.machine
        wait = self._section.poll_seconds if wait_seconds is None else wait_seconds
        self._reporter.announce(incident, machine, now, wait_seconds=wait)

    def _cannot_read(self, error: LogUnreadableError, now: float) -> None:
        self._unreadable_since = now if self._unreadable_since is None else self._unreadable_since
        is_untrusted = isinstance(error, UntrustedHostError)
        is_due = is_untrusted or now - self._unreadable_since >= self._section.unreadable_after_seconds
        if is_due and LOG_UNREADABLE not in self._open:
            incident = unreadable_incident(
                str(error),
                run=self.run_name,
                attempt=self._rows.attempt,
                address=self._address,
                since=self._unreadable_since,
                severity=Severity.CRITICAL if is_untrusted else Severity.WARNING,
            )
            self._open[LOG_UNREADABLE] = incident
            self._announce(incident, now)
        self._reporter.announce_due(now)
        self._set(unreadable=str(error))

    def _cannot_import(self, error: Exception) -> None:
        """Display an error of the store or an unexpected error. The next poll imports the same bytes again."""
        if not isinstance(error, StoreError):
            log.error("unexpected error in following %s, retrying", self._address, exc_info=error)
        self._intake.incarnation = self._imported = None
        self._set(unreadable=f"{'the store' if isinstance(error, StoreError) else 'unexpected error'}: {error}")

    def _can_read(self) -> None:
        if self.status.unreadable is None and LOG_UNREADABLE not in self._open:
            return
        self._unreadable_since = None
        self._set(unreadable=None)
        if incident := self._open.pop(LOG_UNREADABLE, None):
            self._reporter.resolve(incident, has_continued=True)

    def _set(self, **changes: Any) -> None:
        last = self._rows.last
        self.status = dataclasses.replace(
            self.status,
            step=None if last is None else last.step,
            planned_steps=self._intake.planned_steps,
            values=self._values_stored,
            clock=self._clock.source,
            **changes,
        )
        self.hooks.on_change(self.status)
