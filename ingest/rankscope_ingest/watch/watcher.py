"""Follow several logs with one store: read and import them, and report the changes of their conditions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tenacity

from rankscope_contract.model.events import RunState
from rankscope_ingest.base.background import cancel, start_task
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.base.errors import ConfigError, IngestError
from rankscope_ingest.importers import importers, run_name
from rankscope_ingest.importers.common.importer import unkept_notes
from rankscope_ingest.importers.common.log_identity import stored_path
from rankscope_ingest.notify.announcer import Deliveries, Notifier
from rankscope_ingest.pipeline.maintenance_schedule import MaintenanceSchedule
from rankscope_ingest.runs.text import Place
from rankscope_ingest.watch.files import (
    FileState,
    Follower,
    LocalFile,
    LogAddress,
    LogFile,
    LogUnreadableError,
    MachineClock,
    Part,
)
from rankscope_ingest.watch.intake import FOLLOWED, UNFOLLOWED, LogIntake, OnCommit, WatchStore
from rankscope_ingest.watch.judge import ENDS, Condition, LogRows, judge
from rankscope_ingest.watch.reports import LogIncidents, Reporter
from rankscope_ingest.watch.ssh import Ask, RemoteFile, SshHost, load_asyncssh
from rankscope_storage.api.store import Writer
from rankscope_storage.base.errors import ShardLostError, StoreError
from rankscope_storage.base.location import Location

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
        store: WatchStore,
        reporter: Reporter,
        hooks: Hooks,
    ) -> None:
        self._section = section
        self.run_name = run
        self._file = file
        self._address = str(file.address)
        self._follower = Follower(file, file.address.copy_in(store.folder))
        self._store = store
        self._intake = LogIntake(store, run, section)
        self.hooks = hooks
        self._rows = LogRows()
        self._clock = MachineClock()
        self._incidents = LogIncidents(self._intake, file.address, self._rows, reporter, section)
        self._announce_due = reporter.announce_due
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
            self._incidents.report_readable()
            if self.status.unreadable is not None:
                self._set(unreadable=None)
            if part is not None and (self._imported == part.state or not part.state.size):
                await self._judge(part.state, now)
        except LogUnreadableError as error:
            self._incidents.report_unreadable(error, now)
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
        is_live = self._imported is not None
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
        if (stream := self._intake.stream) is not None:
            seq = self._rows.last_seqs.get(stream, -1)
            scalars, events = await self._store.run(lambda: self._store.recent(self.run_name, stream, seq))
            self._rows.add(stream, scalars, events, part.state.modified)
            self._incidents.observe(events, time.monotonic())
        # A log that has just begun is first imported when it is settled.
        if self._rows.attempt > attempt and (is_live or now > (self._seen_at or now)):
            if (before := self._intake.failed_before) is not None:
                self._incidents.report_restart(before["reason"], before["attempt"], now)
            step = next((row.step for row in self._rows.rows), None)
            log.warning(
                "%s: training was started again as attempt %d, step %s", self.run_name, self._rows.attempt, step
            )

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


def check_logs(sections: Sequence[WatchSection]) -> list[tuple[LogAddress, str]]:
    """Return the address and the name of the run of each log.

    Raises ConfigError if an address or a format is wrong, if two logs without a name would get the same one from the
    names of their files, or if asyncssh is needed and not installed.
    """
    addresses = [LogAddress.parse(section.log) for section in sections]
    names = [section.run or run_name(Path(address.path)) for section, address in zip(sections, addresses, strict=True)]
    known = importers()
    for section, name in zip(sections, names, strict=True):
        if section.run is None and names.count(name) > 1:
            raise ConfigError(
                f"several logs would be stored as the run {name!r}: give each log the name of its run, or all logs of "
                "one training the same name"
            )
        if section.format != "auto" and section.format not in known:
            raise ConfigError(f"unknown format {section.format!r}; known formats: {', '.join(sorted(known))}")
    if len(set(map(str, addresses))) < len(addresses):
        raise ConfigError("a log is listed twice: remove one of the entries")
    if any(address.host is not None for address in addresses):
        load_asyncssh()
    return list(zip(addresses, names, strict=True))


class WatchSession:
    """Several followed logs. Use it with `watching`."""

    def __init__(self, reporter: Reporter, on_change: OnChange) -> None:
        self._reporter = reporter
        self.watchers: list[LogWatcher] = []
        self._on_change = on_change
        self._all_ended = asyncio.Event()

    def changed(self, status: LogStatus) -> None:
        """Pass the changed status of a log on, and note whether all trainings have ended."""
        self._on_change(status)
        if all(status.has_ended for status in self.statuses):
            self._all_ended.set()

    @property
    def statuses(self) -> list[LogStatus]:
        """Return the present status of each log."""
        return [watcher.status for watcher in self.watchers]

    async def poll(self) -> None:
        """Read each log once, and wait until the messages about it are sent.

        A log that cannot be read is reported and does not stop the others.
        """
        await asyncio.gather(*(self._poll(watcher) for watcher in self.watchers))
        await self._reporter.sent()

    async def _poll(self, watcher: LogWatcher) -> None:
        with contextlib.suppress(LogUnreadableError, StoreError):  # its status has the reason
            await watcher.poll()

    async def run(self, stop: asyncio.Event, *, until_ended: bool = False) -> None:
        """Follow all logs until `stop` is set; with `until_ended`, also until each training has ended."""
        ends = (stop, self._all_ended) if until_ended else (stop,)
        waits = [*(watcher.run() for watcher in self.watchers), *(event.wait() for event in ends)]
        tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(wait) for wait in waits]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel(tasks)


@contextlib.asynccontextmanager
async def watching(
    sections: Sequence[WatchSection],
    writer: Writer,
    folder: Location,
    notifiers: Sequence[Notifier] = (),
    *,
    hooks: Hooks | None = None,
    is_alone: bool = True,
    finish_seconds: float = 10.0,
) -> AsyncIterator[WatchSession]:
    """Yield a session that follows the logs in `sections` and writes to the store in `folder` with `writer`.

    At the end, pending rows are stored, and pending messages are sent for at most `finish_seconds`. With `is_alone`,
    no service runs with this store: messages that an earlier process may not have sent are sent at the start, and the
    store is maintained. Raises ConfigError for a wrong address.
    """
    hooks = hooks or Hooks()
    logs = check_logs(sections)
    hosts: dict[tuple[str, str | None], SshHost] = {}
    loop, on_commit = asyncio.get_running_loop(), hooks.on_commit
    store = WatchStore(folder, writer, lambda *commit: loop.call_soon_threadsafe(on_commit, *commit))
    reporter = Reporter(store, notifiers, deliveries=hooks.deliveries, place=Place.of(folder))
    schedule = MaintenanceSchedule(writer, time.monotonic())
    upkeep = [start_task("maintenance of the store", lambda: schedule.run(lambda: store.commits))] if is_alone else []
    try:
        session = WatchSession(reporter, hooks.on_change)
        own = dataclasses.replace(hooks, on_change=session.changed)
        for section, (address, name) in zip(sections, logs, strict=True):
            file: LogFile = LocalFile(address)
            if address.host is not None:
                host = SshHost(address, section.known_hosts, section.timeout_seconds, hooks.ask, hooks.now)
                file = RemoteFile(address, hosts.setdefault((address.machine, section.known_hosts), host))
            session.watchers.append(LogWatcher(section, run=name, file=file, store=store, reporter=reporter, hooks=own))
        for watcher in session.watchers:
            await watcher.begin(sends_again=is_alone)
        yield session
        for watcher in session.watchers:
            await watcher.end()
        await reporter.finish(finish_seconds)
    finally:
        await cancel(upkeep)
        for connected in hosts.values():
            await connected.close()
        await store.close()
