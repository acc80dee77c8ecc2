"""Publishes the records of a rank and serves them over HTTP until the session ends.

The module creates the ring, the spool, the metrics page, the HTTP server and the registration. `routes` answers the
requests, and `registration` sends the heartbeats. This module measures nothing.

Find jumps of the wall clock between the records of one process, and correct later times by them.

A clock jumps if a person or NTP sets it. The stored times of records are those of the clock. Figures that are derived
from them, such as tokens per second, subtract the offset of the record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from rankscope_contract import __version__
from rankscope_contract.model.clock_jump import JUMP_MICROSECONDS, jump_details, jump_message
from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.identity import Identity
from rankscope_contract.rules.base import AnomalyRule
from rankscope_contract.wire.channel import Registration, RegistrationReply
from rankscope_contract.wire.spool.reader import service_name
from rankscope_exporter.process.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish.exposition import ExporterStats, Exposition
from rankscope_exporter.publish.http_server import HttpServer, open_server
from rankscope_exporter.publish.latest_values import LatestValues
from rankscope_exporter.publish.orphan_recovery import OrphanRecovery
from rankscope_exporter.publish.rank_state import RankServerSources, RankState
from rankscope_exporter.publish.registration import DiscoveryFile, RegistrationLoop, service_client
from rankscope_exporter.publish.ring import Ring, encode
from rankscope_exporter.publish.routes import Routes
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_exporter.publish.spool import spool_of
from rankscope_exporter.records.record import StepRecord, monotonic_microseconds, now_microseconds


class ClockWatch:
    """Wall clock of one process, compared with its monotonic clock. Not thread-safe.

    Records may arrive out of order, because several threads publish. The sum of the jumps applies to all records after
    the event that names it. A record from before a jump that arrives after this event therefore gets the time that the
    clock would have shown if it had been set already.
    """

    def __init__(self, ts: int, monotonic: int) -> None:
        """The offset is 0 for records of the time `ts`. Both times are read together, in microseconds."""
        self._apart = ts - monotonic
        self._newest = monotonic
        self._offset = 0

    def corrected(self, record: StepRecord) -> StepRecord:
        """Return `record` with the offset of its time, and with an event if the clock has jumped before it."""
        ts, events, jump = record.ts, record.events, 0
        if record.monotonic is not None:
            apart = ts - record.monotonic
            jump = apart - self._apart if abs(apart - self._apart) > JUMP_MICROSECONDS else 0
            if record.monotonic >= self._newest:
                self._apart, self._newest = apart, record.monotonic
                self._offset += jump
                events = [*events, _jump_event(jump, self._offset)] if jump else events
            elif jump:
                ts = record.monotonic + self._apart
        if not self._offset and events is record.events:
            return record
        return dataclasses.replace(record, ts=ts, clock_offset=self._offset, events=events)


def _jump_event(jump: int, offset: int) -> Event:
    return Event(
        type=EventType.CLOCK,
        severity=Severity.WARNING,
        value=jump / 1e6,
        message=jump_message(jump, owner="host", remark="figures are corrected by it"),
        details=json.dumps(jump_details(jump) | {"offset_us": offset}, sort_keys=True),
    )


T = TypeVar("T")

_URGENT: Final = (EventType.ANOMALY, EventType.EXIT, EventType.HANG, EventType.STACKS, EventType.FLIGHT_RECORD)
"""Types of events after which the rank asks the service for an immediate poll."""
_INERT: Final = -1
"""Sequence number that `publish` returns in a forked child, which has no server."""


class RankServer:
    """Keeps the records of one process and serves them over HTTP. Has no socket and no thread before `start()`."""

    def __init__(
        self,
        identity: Identity,
        config: ServeConfig,
        *,
        rules: Sequence[AnomalyRule],
        settings: Mapping[str, Any],
        planned_steps: int | None,
        on_fault: Callable[[str, BaseException], None],
        overhead: Callable[[], Mapping[str, float]],
        dropped: Callable[[], Mapping[str, int]],
        faults: Callable[[], int],
        on_registered: Callable[[int], None] = lambda _: None,
        sources: RankServerSources | None = None,
    ) -> None:
        """`overhead`, `dropped` and `faults` are functions that return statistics for the metrics page.

        The statistics are the CPU seconds, the dropped records and the errors of other components of the monitor.
        `on_registered` is called on the registration thread, with the number of the attempt, when the service has
        accepted this rank for the first time.
        """
        self.state = RankState(identity.incarnation)
        self.service_url = config.ingest_url
        self.url: str | None = None
        self._identity = identity
        self._config = config
        self._meter = CpuMeter()
        self.spool = spool_of(config, identity.incarnation, self._describe, on_fault=on_fault, meter=self._meter)
        self.orphans: OrphanRecovery | None = None
        is_kept = None if self.spool is None else self.spool.holds
        self.ring = Ring(config.ring_records, config.ring_bytes, is_kept=is_kept)
        # Converted here to the form that a JSON reader gets: values without a JSON form become text on this thread.
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str), parse_constant=str)
        self._planned_steps = planned_steps
        self._on_fault, self._on_registered = on_fault, on_registered
        self._overhead, self._dropped, self._faults = overhead, dropped, faults
        self._sources = RankServerSources() if sources is None else sources
        self._latest = LatestValues(rules)
        self.exposition = Exposition(
            identity,
            self._latest,
            self._stats,
            rules=rules,
            series_budget=config.series_budget,
            all_ops=config.page_ops == "all",
            planned_steps=planned_steps,
            device=str(settings.get("device", "")),
        )
        self._started_at = now_microseconds()
        self._clock = ClockWatch(self._started_at, monotonic_microseconds())
        self._publishing = threading.Lock()
        self._server: HttpServer | None = None
        self._registration: RegistrationLoop | None = None
        self._abandoned = False
        self._parts = contextlib.ExitStack()  # closes all parts in reverse order, then raises the first error
        if self.spool is not None:
            self._parts.callback(self.spool.close)

    def start(self) -> str:
        """Start the server and the registration, and return the URL of this rank for other machines. Raises ServeError.

        An error of the spools of dead processes is reported and not raised, because they are optional.
        """
        if self._server is not None or self.state.is_closed:
            raise ServeError("this server was started before: create a new one")
        config = self._config
        client = service_client(config)
        if self.spool is not None and client is not None and config.ingest_url is not None:
            service, own = service_name(config.ingest_url), self._identity.incarnation
            self.orphans = OrphanRecovery(
                self.spool.root, own, client, lambda: self.url, service=service, on_fault=self._on_fault
            )
            self._parts.callback(self.orphans.stop)
        routes = Routes(
            state=self.state,
            ring=self.ring,
            spool=self.spool,
            orphans=self.orphans,
            sources=self._sources,
            exposition=self.exposition,
            settings=self._settings,
            token=config.secret,
            is_guarded=config.is_guarded,
            on_poll=self._on_poll,
        )
        self._server = open_server(config, routes, on_fault=self._on_fault, meter=self._meter)
        self._parts.callback(self._server.stop)
        address = config.advertised(self._server.port, self._identity.host)
        self.url = f"{config.scheme}://{address}"
        if config.discovery_dir is not None and config.ingest_url is None:
            discovery = DiscoveryFile(config.discovery_dir, self._identity)
            self._parts.callback(discovery.remove)
            try:
                discovery.write(str(address), config.scheme)
            except ServeError:
                self.close()
                raise
        self._server.start()
        if client is not None:
            self._registration = RegistrationLoop(
                client, self._introduce, self._on_reply, on_fault=self._on_fault, meter=self._meter
            )
            self._parts.callback(self._registration.stop)
            if self.orphans is not None:
                try:
                    self.orphans.start()
                except Exception as error:  # noqa: BLE001 - an optional part must not prevent the rank from being served
                    self._on_fault("serving spools of dead processes", error)
            self._registration.start()
        return self.url

    def announce(self, kinds: Iterable[str]) -> None:
        self._latest.announce(kinds)

    def publish(self, record: StepRecord) -> int:
        """Store a finished record and return its sequence number.

        Never waits for the network. May be called from any thread.
        """
        if self._abandoned:
            return _INERT
        with self._publishing:  # spool, ring and exposition must receive the records in the same order
            record = self._clock.corrected(record)
            encoded = encode(record)
            self.state.unencodable += encoded.unencodable
            if self.spool is not None:
                self.spool.write(self.ring.head + 1, encoded)
            seq = self.ring.append(encoded)
            if record.step is not None:
                self.state.step = record.step
            self._latest.update(record)
        if self._registration is not None and any(event.type in _URGENT for event in record.events):
            self._registration.poke()
        return seq

    def set_phase(self, phase: str | None) -> None:
        """Send the phase that the script has announced, such as an evaluation, to the service immediately.

        This ensures that a long evaluation does not count as a stall.
        """
        if self._abandoned or phase == self.state.phase:
            return
        self.state.phase = phase
        if self._registration is not None:
            self._registration.send_now()

    def drain(self, timeout_seconds: float) -> int:
        """Wait until a store has committed all records, and return the number of uncommitted records.

        Returns immediately if no service has registered this rank, because no client can then report a commit.
        """
        if self._abandoned:
            return 0
        self.state.is_draining = True
        deadline = time.monotonic() + timeout_seconds
        if self._registration is not None:
            self._registration.wait_attempted(timeout_seconds)
        if self._registration is None or self.state.lease is None:
            return self.ring.uncommitted
        self._registration.drain()
        return self.ring.wait_committed(deadline - time.monotonic(), stop=lambda: self.state.is_closed)

    def close(self) -> None:
        """Close the server and end its threads. A second call has no effect."""
        if self._abandoned or self.state.is_closed:
            return
        self.state.is_closed = True
        self._parts.close()

    def abandon_after_fork(self) -> None:
        """Close the inherited sockets in a forked child; all methods then do nothing.

        Takes no lock, because the thread that holds it may not exist in the child.
        """
        self._abandoned = True
        with contextlib.ExitStack() as stack:  # abandons all of them, then raises the first error
            if self.spool is not None:
                stack.callback(self.spool.abandon)
            if self.orphans is not None:
                stack.callback(self.orphans.abandon)
            if self._server is not None:
                stack.callback(self._server.abandon)
            self.ring = Ring(self._config.ring_records, self._config.ring_bytes)

    def progress(self) -> tuple[int | None, str | None]:
        """Return the number of the last published step, and the name of the phase that the script has announced."""
        return self.state.step, self.state.phase

    def overhead_seconds(self) -> Mapping[str, float]:
        return self._meter.totals()

    def _on_poll(self, committed: int, has_notice: bool) -> None:  # noqa: FBT001 - passed by Routes alone
        if self._registration is not None:
            (self._registration.send_now if has_notice else self._registration.on_poll)()
        self._commit(committed)

    def _commit(self, seq: int) -> None:
        self.ring.commit(seq)
        if self.spool is not None:
            self.spool.commit(seq)

    def _stats(self) -> ExporterStats:
        empty: Mapping[str, Any] = {}
        of_spool = {} if self.spool is None else self.spool.dropped
        own = {"ring_overrun": self.ring.overrun, "unencodable": self.state.unencodable, **of_spool}
        return ExporterStats(
            sampling_stretch=self._read("the sampling interval multiplier", self._sources.stretch, None),
            collectives=self._read("collectives", self._sources.collectives, empty),
            faults=self._faults(),
            dropped={**own, **self._read("dropped records", self._dropped, empty)},
            overhead_seconds={**self._read("overhead", self._overhead, empty), **self._meter.totals()},
            ring_records=len(self.ring),
            ring_uncommitted=self.ring.uncommitted,
        )

    def _read(self, part: str, source: Callable[[], T], default: T) -> T:
        """Return the result of `source`, a function that provides a section of the metrics page.

        If it raises, the error is reported and `default` is returned, so that the page is served without this section.
        """
        try:
            return source()
        except Exception as error:  # noqa: BLE001 - see above
            self._on_fault(f"{part} on the page", error)
            return default

    def _introduce(self) -> Registration:
        if self.orphans is not None:
            self.orphans.wait_searched()
        return self._describe()

    def _describe(self) -> Registration:
        state = self.state
        torch = getattr(sys.modules.get("torch"), "__version__", "")
        versions = {"rankscope": __version__, "python": sys.version.split()[0], "pyarrow": pa.__version__}
        return Registration(
            **dataclasses.asdict(self._identity),
            pid=os.getpid(),
            url=self.url or "",
            started_at=self._started_at,
            state=state.name,
            head=self.ring.head,
            queued=self._sources.queued(),
            step=state.step,
            phase=state.phase,
            planned_steps=self._planned_steps,
            config=self._settings,
            versions=versions | ({"torch": str(torch)} if torch else {}),
        )

    def _on_reply(self, reply: RegistrationReply) -> None:
        is_first, self.state.lease = self.state.lease is None, reply.lease
        try:
            self._commit(reply.committed)
            if is_first:
                self._on_registered(reply.attempt)
        except Exception as error:  # noqa: BLE001 - a wrong cursor or a disk error must not end the heartbeats
            self._on_fault("registration", error)
