"""Discrete-event simulation of ranks and the services that store their records, with the measured costs of a service.

Ranks are simulated in the groups in which a service polls them. A service has the resources that limit it: cores, the
thread of the event loop, the thread of the flush, and a limit of pending rows. Services share the Delta log and one
maintainer. Times are in seconds; random numbers have a fixed seed. The simulation leaves out failures of single ranks,
the store's readers, and the network.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from rankscope.sizing.costs import Costs, poll_seconds
from rankscope_exporter.publish.registration import MAX_RETRY_SECONDS, REGISTER_SECONDS
from rankscope_ingest.base.config import IngestSection, NotifySection
from rankscope_ingest.pipeline.maintenance_schedule import COMPACT_EVERY_COMMITS
from rankscope_storage.maintenance.compaction import (
    MERGE_ROWS,
    SMALL_FILES,
    SMALL_ROWS,
    TARGET_ROWS,
    TINY_FILES,
    TINY_ROWS,
)

GROUP_RANKS = 32
CHECK_SECONDS = 1.0  # of the maintenance schedule
SLICE_SECONDS = 0.1  # of maintenance, between which other work gets the core
RANK_ROWS = 3  # scalars of a record of the simulated ranks

Process = Generator[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Ranks, their records, and the services. A restart stops all services from `stop_at` on, for `stop_seconds`."""

    ranks: int
    tensors: int
    step_seconds: float  # between two records of a rank
    seconds: float
    services: int = 1
    cores: int = 2
    commit_seconds: float = 0.02  # in which the log is held for one commit
    spool_records: int = 1 << 30
    stop_at: float = math.inf
    stop_seconds: float = 0.0
    bad_steps: frozenset[int] = frozenset()  # a rule fires on all ranks
    ingest: IngestSection = field(default_factory=IngestSection)
    costs: Costs = field(default_factory=Costs)

    @property
    def rows(self) -> int:
        """Return the number of rows of a record."""
        return self.tensors + RANK_ROWS

    @property
    def poll_seconds(self) -> float:
        """Return the interval of polls of a rank with a nearly empty ring."""
        return poll_seconds(self.ingest)


