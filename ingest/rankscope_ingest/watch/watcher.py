"""Follow one log: read it, import it, and report the changes of its condition."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tenacity

from rankscope_contract.model.events import RunState
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import unkept_notes
from rankscope_ingest.importers.common.log_identity import stored_path
from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.watch.files import FileState, LogFile, LogUnreadableError, MachineClock
from rankscope_ingest.watch.follower import Follower, Part
from rankscope_ingest.watch.intake import FOLLOWED, UNFOLLOWED, LogIntake, OnCommit, WatchStore
from rankscope_ingest.watch.judge import ENDS, Condition, LogRows, judge
from rankscope_ingest.watch.reports import LogIncidents, Reporter
from rankscope_ingest.watch.ssh import Ask
from rankscope_storage.base.errors import ShardLostError, StoreError

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
    """Functions that a session calls, the counters of its notifications, and its clock."""

    on_change: OnChange = lambda _: None
    on_commit: OnCommit = lambda *_: None
    deliveries: Deliveries | None = None
    ask: Ask | None = None
    now: Callable[[], float] = time.time


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
        self._intake = LogIntake(store, run, section)
        self.hooks = hooks
        self._rows = LogRows()
        self._clock = MachineClock()
        self._incidents = LogIncidents(self._intake, file.address, self._rows, reporter, section)
        self._announce_due = reporter.announce_due
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
        stored = await self._store.run(lambda: self._store.incidents_of(self.run_name))
        self._incidents.restore(stored, sends_again=sends_again)

    async def run(self) -> None:
        """Poll the log until this coroutine is cancelled. After an error, the pauses become longer."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_not_exception_type((ShardLostError, asyncio.CancelledError)),
            wait=tenacity.wait_random_exponential(multiplier=1.0, max=self._section.max_backoff_seconds),
        )
        while True:
            await retrying(self.poll)
            await asyncio.sleep(self._section.poll_seconds)

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
            self._clock = await self._file.clock() or self._clock
            self._can_read()
            if part is not None and (self._imported == part.state or not part.state.size):
                await self._judge(part.state, now)
        except LogUnreadableError as error:
            self._unreadable_since = now if self._unreadable_since is None else self._unreadable_since
            self._incidents.report_unreadable(error, self._unreadable_since, now)
            self._set(unreadable=str(error))
            raise
        except ShardLostError:
            raise
        except Exception as error:
            self._cannot_import(error)
            raise
        finally:
            self._announce_due(now)

    async def end(self) -> None:
        """Store that the log is no longer followed, unless the log contains the end of the run."""
        self._incidents.resolve(RunState.STOPPED)
        await self._store.run(lambda: self._intake.write_state(RunState.STOPPED, UNFOLLOWED, at_once=True))

    async def _take(self, part: Part, now: float) -> None:
        """Import a part of the log if it has new bytes, and add its rows."""
        if part.note is not None:
            log.warning("%s: %s", self._address, part.note)
        is_live, is_first = self._imported is not None, self._intake.incarnation is None
        if part.has_grown and is_live:
            self._clock = self._clock.after_change(part.state.modified, now)
        if not part.is_old and (self._imported == part.state or not self._is_due(part, now)):
            return
        report = None
        try:
            report = await self._store.run(lambda: self._intake.import_file(part.path))
            self._refusal = None
        except IngestError as error:
            self._refusal = str(error)
        if not part.is_old:
            self._imported = part.state
        if report is None:
            return
        self._values_stored += report.rows_stored
        for text in unkept_notes([name for name in report.unkept if name not in self._unkept]):
            log.warning("%s: %s", self.run_name, text)
        self._unkept.update(report.unkept)
        attempt = self._rows.attempt
        await self._add_rows(None if is_first else part.state.modified, has_anomalies=is_first or report.anomalies > 0)
        # A log that has just begun is first imported when it is settled.
        if self._rows.attempt > attempt and (is_live or now > (self._seen_at or now)):
            if (before := self._intake.failed_before) is not None:
                self._incidents.report_restart(before["reason"], before["attempt"], now)
            step = next((row.step for row in self._rows.rows), None)
            log.warning(
                "%s: training was started again as attempt %d, step %s", self.run_name, self._rows.attempt, step
            )

    async def _add_rows(self, modified: float | None, *, has_anomalies: bool) -> None:
        """Add the new rows and anomalies in the store."""
        if (stream := self._intake.stream) is None:
            return
        store, run, incidents = self._store, self.run_name, self._incidents
        seq = self._rows.last_seqs.get(stream, -1)
        scalars, events = await store.run(lambda: store.recent(run, stream, seq))
        self._rows.add(stream, scalars, events, modified)
        if has_anomalies:
            reported = incidents.last_seqs.get(stream, -1)
            anomalies = await store.run(lambda: store.anomalies(run, stream, reported))
            incidents.observe(anomalies, time.monotonic())

    def _is_due(self, part: Part, now: float) -> bool:
        """Return whether the log must be imported now.

        A log that has just begun waits: the format and the step are decided with its first import.
        """
        if not part.state.size:
            return False
        self._seen_at = now if self._seen_at is None else self._seen_at
        age = max(now - self._seen_at, now + self._clock.offset_seconds - part.state.modified)
        path = Path(stored_path(part.path))
        parts = [Path(log.path) for log in self._store.known.get(self.run_name, ())]  # of the log, also rotated ones
        return (
            age >= self._section.settle_seconds
            or part.state.size >= SETTLED_BYTES
            or any(path.parent in one.parents and one.name.startswith(path.name) for one in parts)
        )

    async def _judge(self, state: FileState, now: float) -> None:
        last, remote = self._rows.last, now + self._clock.offset_seconds
        silence = now - self._began_at
        if last is not None:
            modified = self._rows.arrived_at or state.modified
            silence = max(0.0, remote - self._clock.moment(last.written, modified))
        verdict = judge(
            self._rows,
            self._section,
            silence=silence,
            # Lines of the next start do not revoke an end.
            quiet=math.inf if self.status.has_ended else remote - state.modified,
            clock=self._clock.source,
            ending=self._intake.ending,
            slow_since=self._incidents.slow_since,
        )
        if verdict.condition is Condition.WAITING and self._refusal is not None:
            verdict = dataclasses.replace(verdict, reason=self._refusal)
        shown = self._incidents.report(verdict, now)
        is_stalled = verdict.condition is Condition.STALLED
        current = (RunState.STALLED, verdict.reason) if is_stalled else (RunState.RUNNING, FOLLOWED)
        await self._store.run(lambda: self._intake.write_state(*current))
        self._set(
            condition=verdict.condition,
            reason=shown.reason,
            silence=None if last is None else silence,
            worst=shown.severity,
        )

    def _cannot_import(self, error: Exception) -> None:
        """Display an error of the store or an unexpected error. The next poll imports the same bytes again."""
        if not isinstance(error, StoreError):
            log.error("unexpected error in following %s, retrying", self._address, exc_info=error)
        self._intake.incarnation = self._imported = None
        self._set(unreadable=f"{'the store' if isinstance(error, StoreError) else 'unexpected error'}: {error}")

    def _can_read(self) -> None:
        self._unreadable_since = None
        self._incidents.report_readable()
        if self.status.unreadable is not None:
            self._set(unreadable=None)

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
