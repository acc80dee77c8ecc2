"""The serving side as the Monitor sees it: publish a record, drain, close. Wires ring, page, server, registration."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from rankscope_contract import __version__
from rankscope_contract.model.events import EventType
from rankscope_contract.model.identity import Identity
from rankscope_contract.protocol.channel import STATE_DRAINING, STATE_RUNNING, Registration, RegistrationReply
from rankscope_contract.rules.base import AnomalyRule
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.addresses import Address
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.exposition import ExporterStats, Exposition
from rankscope_exporter.serving.http_server import HttpServer, open_server
from rankscope_exporter.serving.latest_values import LatestValues
from rankscope_exporter.serving.node_exposition import NodeExposition
from rankscope_exporter.serving.persistence import Persistence
from rankscope_exporter.serving.registration import RegistrationLoop
from rankscope_exporter.serving.ring import Ring
from rankscope_exporter.serving.routes import RankServerSources, Routes
from rankscope_exporter.serving.service_client import DiscoveryFile, ServiceClient
from rankscope_exporter.serving.tls import client_tls

T = TypeVar("T")

_URGENT: Final = (EventType.ANOMALY, EventType.EXIT, EventType.HANG, EventType.STACKS, EventType.FLIGHT_RECORD)
_INERT: Final = -1


class RankServer:
    """Keeps the records of one process and hands them out. No socket and no thread before `start()`."""

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
        sources: RankServerSources | None = None,
    ) -> None:
        self.incarnation = identity.incarnation
        self._meter = CpuMeter()
        self.persistence = Persistence(
            config, identity.incarnation, self._describe, on_fault=on_fault, meter=self._meter
        )
        self.ring = Ring(config.ring_records, config.ring_bytes, is_kept=self.persistence.holds)
        self.service_url = config.ingest_url
        self.scraped_by: str | None = None
        self.url: str | None = None
        self._identity = identity
        self._config = config
        # As the JSON reader will see it: whatever has no JSON form becomes text here, not in a thread later.
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str), parse_constant=str)
        self._planned_steps = planned_steps
        self._on_fault = on_fault
        self._overhead, self._dropped, self._faults = overhead, dropped, faults
        self._live = LatestValues(rules)
        self._page = Exposition(
            identity,
            self._live,
            self._stats,
            rules=rules,
            series_budget=config.series_budget,
            all_ops=config.page_ops == "all",
            planned_steps=planned_steps,
            device=str(settings.get("device", "")),
        )
        self._started_at = time.time_ns() // 1000
        self._sources = RankServerSources() if sources is None else sources
        self._step: int | None = None
        self._phase: str | None = None
        self._lease: str | None = None
        self._draining = False
        self._unencodable = 0
        self._counting = threading.Lock()
        self._publishing = threading.Lock()
        self._server: HttpServer | None = None
        self._registration: RegistrationLoop | None = None
        self._node = NodeExposition(identity, self.page, on_fault, self._meter) if config.node_page else None
        self._discovery: DiscoveryFile | None = None
        self._closed = False
        self._abandoned = False

    def start(self) -> str:
        """Listen, begin to register, and return the URL under which others reach this rank. Raises ServeError."""
        if self._server is not None or self._closed:
            raise ServeError("this channel was started before: make a new one")
        config = self._config
        client = self._client()
        self._server = open_server(config, Routes(self, config.secret), on_fault=self._on_fault, meter=self._meter)
        address = config.advertised(self._server.port, self._identity.host)
        self.url = f"{config.scheme}://{address}"
        try:
            self._announce(address)
        except ServeError:
            self.close()
            raise
        self._server.start()
        self._start_node_peers()
        if client is not None:
            self._registration = RegistrationLoop(
                client, self._introduce, self._on_reply, on_fault=self._on_fault, meter=self._meter
            )
            try:
                self.persistence.serve_orphans(client, lambda: self.url)
            except Exception as error:  # noqa: BLE001 - records of dead processes; this rank registers all the same
                self._on_fault("spools of dead processes", error)
            self._registration.start()
        return self.url

    def announce(self, kinds: Iterable[str]) -> None:
        """Name the kinds that will be measured, so that their counters stand at 0 before the first record."""
        self._live.announce(kinds)

    def publish(self, record: StepRecord) -> int:
        """Take over a finished record and return its seq. Never waits for the network. From any thread."""
        if self._abandoned:
            return _INERT
        with self._publishing:  # spool, ring and page get records in one order
            self.persistence.keep(self.ring.head + 1, record)
            seq = self.ring.append(record)
            if record.step is not None:
                self._step = record.step
            self._live.update(record)
        if self._registration is not None and any(event.type in _URGENT for event in record.events):
            self._registration.poke()
        return seq

    def set_phase(self, phase: str | None) -> None:
        """Tell the service, at once, what training is doing: a long evaluation is no hang."""
        if self._abandoned or phase == self._phase:
            return
        self._phase = phase
        if self._registration is not None:
            self._registration.speak()

    def drain(self, timeout_seconds: float) -> int:
        """Wait until every record is committed; return how many are not. Does not wait where nobody can commit."""
        if self._abandoned:
            return 0
        self._draining = True
        deadline = time.monotonic() + timeout_seconds
        if self._registration is not None:
            self._registration.wait_attempted(timeout_seconds)
        if self._registration is None or self._lease is None:
            return self.ring.uncommitted
        self._registration.drain()
        return self.ring.wait_committed(deadline - time.monotonic(), stop=lambda: self._closed)

    def close(self) -> None:
        """Close the socket and end the threads; a second call does nothing."""
        if self._abandoned or self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # closes all of them, in reverse order, and then raises what one raised
            stack.callback(self.persistence.close)
            if self._server is not None:
                stack.callback(self._server.stop)
            if self._node is not None:
                stack.callback(self._node.close)
            if self._discovery is not None:
                stack.callback(self._discovery.remove)
            if self._registration is not None:
                stack.callback(self._registration.stop)

    def abandon_after_fork(self) -> None:
        """In a forked child: close the inherited sockets and be inert. Takes no lock, since its owner may be gone."""
        self._abandoned = True
        with contextlib.ExitStack() as stack:  # as in close()
            stack.callback(self.persistence.abandon)
            if self._node is not None:
                stack.callback(self._node.abandon)
            if self._server is not None:
                stack.callback(self._server.abandon)
            self.ring = Ring(self._config.ring_records, self._config.ring_bytes)

    @property
    def draining(self) -> bool:
        """Return whether the rank waits for its last records to be committed."""
        return self._draining

    @property
    def lease(self) -> str | None:
        """Return the lease of the service that may move `committed`; None before one registered us."""
        return self._lease

    def polled(self, committed: int) -> None:
        """Note a poll of the service that registered this rank, and what it has durably. Raises CursorError."""
        if self._registration is not None:
            self._registration.polled()
        self.commit(committed)

    def commit(self, seq: int) -> None:
        """Note that a store has everything up to `seq`. Raises CursorError above the newest record."""
        self.ring.commit(seq)
        self.persistence.commit(seq)

    def plan(self, plan_hash: str) -> str | None:
        """Return the text of a plan that records served from here use."""
        plan = self.ring.plan(plan_hash)
        return self.persistence.plan(plan_hash) if plan is None else plan.json

    def health(self) -> dict[str, Any]:
        """Return what /healthz shows."""
        state = STATE_DRAINING if self._draining else STATE_RUNNING
        return {"status": "ok", "state": state, "incarnation": self.incarnation, "head": self.ring.head}

    def progress(self) -> tuple[int | None, str | None]:
        """Return the last step that was published, and the phase that training is in."""
        return self._step, self._phase

    def stacks(self) -> Mapping[str, Any] | None:
        """Take stacks, record them, and return what was taken; None where nobody takes any."""
        take_stacks = self._sources.take_stacks
        return None if take_stacks is None or self._closed else take_stacks()

    def settings(self) -> Mapping[str, Any]:
        """Return what /config shows; secrets were left out by who made it."""
        state = self._sources.sampling_state
        return self._settings if state is None else {**self._settings, "measuring": state()}

    def switch(self, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Change what is measured, and return what is and will be; None where nobody can. Raises ConfigError."""
        change = self._sources.change_sampling
        return None if change is None or self._closed else change(document)

    def overhead_seconds(self) -> Mapping[str, float]:
        """Return the CPU seconds of the serving threads so far."""
        return self._meter.totals()

    def page(self) -> tuple[Any, ...]:
        """Return the metrics page in pieces."""
        return self._page.pieces()

    def node_page(self) -> Sequence[Any] | None:
        """Return the page of all ranks of this launch on this host, in pieces; None where none was asked for."""
        return None if self._node is None else self._node.pieces()

    def count_unencodable(self, rows: int) -> None:
        """Note rows that no column of the stream could hold."""
        with self._counting:
            self._unencodable += rows

    def _client(self) -> ServiceClient | None:
        config = self._config
        if config.ingest_url is None:
            return None
        tls = client_tls(config) if config.ingest_url.startswith("https:") else None
        return ServiceClient(config.ingest_url, config.secret, tls)

    def _start_node_peers(self) -> None:
        """Join the node's page. Where that cannot be, the rank's own page stays, and the fault is counted."""
        if self._node is not None:
            try:
                self._node.start()
            except Exception as error:  # noqa: BLE001 - an optional page must not keep this rank from being served
                self._on_fault("node page", error)

    def _announce(self, address: Address) -> None:
        if self._config.discovery_dir is not None and self._config.ingest_url is None:
            self._discovery = DiscoveryFile(self._config.discovery_dir, self._identity)
            self._discovery.write(str(address), self._config.scheme)

    def _stats(self) -> ExporterStats:
        nothing: Mapping[str, Any] = {}
        own = {"ring_overrun": self.ring.overrun, "unencodable": self._unencodable}
        dropped = {**own, **self.persistence.dropped, **self._asked("dropped records", self._dropped, nothing)}
        overhead = self._asked("overhead", self._overhead, nothing)
        return ExporterStats(
            sampling_stretch=self._asked("the stretch of sampling", self._sources.stretch, None),
            collectives=self._asked("collectives", self._sources.collectives, nothing),
            faults=self._faults(),
            dropped=dropped,
            overhead_seconds={**overhead, **self._meter.totals()},
            ring_records=len(self.ring),
            ring_uncommitted=self.ring.uncommitted,
        )

    def _asked(self, what: str, ask: Callable[[], T], otherwise: T) -> T:
        """Return one part of the page, `otherwise` where it cannot be had: the page is served without it."""
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - see above
            self._on_fault(f"{what} on the page", error)
            return otherwise

    def _introduce(self) -> Registration:
        self.persistence.wait_for_older_launches()
        return self._describe()

    def _describe(self) -> Registration:
        who = self._identity
        return Registration(
            run=who.run,
            rank=who.rank,
            world_size=who.world_size,
            local_rank=who.local_rank,
            host=who.host,
            pid=os.getpid(),
            incarnation=who.incarnation,
            launch_id=who.launch_id,
            url=self.url or "",
            node="" if self._node is None else self._node.node,
            started_at=self._started_at,
            state=STATE_DRAINING if self._draining else STATE_RUNNING,
            head=self.ring.head,
            step=self._step,
            phase=self._phase,
            planned_steps=self._planned_steps,
            config=self._settings,
            versions=_versions(),
        )

    def _on_reply(self, reply: RegistrationReply) -> None:
        self._lease = reply.lease
        self.scraped_by = self.service_url
        try:
            self.commit(reply.committed)
        except Exception as error:  # noqa: BLE001 - a refused cursor or a disk; the thread goes on with its heartbeats
            self._on_fault("registration", error)


def _versions() -> dict[str, str]:
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    versions = {"rankscope": __version__, "python": sys.version.split()[0], "pyarrow": pa.__version__}
    return versions | ({"torch": str(torch)} if torch else {})
