"""Measured costs of a service, and the number and size of services, store and requests that a load needs."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope.shell.errors import USAGE, CommandError
from rankscope_ingest.base.config import IngestSection
from rankscope_ingest.record_channel.loop import Pace
from rankscope_storage.base.datasets import BUCKET_STEPS
from rankscope_storage.maintenance.compaction import MERGE_ROWS, SMALL_ROWS

DAY: Final = 86_400.0
HOUR: Final = 3_600.0
STATISTICS: Final = 6
"""Samples of a row of a tensor: norm, min, max, mean, nans and zeros. A scalar is one sample."""
MEASURED_RANKS: Final = 1_000
MEASURED_SAMPLES: Final = 12e6  # per second
"""Largest number of ranks and of samples per second of one service in a measurement."""
MEASURED_SERVICES: Final = 4
"""Largest number of services over one store in a measurement."""
HEADROOM: Final = 0.7
"""Share of a thread and of the memory that a suggested service uses at most; the rest is for a backlog after a stop."""
EXTRAPOLATED: Final = "; extrapolation"
"""Last words of a formula for a load beyond these."""

_CALIBRATION: Final = "python benchmarks/sizing.py calibrate"
_REQUESTS: Final = "pytest tests/object_store/test_store.py -k requests"


def _measured(value: float, unit: str, source: str = _CALIBRATION) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The table of measured constants. The metadata of a field has its unit and the command that measures it.

    A row is one tensor at one step, or one scalar. `…_loop` is the part of the CPU time on the event loop's thread.
    """

    idle: float = _measured(0.0045, "cores")
    poll: float = _measured(0.00116, "CPU s per poll")
    poll_loop: float = _measured(0.00116, "CPU s per poll")
    record: float = _measured(2.72e-05, "CPU s per record")
    record_loop: float = _measured(2.11e-05, "CPU s per record")
    row: float = _measured(0.316, "CPU s per million rows")
    row_loop: float = _measured(0.0369, "CPU s per million rows")
    commit: float = _measured(0.0198, "CPU s per commit", "python benchmarks/run.py commits")
    merge: float = _measured(1.62, "CPU s per million rows")
    retention: float = _measured(0.993, "CPU s per million rows", "python benchmarks/run.py retention")
    registration: float = _measured(0.00306, "CPU s per registration")
    base_memory: float = _measured(225.0, "MB")
    rank_memory: float = _measured(0.171, "MB per rank")
    row_memory: float = _measured(317.0, "bytes per row in memory")
    wire_sample: float = _measured(3.06, "bytes per sample")
    wire_record: float = _measured(493.0, "bytes per record")
    stored_sample: float = _measured(2.15, "bytes per sample of tensors", "python benchmarks/run.py stored_bytes")
    stored_scalar: float = _measured(7.38, "bytes per scalar")
    rollup: float = _measured(51.2, "bytes per rollup row", "python benchmarks/run.py retention")
    flush_files: float = _measured(3.0, "files per flush")
    commit_writes: float = _measured(4.4, "PUT and LIST per commit, without files", _REQUESTS)
    commit_reads: float = _measured(11.6, "GET per commit, with checkpoints", _REQUESTS)
    upkeep_memory: float = _measured(
        990.0, "MB of a merge or of retention", 'RANKSCOPE_FLEET="steps=720" python benchmarks/run.py fleet'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Ranks and their records, and the settings of the services that store them. Prices are for 1,000 requests."""

    ranks: int = 1_000
    tensors: int = 2_500
    every: int = 100
    step_seconds: float = 0.5
    scalars: int = 10
    raw_days: float | None = None
    days: float = 30.0
    cores: float = 2.0
    memory_gb: float = 4.0
    write_price: float = 0.005
    read_price: float = 0.0004
    ingest: IngestSection = field(default_factory=IngestSection)

    def __post_init__(self) -> None:
        for name in ("ranks", "tensors", "every", "step_seconds", "cores", "memory_gb", "days"):
            _check(name, 0 < getattr(self, name) < math.inf, "above 0")
        _check("raw_days", self.raw_days is None or 0 < self.raw_days < math.inf, "above 0")
        for name in ("scalars", "write_price", "read_price"):
            _check(name, 0 <= getattr(self, name) < math.inf, "at least 0")

    @property
    def records(self) -> float:
        """Return the records per second: each rank publishes one at every step, sampled or not."""
        return self.ranks / self.step_seconds

    @property
    def tensor_rows(self) -> float:
        """Return the rows of tensors per second."""
        return self.records * self.tensors / self.every

    @property
    def scalar_rows(self) -> float:
        """Return the rows of scalars per second."""
        return self.records * self.scalars

    @property
    def samples(self) -> float:
        """Return the samples per second."""
        return self.tensor_rows * STATISTICS + self.scalar_rows


def _check(name: str, is_valid: bool, limit: str) -> None:
    if not is_valid:
        raise CommandError(f"--{name.replace('_', '-')} must be {limit} and finite", code=USAGE)


def poll_seconds(ingest: IngestSection) -> float:
    """Return the seconds between two polls of a rank with a nearly empty ring."""
    settings = ingest.model_dump(include={"poll_seconds", "max_backoff_seconds", "flush_after_seconds"})
    return Pace(**settings).calm_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The resources that one service uses under `load`, from the measured costs. Rates are per second."""

    load: Load
    costs: Costs

    @property
    def rows(self) -> float:
        """Return all rows."""
        return self.load.tensor_rows + self.load.scalar_rows

    @property
    def commits(self) -> float:
        """Return the flushes: a full batch, or one every flush_after_seconds."""
        return max(1 / self.load.ingest.flush_after_seconds, self.rows / self.load.ingest.flush_rows)

    @property
    def merged_rows(self) -> float:
        """Return the rows that compaction writes again: those of flushes that make small files."""
        return self.rows if self.load.tensor_rows / self.commits < SMALL_ROWS else self.load.scalar_rows

    @property
    def merges(self) -> float:
        """Return the commits of compaction."""
        return self.merged_rows / MERGE_ROWS

    @property
    def loop(self) -> float:
        """Return the share of a core that the event loop uses."""
        costs, load = self.costs, self.load
        polls = load.ranks / poll_seconds(load.ingest)
        return polls * costs.poll_loop + load.records * costs.record_loop + self.rows * costs.row_loop / 1e6

    @property
    def flush(self) -> float:
        """Return the share of time in which the thread of the flush works."""
        return self.commits * self.costs.commit + self.rows * (self.costs.row - self.costs.row_loop) / 1e6

    @property
    def maintenance(self) -> float:
        """Return the share of a core that merges and retention of these rows use."""
        rolled_up = self.load.tensor_rows if self.load.raw_days else 0.0
        return (self.merged_rows * self.costs.merge + rolled_up * self.costs.retention) / 1e6

    @property
    def cores(self) -> float:
        """Return the cores of all threads, with the maintenance of these rows."""
        costs, load = self.costs, self.load
        polls = load.ranks / poll_seconds(load.ingest)
        stored = self.commits * costs.commit + self.rows * costs.row / 1e6
        return costs.idle + polls * costs.poll + load.records * costs.record + stored + self.maintenance

    @property
    def memory(self) -> float:
        """Return the largest memory in MB: of a full batch, the rows that arrive during its commit, and a merge."""
        costs, ingest = self.costs, self.load.ingest
        rows = min(ingest.max_pending_rows, self.rows / self.commits * (1 + min(1.0, self.flush)))
        upkeep = costs.upkeep_memory * min(1.0, self.rows * HOUR / MERGE_ROWS)
        return costs.base_memory + costs.rank_memory * self.load.ranks + costs.row_memory * rows / 1e6 + upkeep

    @property
    def used(self) -> dict[str, float]:
        """Return how much of each limit the service uses: 1 is the limit with headroom."""
        return {
            "the event loop": self.loop / HEADROOM,
            "the flush thread": self.flush / HEADROOM,
            "the cores": self.cores / self.load.cores / HEADROOM,
            "the memory": self.memory / (self.load.memory_gb * 1e3) / HEADROOM,
        }

    def limit(self) -> tuple[int, str]:
        """Return the largest number of ranks of one service with such records, and the resource that limits it."""

        def service(ranks: int) -> Service:
            return Service(load=dataclasses.replace(self.load, ranks=ranks), costs=self.costs)

        most = bisect.bisect_right(range(1, 1_000_000), 1.0, key=lambda ranks: max(service(ranks).used.values()))
        used = service(most + 1).used
        return most, max(used, key=lambda name: used[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the result; `formula` names the options and constants that it follows from."""

    quantity: str
    value: float
    unit: str
    formula: str


def lines(load: Load, costs: Costs | None = None) -> Iterator[Line]:
    """Yield the sizes that `load` needs. Raise CommandError if one rank is too much for a service."""
    costs = costs or Costs()
    most, limit = Service(load=load, costs=costs).limit()
    if most < 1:
        raise CommandError(f"one rank exceeds {limit} of a service: raise --every, --cores or --memory-gb")
    services = math.ceil(load.ranks / most)
    one = Service(load=dataclasses.replace(load, ranks=math.ceil(load.ranks / services)), costs=costs)
    at_most = Service(load=dataclasses.replace(load, ranks=most), costs=costs)
    beyond = _beyond(one.load) or (EXTRAPOLATED if services > MEASURED_SERVICES else "")
    yield Line(quantity="samples", value=load.samples, unit="per second", formula="tensors x 6 / every, and scalars")
    for line in (*_bytes(load, costs), *_requests(load, costs, one, services), *_machine(one, services)):
        yield dataclasses.replace(line, formula=f"{line.formula}{beyond}")
    text = f"limited by {limit} at {at_most.load.samples / 1e6:,.2f} M samples/s{_beyond(at_most.load)}"
    yield Line(quantity="ranks per service", value=most, unit="at most", formula=text)
    beyond = beyond or (_beyond(at_most.load) if services > 1 else "")
    text = f"{one.load.ranks:,} ranks each, and a run belongs to one of them" if services > 1 else "all ranks"
    yield Line(quantity="services", value=services, unit="", formula=f"{text}{beyond}")


def short_number(value: float) -> str:
    """Return the text of a number with three digits, or without fraction."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _beyond(load: Load) -> str:
    is_beyond = load.ranks > MEASURED_RANKS or load.tensor_rows * STATISTICS > MEASURED_SAMPLES
    return EXTRAPOLATED if is_beyond else ""


def _machine(one: Service, services: int) -> Iterator[Line]:
    maintenance = services * one.maintenance
    text = f"event loop {one.loop:.2f}, flush thread {one.flush:.2f}, maintenance {maintenance:.2f} of one service"
    if maintenance > HEADROOM:
        text += ": too much for its thread, raise --every"
    yield Line(
        quantity="cores of a service", value=one.cores + maintenance - one.maintenance, unit="cores", formula=text
    )
    text = "largest, with maintenance of the store"
    yield Line(quantity="memory of a service", value=one.memory, unit="MB", formula=text)


def _bytes(load: Load, costs: Costs) -> Iterator[Line]:
    fetched = load.samples * costs.wire_sample + load.records * costs.wire_record
    rows = load.tensor_rows * STATISTICS * costs.stored_sample * DAY
    scalars = load.scalar_rows * costs.stored_scalar * DAY
    raw_days = min(load.days, load.raw_days or load.days)
    rollups = load.tensor_rows * DAY / max(1.0, BUCKET_STEPS / load.every) * costs.rollup
    whole = rows * raw_days + scalars * load.days + rollups * (load.days - raw_days)
    yield Line(quantity="fetched from ranks", value=fetched / 1e6, unit="MB per second", formula="samples, and records")
    yield Line(quantity="stored", value=(rows + scalars) / 1e9, unit="GB per day", formula="after compaction")
    text = f"raw statistics for {raw_days:g} days, then rollups" if load.raw_days else "all rows kept: see --raw-days"
    yield Line(quantity=f"store after {load.days:g} days", value=whole / 1e9, unit="GB", formula=text)


def _requests(load: Load, costs: Costs, one: Service, services: int) -> Iterator[Line]:
    commits, merges = services * one.commits * HOUR, services * one.merges * HOUR
    merged = merges * MERGE_ROWS / max(1.0, one.rows / one.commits) * costs.flush_files / 2
    written = commits * costs.flush_files + 2 * merges
    writes = written + (commits + merges) * costs.commit_writes
    reads = (commits + merges) * costs.commit_reads + merged
    price = (writes * load.write_price + reads * load.read_price) / 1e3 * 24 * 30
    text = f"a flush every {1 / one.commits:.1f} s, and merges"
    yield Line(quantity="commits", value=commits + merges, unit="per hour", formula=text)
    yield Line(quantity="files written", value=written, unit="per hour", formula=f"{costs.flush_files:g} per flush")
    text = f"of a store in a bucket: {writes:,.0f} PUT and LIST, the rest GET"
    yield Line(quantity="requests to S3", value=writes + reads, unit="per hour", formula=text)
    text = f"{load.write_price:g} and {load.read_price:g} per 1,000 requests"
    yield Line(quantity="cost of the requests", value=price, unit="$ in 30 days", formula=text)
