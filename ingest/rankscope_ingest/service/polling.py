"""Targets that the service polls: registered ranks, static targets, and spools of processes that have ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.config import ServiceConfig, StaticTarget
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.detect.record_sink import RecordSink
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.network.dialing import parse_target_url
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.record_channel.loop import Pace, TargetLoop
from rankscope_ingest.record_channel.plans import PlanCache
from rankscope_ingest.recovery.orphan_spools import Spools, SpoolScanner
from rankscope_ingest.runs.target import Health, Target
from rankscope_ingest.targets.pollers import Pollers, watch


class Polling:
    """One loop for each target. Bodies change the state of `monitor`."""

    def __init__(
        self,
        config: ServiceConfig,
        fetcher: Fetcher,
        monitor: RunMonitor,
        watermark: Callable[[str], Awaitable[int]],
    ) -> None:
        """Start each loop behind the committed `watermark` of its process."""
        self._config = config
        self._fetcher = fetcher
        self._monitor = monitor
        self._sink = RecordSink(monitor)
        self._plans = PlanCache()
        self._pace = Pace(
            poll_seconds=config.ingest.poll_seconds,
            max_backoff_seconds=config.ingest.max_backoff_seconds,
            flush_after_seconds=config.ingest.flush_after_seconds,
            targets=lambda: len(self.pollers),
        )
        self.pollers = Pollers(self._loop, watermark)
        self.spools = Spools(config.spool.folders, fetcher)
        self.spool_scanner = SpoolScanner(self.spools, monitor, watermark=watermark, follow=self._follow_at_once)

    @property
    def targets(self) -> Iterable[Target]:
        """Return all targets."""
        return self._monitor.registry.targets

    async def register(self, registration: Registration) -> Target:
        """Accept a registration or heartbeat, and poll the target. Raises RegistrationError."""
        host, _ = parse_target_url(registration.url)
        try:
            addresses = await self._fetcher.resolver.addresses(host)
        except OSError as error:
            raise RegistrationError(400, f"{registration.url}: {host} cannot be resolved: {error}") from error
        return self.pollers.follow(self._monitor.accept(registration, addresses).target)

    def poke(self, incarnation: str) -> bool:
        """Poll a target immediately; return False when it is unknown."""
        if self._monitor.registry.get(incarnation) is None:
            return False
        self.pollers.poke(incarnation)
        return True

    def poll_now(self, run: str, rank: int | None) -> None:
        """Poll a rank of a run immediately, or all its ranks."""
        for target in self.targets:
            registration = target.registration
            if registration.run == run and rank in {None, registration.rank} and target.health is not Health.GONE:
                self.poke(target.incarnation)

    def tasks(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """Return the periodic searches for targets, each with its name."""
        tasks: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            (f"watching {static.url}", functools.partial(self._watch_static, static)) for static in self._config.targets
        ]
        if self._config.spool.folders:
            tasks.append(("reading spools", lambda: self.spool_scanner.run(self._config.spool.scan_seconds)))
        return tasks

    def _watch_static(self, static: StaticTarget) -> Coroutine[Any, Any, None]:
        return watch(static, self._fetcher, self._accept_static, poll_seconds=self._config.ingest.poll_seconds)

    def _accept_static(self, registration: Registration) -> Target:
        return self.pollers.follow(self._monitor.accept(registration, ()).target)

    def _follow_at_once(self, target: Target) -> None:
        self.pollers.follow(target)
        self.poke(target.incarnation)

    def _loop(self, target: Target) -> TargetLoop:
        return TargetLoop(target, self.spools, self._plans, self._sink, self._pace, clock=time.monotonic)