@dataclass(slots=True, kw_only=True)
class Group:
    """Ranks that are polled together. Positions count the records of each of these ranks."""

    ranks: int
    offset: float  # of its polls in an interval, from 0 to 1
    times: list[float] = field(default_factory=list)  # of the publication of each record
    fetched: int = 0
    committed: int = 0
    known: int = 0  # position that the ranks know as committed
    oldest: int = 0  # position of the first record that is not deleted in a full spool
    lost: int = 0  # of each rank, deleted before they were fetched
    lost_before: int = 0  # the same, up to the committed position
    registered_at: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a simulation, over all services. Lag is the time from a publication to its confirmation."""

    published: int
    committed: int
    waiting: int
    lost: int
    cpu_seconds: float
    loop_seconds: float
    commits: int
    files: int
    files_written: int
    merges: int
    pending_rows: int  # largest number at one service
    refused_polls: int
    lag_median: float
    lag_p99: float
    lag_end: float  # age of the oldest record that is not committed at the end
    registered_after: float  # seconds from the start, or from the end of a restart, to the last registration
    timed_out_registrations: int
    messages: int

    def memory(self, load: Scenario) -> float:
        """Return the largest memory of a service in MB."""
        costs = load.costs
        per_service = load.ranks / load.services
        return costs.base_memory + costs.rank_memory * per_service + costs.row_memory * self.pending_rows / 1e6


class Store:
    """Files of the store. `small` has the rows of each small file, by service and dataset: tensors first."""

    def __init__(self, env: simpy.Environment, load: Scenario) -> None:
        self.log = simpy.Resource(env)
        datasets = round(load.costs.flush_files)
        self.small: list[list[int]] = [[] for _ in range(load.services * datasets)]
        self.datasets = datasets
        self.files = self.written = self.commits = self.merges = self.records = 0

    def add(self, service: int, records: int, rows: list[int]) -> None:
        """Add the records and the files of a flush, one file for each dataset."""
        self.commits += 1
        self.records += records
        self.files += len(rows)
        self.written += len(rows)
        for number, one in enumerate(rows):
            if one < SMALL_ROWS:
                self.small[service * self.datasets + number].append(one)

    def merge(self, number: int) -> int:
        """Merge the small files of a service and dataset if a compaction would; return their rows."""
        small = self.small[number]
        rows, count = sum(small), len(small)
        is_tiny = count > TINY_FILES and rows < TINY_ROWS * count
        if not (count > SMALL_FILES or (count > 1 and rows >= MERGE_ROWS) or is_tiny):
            return 0
        merged = max(1, rows // TARGET_ROWS)
        self.small[number] = [rows] if rows < SMALL_ROWS else []
        self.files += merged - count
        self.written += merged
        self.merges += 1
        return rows


class Service:
    """One service: polls its groups, flushes batches, merges files if it is the maintainer, and sends messages."""

    def __init__(self, env: simpy.Environment, load: Scenario, number: int, store: Store, rng: random.Random) -> None:
        self.env, self.load, self.number, self.store, self.rng = env, load, number, store, rng
        self.cpu = simpy.PriorityResource(env, load.cores)
        self.loop = simpy.Resource(env)
        self.filled = env.event()
        self.groups: list[Group] = []
        self.epoch = 0  # of the process; a restart begins another one
        self.is_up = True
        self.rows = self.reserved = self.in_flight = self.peak = self.refused = self.timed_out = self.messages = 0
        self.opened: float | None = None
        self.cpu_seconds = self.loop_seconds = 0.0
        self.lags: list[float] = []
        self.incident_step = -math.inf

    def work(self, seconds: float, priority: int = 0) -> Process:
        """Use a core for `seconds`; maintenance has a lower priority."""
        with self.cpu.request(priority) as turn:
            yield turn
            yield self.env.timeout(seconds)
        self.cpu_seconds += seconds

    def on_loop(self, loop_seconds: float, seconds: float) -> Process:
        """Use the event loop, and for the rest of `seconds` another thread."""
        with self.loop.request() as turn:
            yield turn
            yield from self.work(loop_seconds)
        self.loop_seconds += loop_seconds
        if seconds > loop_seconds:
            yield from self.work(seconds - loop_seconds)

    def rank_group(self, group: Group) -> Process:
        """Register the group, poll it until the process ends, and register it again."""
        while True:
            yield from self._register(group)
            yield from self._poll(group)

    def _register(self, group: Group) -> Process:
        costs = self.load.costs
        group.registered_at = math.inf
        while True:
            yield self.env.timeout(self.rng.random() * MAX_RETRY_SECONDS)
            if not self.is_up:
                continue
            epoch, asked = self.epoch, self.env.now
            yield from self.on_loop(group.ranks * costs.registration, group.ranks * costs.registration)
            if self.env.now - asked > REGISTER_SECONDS:
                self.timed_out += group.ranks
            elif epoch == self.epoch and self.is_up:
                group.registered_at = self.env.now
                return

    def _poll(self, group: Group) -> Process:
        load, costs, epoch, has_more = self.load, self.load.costs, self.epoch, False
        while epoch == self.epoch:
            if not has_more:
                interval = load.poll_seconds if group.fetched else load.ingest.poll_seconds
                yield self.env.timeout(interval - (self.env.now - group.offset * interval) % interval)
            if epoch != self.epoch:
                return
            self._confirm(group)
            free = load.ingest.max_pending_rows - self.rows - self.reserved - self.in_flight
            if free <= 0:
                self.refused += group.ranks
                yield self.env.timeout(load.ingest.poll_seconds)
                has_more = True
                continue
            first = max(group.fetched, group.oldest)
            behind = len(group.times) - first
            records = min(behind, max(1, free // (group.ranks * load.rows)))
            rows, records_all = records * group.ranks * load.rows, records * group.ranks
            self.reserved += rows  # before the request, as PollBudget does
            yield from self.on_loop(
                group.ranks * costs.poll_loop + records_all * costs.record_loop + rows * costs.row_loop / 1e6,
                group.ranks * costs.poll + records_all * costs.record + rows * costs.row_loop / 1e6,
            )
            if epoch != self.epoch:
                return
            self.reserved -= rows
            self.rows += rows
            self.peak = max(self.peak, self.rows + self.in_flight)
            group.lost, group.fetched = group.lost + first - group.fetched, first
            if records:
                group.fetched = first + records
                self._fire(first, group.fetched)
                if self.opened is None:
                    self.opened = self.env.now
                    self._wake()
                elif self.rows >= load.ingest.flush_rows:
                    self._wake()
            has_more = len(group.times) > group.fetched and records > 0 and behind > records

    def _wake(self) -> None:
        if not self.filled.triggered:
            self.filled.succeed()

    def _confirm(self, group: Group) -> None:
        """Tell the ranks of a group which of their records are committed."""
        if group.committed > group.known:
            self.lags += [self.env.now - group.times[group.known]] * group.ranks
            group.known = group.committed

    def flush(self) -> Process:
        """Commit batches: full ones immediately, others after flush_after_seconds."""
        ingest, costs = self.load.ingest, self.load.costs
        while True:
            if self.opened is None or self.rows < ingest.flush_rows:
                rest = math.inf if self.opened is None else self.opened + ingest.flush_after_seconds - self.env.now
                if rest > 0:
                    self.filled = self.env.event()
                    yield self.filled if rest == math.inf else self.filled | self.env.timeout(rest)
                    continue
            epoch, positions = self.epoch, [(one, one.fetched, one.lost) for one in self.groups]
            rows, self.rows, self.opened = self.rows, 0, None
            self.in_flight = rows
            yield from self.work(costs.commit + rows * (costs.row - costs.row_loop) / 1e6)
            with self.store.log.request() as turn:
                yield turn
                yield self.env.timeout(self.load.commit_seconds)
            if epoch == self.epoch:
                self.in_flight = 0
                tensors = rows * self.load.tensors // self.load.rows
                files = [tensors, *[rows - tensors] * (self.store.datasets - 1)]
                self.store.add(self.number, rows // self.load.rows, files)
                for group, position, lost in positions:
                    group.committed, group.lost_before = position, lost

    def maintain(self) -> Process:
        """Merge small files of all services, one merge at a time."""
        at = 0
        while True:
            yield self.env.timeout(CHECK_SECONDS)
            if self.store.commits - at < COMPACT_EVERY_COMMITS * self.load.services:
                continue
            at = self.store.commits
            for number in range(len(self.store.small)):
                seconds = self.store.merge(number) * self.load.costs.merge / 1e6
                while seconds > 0:
                    yield from self.work(min(seconds, SLICE_SECONDS), 1)
                    seconds -= SLICE_SECONDS

    def restart(self) -> Process:
        """Stop the process without a commit, and start another one. The ranks keep records that are not committed."""
        yield self.env.timeout(self.load.stop_at)
        self.epoch, self.is_up = self.epoch + 1, False
        self.rows, self.reserved, self.in_flight, self.opened = 0, 0, 0, None
        for group in self.groups:
            group.fetched, group.lost = group.committed, group.lost_before
        yield self.env.timeout(self.load.stop_seconds)
        self.is_up = True

    def _fire(self, first: int, last: int) -> None:
        for step in range(first, last):
            if step in self.load.bad_steps:
                if step - self.incident_step > NotifySection().quiet_steps:
                    self.env.process(self._send())
                self.incident_step = max(step, self.incident_step)

    def _send(self) -> Process:
        yield self.env.timeout(NotifySection().group_wait_seconds)
        self.messages += 1


def _train(env: simpy.Environment, load: Scenario, group: Group) -> Process:
    """Publish the records of a group, and delete the oldest ones if the spool is full."""
    while True:
        yield env.timeout(load.step_seconds)
        group.times.append(env.now)
        group.oldest = max(group.known, len(group.times) - load.spool_records)
        group.known = group.oldest


def simulate(load: Scenario, seed: int = 0) -> Outcome:
    """Return the outcome of a simulation of `load`."""
    env, rng = simpy.Environment(), random.Random(seed)  # noqa: S311 - a simulation, no secret
    store = Store(env, load)
    services = [Service(env, load, number, store, rng) for number in range(load.services)]
    for service in services:
        own = load.ranks // load.services + (service.number < load.ranks % load.services)
        count = -(-own // GROUP_RANKS)
        sizes = [own // count + (number < own % count) for number in range(count)]
        service.groups = [Group(ranks=size, offset=number / count) for number, size in enumerate(sizes)]
        for group in service.groups:
            env.process(_train(env, load, group))
            env.process(service.rank_group(group))
        env.process(service.flush())
        if load.stop_at < math.inf:
            env.process(service.restart())
    env.process(services[0].maintain())
    env.run(until=load.seconds)
    return _outcome(load, services, store)


def _outcome(load: Scenario, services: list[Service], store: Store) -> Outcome:
    groups = [group for service in services for group in service.groups]
    lags = sorted(lag for service in services for lag in service.lags)
    oldest = [(group, max(group.committed, group.oldest)) for group in groups]
    waits = [load.seconds - group.times[position] for group, position in oldest if position < len(group.times)]
    began = 0.0 if load.stop_at == math.inf else load.stop_at + load.stop_seconds
    published = sum(group.ranks * len(group.times) for group in groups)
    pending = sum(service.rows + service.in_flight for service in services) // load.rows
    spooled = sum(group.ranks * (len(group.times) - max(group.fetched, group.oldest)) for group in groups)
    lost = sum(group.ranks * (group.lost + max(0, group.oldest - group.fetched)) for group in groups)
    return Outcome(
        published=published,
        committed=store.records,
        waiting=pending + spooled,
        lost=lost,
        cpu_seconds=sum(service.cpu_seconds for service in services) + load.costs.idle * load.seconds * load.services,
        loop_seconds=sum(service.loop_seconds for service in services),
        commits=store.commits,
        files=store.files,
        files_written=store.written,
        merges=store.merges,
        pending_rows=max(service.peak for service in services),
        refused_polls=sum(service.refused for service in services),
        lag_median=statistics.median(lags) if lags else math.inf,
        lag_p99=lags[int(0.99 * len(lags))] if lags else math.inf,
        lag_end=max(waits, default=0.0),
        registered_after=max(group.registered_at for group in groups) - began,
        timed_out_registrations=sum(service.timed_out for service in services),
        messages=sum(service.messages for service in services),
    )
