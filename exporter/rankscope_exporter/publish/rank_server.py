"""Publishes the records of a rank and serves them over HTTP until the session ends.

The module creates the ring, the spool, the metrics page, the HTTP server and the registration. `routes` answers the
requests, and `registration` sends the heartbeats. This module measures nothing.

Find jumps of the wall clock between the records of one process, and correct later times by them.

A clock jumps if a person or NTP sets it. The stored times of records are those of the clock. Figures that are derived
from them, such as tokens per second, subtract the offset of the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from rankscope_contract import __version__
from rankscope_contract.model.events import JUMP_MICROSECONDS, Event, EventType, Severity, clock_jump
from rankscope_contract.model.identity import Identity
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.wire.channel import NOTHING, STATE_DRAINING, STATE_RUNNING, Registration, RegistrationReply
from rankscope_contract.wire.spool import service_name
from rankscope_exporter.process.errors import ErrorBoundary, ServeError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish.exposition import ExporterStats, Exposition, LatestValues
from rankscope_exporter.publish.http_server import HttpServer, open_server
from rankscope_exporter.publish.registration import DiscoveryFile, OrphanRecovery, RegistrationLoop, service_client
from rankscope_exporter.publish.ring import Ring, encode
from rankscope_exporter.publish.routes import RankServerSources, Routes
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
        return replace(record, ts=ts, clock_offset=self._offset, events=events)


def _jump_event(jump: int, offset: int) -> Event:
    message, details = clock_jump(jump, owner="host", remark="figures are corrected by it")
    return Event(
        type=EventType.CLOCK,
        severity=Severity.WARNING,
        value=jump / 1e6,
        message=message,
        details=details | {"offset_us": offset},
    )


_URGENT: Final = frozenset(
    {
        *(EventType.ANOMALY, EventType.XID, EventType.GPU, EventType.EXIT),
        *(EventType.HANG, EventType.STACKS, EventType.FLIGHT_RECORD),
    }
)
"""Types of events after which the rank asks the service for an immediate poll."""


@dataclass(eq=False, kw_only=True)
class RankServer:
    """Keeps the records of one process and serves them over HTTP. Has no socket and no thread before `start()`."""

    identity: Identity
    config: ServeConfig
    rules: Sequence[AnomalyRule]
    settings: Mapping[str, Any]
    planned_steps: int | None
    boundary: ErrorBoundary
    sources: RankServerSources = field(default_factory=RankServerSources)

    def __post_init__(self) -> None:
        config, report = self.config, self.boundary.report
        # Converted here to the form that a JSON reader gets: values without a JSON form become text on this thread.
        self.settings = json.loads(json.dumps(dict(self.settings), default=str), parse_constant=str)
        self.incarnation = self.identity.incarnation
        self.service_url = config.ingest_url
        self.url: str | None = None
        self.step: int | None = None
        """Number of the step of the record that was published last."""
        self.phase: str | None = None
        """Name of the phase that the script announced, such as an evaluation."""
        self.lease: str | None = None
        """Lease, a token that the service returned when it registered this rank; None before the first registration.

        Only the holder of the lease may mark records as committed.
        """
        self.state = STATE_RUNNING  # or STATE_DRAINING, while the rank waits for the commit of its last records
        self.is_closed = False
        self._unencodable = 0  # rows of nested datasets, such as events, whose values do not fit the columns
        self.meter = CpuMeter()
        self.spool = spool_of(config, self.incarnation, self._describe, on_fault=report, meter=self.meter)
        self.orphans: OrphanRecovery | None = None
        is_kept = None if self.spool is None else self.spool.files.holds
        self.ring = Ring(config.ring_records, config.ring_bytes, is_kept=is_kept)
        self.latest = LatestValues(self.rules)
        self.exposition = Exposition(
            self.identity,
            self.latest,
            self._stats,
            rules=self.rules,
            series_budget=config.series_budget,
            all_ops=config.page_ops == "all",
            planned_steps=self.planned_steps,
            device=str(self.settings.get("device", "")),
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
        """Start the server and the registration, and return the URL of this rank for other machines.

        Raises ServeError; the caller then calls `close`. An error of the spools of dead processes is reported and not
        raised, because they are optional.
        """
        if self._server is not None or self.is_closed:
            raise ServeError("this server was started before: create a new one")
        config = self.config
        client = service_client(config)
        if self.spool is not None and client is not None and config.ingest_url is not None:
            root, service = self.spool.files.folder.parent, service_name(config.ingest_url)
            self.orphans = OrphanRecovery(root, self.incarnation, client, service, self.boundary.report)
            self._parts.callback(self.orphans.stop)
        routes = Routes(self, token=config.secret, is_guarded=config.is_guarded)
        self._server = open_server(config, routes, on_fault=self.boundary.report, meter=self.meter)
        self._parts.callback(self._server.stop)
        address = config.advertised(self._server.port, self.identity.host)
        self.url = f"{config.scheme}://{address}"
        if config.discovery_dir is not None and config.ingest_url is None:
            discovery = DiscoveryFile(config.discovery_dir, self.identity)
            self._parts.callback(discovery.remove)
            discovery.write(str(address), config.scheme)
        self._server.start()
        if client is not None:
            self._registration = RegistrationLoop(
                client, self._introduce, self._on_reply, on_fault=self.boundary.report, meter=self.meter
            )
            self._parts.callback(self._registration.stop)
            if self.orphans is not None:
                self.boundary.call("serving spools of dead processes", self.orphans.start, self.url)
            self._registration.start()
        return self.url

    def publish(self, record: StepRecord) -> int:
        """Store a finished record and return its sequence number.

        Never waits for the network. May be called from any thread. A forked child, which has no server, gets -1.
        """
        if self._abandoned:
            return NOTHING
        with self._publishing:  # spool, ring and exposition must receive the records in the same order
            record = self._clock.corrected(record)
            encoded = encode(record)
            self._unencodable += encoded.unencodable
            if self.spool is not None:
                self.spool.write(self.ring.head + 1, encoded)
            seq = self.ring.append(encoded)
            if record.step is not None:
                self.step = record.step
            self.latest.update(record)
        if self._registration is not None and any(event.type in _URGENT for event in record.events):
            self._registration.poke()
        return seq

    def set_phase(self, phase: str | None) -> None:
        """Send the phase that the script has announced, such as an evaluation, to the service immediately.

        This ensures that a long evaluation does not count as a stall.
        """
        if self._abandoned or phase == self.phase:
            return
        self.phase = phase
        if self._registration is not None:
            self._registration.send_now()

    def drain(self, timeout_seconds: float) -> int:
        """Wait until a store has committed all records, and return the number of uncommitted records.

        Returns immediately if no service has registered this rank, because no client can then report a commit.
        """
        if self._abandoned:
            return 0
        self.state = STATE_DRAINING
        deadline = time.monotonic() + timeout_seconds
        if self._registration is not None:
            self._registration.attempted.wait(timeout_seconds)
        if self._registration is None or self.lease is None:
            return self.ring.uncommitted
        self._registration.drain()
        return self.ring.wait_committed(deadline - time.monotonic(), stop=lambda: self.is_closed)

    def close(self) -> None:
        """Close the server and end its threads. A second call has no effect."""
        if self._abandoned or self.is_closed:
            return
        self.is_closed = True
        self._parts.close()

    def abandon_after_fork(self) -> None:
        """Close the inherited sockets in a forked child; all methods then do nothing.

        Takes no lock, because the thread that holds it may not exist in the child.
        """
        self._abandoned = True
        with contextlib.ExitStack() as stack:  # abandons all of them, then raises the first error
            for part in (self.spool, self.orphans, self._server):
                if part is not None:
                    stack.callback(part.abandon)
            self.ring = Ring(self.config.ring_records, self.config.ring_bytes)

    def on_poll(self, committed: int, *, has_notice: bool) -> None:
        if self._registration is not None:
            (self._registration.send_now if has_notice else self._registration.on_poll)()
        self._commit(committed)

    def _commit(self, seq: int) -> None:
        self.ring.commit(seq)
        if self.spool is not None:
            self.spool.commit(seq)

    def _stats(self) -> ExporterStats:
        call, sources = self.boundary.call, self.sources
        of_spool = {} if self.spool is None else self.spool.files.dropped
        own = {"ring_overrun": self.ring.overrun, "unencodable": self._unencodable, **of_spool}
        return ExporterStats(
            sampling_stretch=call("the sampling interval multiplier on the page", sources.stretch),
            collectives=call("collectives on the page", sources.collectives) or {},
            faults=self.boundary.count,
            dropped=own | (call("dropped records on the page", sources.dropped) or {}),
            overhead_seconds=(call("overhead on the page", sources.overhead) or {}) | self.meter.totals(),
            ring_records=len(self.ring),
            ring_uncommitted=self.ring.uncommitted,
        )

    def _introduce(self) -> Registration:
        if self.orphans is not None:
            self.orphans.wait_searched()
        return self._describe()

    def _describe(self) -> Registration:
        torch = getattr(sys.modules.get("torch"), "__version__", "")
        versions = {"rankscope": __version__, "python": sys.version.split()[0], "pyarrow": pa.__version__}
        return Registration(
            **asdict(self.identity),
            pid=os.getpid(),
            url=self.url or "",
            started_at=self._started_at,
            state=self.state,
            head=self.ring.head,
            queued=self.sources.queued(),
            step=self.step,
            phase=self.phase,
            planned_steps=self.planned_steps,
            config=dict(self.settings),
            versions=versions | ({"torch": str(torch)} if torch else {}),
        )

    def _on_reply(self, reply: RegistrationReply) -> None:
        is_first, self.lease = self.lease is None, reply.lease
        self.boundary.call("registration", self._commit, reply.committed)
        if is_first:
            self.boundary.call("registration", self.sources.on_registered, reply.attempt)
