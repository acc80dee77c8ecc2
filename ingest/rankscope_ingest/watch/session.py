"""Follow several logs with one store, until all have ended or the caller stops."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from rankscope_ingest.base.background import cancel
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.importers import importers, run_name
from rankscope_ingest.notify.notifiers import Notifier
from rankscope_ingest.runs.text import Place
from rankscope_ingest.watch.address import LogAddress
from rankscope_ingest.watch.files import LocalFile, LogFile, LogUnreadableError
from rankscope_ingest.watch.follower import Follower
from rankscope_ingest.watch.intake import WatchStore
from rankscope_ingest.watch.reports import Reporter
from rankscope_ingest.watch.ssh import RemoteFile, SshHost, load_asyncssh
from rankscope_ingest.watch.watcher import Hooks, LogStatus, LogWatcher, OnChange
from rankscope_storage.api.store import Writer
from rankscope_storage.base.errors import StoreError


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
        self._have_ended = asyncio.Event()

    def changed(self, status: LogStatus) -> None:
        """Pass the changed status of a log on, and note whether all trainings have ended."""
        self._on_change(status)
        if all(status.has_ended for status in self.statuses):
            self._have_ended.set()

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
        tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(watcher.run()) for watcher in self.watchers]
        tasks.append(asyncio.ensure_future(stop.wait()))
        if until_ended:
            tasks.append(asyncio.ensure_future(self._have_ended.wait()))
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
    folder: Path,
    notifiers: Sequence[Notifier] = (),
    *,
    hooks: Hooks | None = None,
    is_alone: bool = True,
    finish_seconds: float = 10.0,
) -> AsyncIterator[WatchSession]:
    """Yield a session that follows the logs in `sections` and writes to the store in `folder` with `writer`.

    At the end, pending rows are stored, and pending messages are sent for at most `finish_seconds`. With `is_alone`,
    no service runs with this store: messages that an earlier process may not have sent are sent at the start, and small
    files of the store are merged. Raises ConfigError for a wrong address.
    """
    hooks = hooks or Hooks()
    logs = check_logs(sections)
    hosts: dict[tuple[str, str | None], SshHost] = {}
    loop, on_commit = asyncio.get_running_loop(), hooks.on_commit
    store = WatchStore(
        folder, writer, compacts=is_alone, on_commit=lambda *commit: loop.call_soon_threadsafe(on_commit, *commit)
    )
    reporter = Reporter(store, notifiers, deliveries=hooks.deliveries, place=Place.of(folder))
    try:
        session = WatchSession(reporter, hooks.on_change)
        own = dataclasses.replace(hooks, on_change=session.changed)
        for section, (address, name) in zip(sections, logs, strict=True):
            file: LogFile = LocalFile(address)
            if address.host is not None:
                host = SshHost(address, section.known_hosts, section.timeout_seconds, hooks.ask, hooks.now)
                file = RemoteFile(address, hosts.setdefault((address.machine, section.known_hosts), host))
            follower = Follower(file, address.copy_in(folder))
            session.watchers.append(
                LogWatcher(section, run=name, file=file, follower=follower, store=store, reporter=reporter, hooks=own)
            )
        for watcher in session.watchers:
            await watcher.begin(sends_again=is_alone)
        yield session
        for watcher in session.watchers:
            await watcher.end()
        await reporter.finish(finish_seconds)
    finally:
        for connected in hosts.values():
            await connected.close()
        await store.close()
