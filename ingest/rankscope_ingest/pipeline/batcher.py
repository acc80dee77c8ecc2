"""Gather decoded bodies into batches: when to flush, what goes into one, when to stop pulling. Pure, no I/O.

The clock is an argument. A batch that was taken stays counted until it is committed: whoever took it tries it again,
unchanged and before the next one, so rows are never reordered within an incarnation and the watermark stays the last
seq of an unbroken prefix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from rankscope_ingest.record_channel.decode import decode, plain_text
from rankscope_ingest.record_channel.validate import ValidBody
from rankscope_ingest.scrape.sample_table import Grid, Scrape

SAMPLES_A_ROW: Final = 3
"""So many samples of exporters are due like one row of a rank: they are narrow, and each flush has the names of all
series once more, so that a sample costs two thirds in a flush of five scrapes of what it costs in one of three."""

SOON_SECONDS: Final = 2.0
"""Whoever wants a flush waits so long at most for one that comes anyway: where ranks come and go all the time, each
would else cut a file short, and every row would be written twice, to merge what was cut."""

_LOOK_SECONDS: Final = 0.25  # how often it is seen whether such a wait is over
_MOMENT: Final = 1e-3  # no batch fills faster


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBatch:
    """What one commit will hold, as it came: decoding bodies and joining tables is work for the flush thread."""

    pieces: Mapping[str, tuple[pa.Table, ...]]
    bodies: tuple[ValidBody, ...] = ()
    scrapes: tuple[Scrape, ...] = ()
    grid: Grid = field(default_factory=Grid)  # knows the names of what the batches before scraped
    watermarks: Mapping[str, int]
    rows: int
    info: Mapping[str, str] = field(default_factory=dict)  # for the log, beside the commit

    def as_it_came(self) -> object:
        """Return what is worth keeping of a batch of which no tables can be made."""
        return self

    def tables(self) -> dict[str, pa.Table]:
        """Return one table per dataset."""
        tables = decode(self.bodies) if self.bodies else {}
        for dataset, pieces in self.pieces.items():
            others = [plain_text(tables[dataset])] if dataset in tables else []
            tables[dataset] = pa.concat_tables([*others, *pieces])
        if self.scrapes:
            scraped = self.grid.table(self.scrapes)
            tables["samples"] = pa.concat_tables([scraped, tables["samples"]]) if "samples" in tables else scraped
        return tables


@dataclass(slots=True, kw_only=True)
class FlushClock:
    """Rows on their way to the store: when they are due, and how many. They count until their commit is settled.

    Age alone makes a batch due after `rest_seconds`; whoever flushes is told when anything else does: a batch begins,
    is full, or is wanted.
    """

    flush_rows: int
    flush_after_seconds: float
    max_pending_rows: int
    _tell: Callable[[], None] = field(default=lambda: None, repr=False)
    _rows: int = 0
    _samples: int = 0  # of the rows, those that exporters were scraped for
    _rows_in_flight: int = 0
    _opened_at: float | None = None
    _wanted: bool = False
    _wanted_at: float | None = None  # when `due` first saw that it is
    _filled: tuple[float, int] | None = None  # when the batch before was opened, and what it held
    _rate: float = 0.0  # how fast that one filled, a second

    @property
    def pending_rows(self) -> int:
        """Return rows that came and are not yet committed."""
        return self._rows + self._rows_in_flight

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is gathered; a batch may be in flight all the same."""
        return self._opened_at is None

    @property
    def is_full(self) -> bool:
        """Return whether whoever brings more has to wait for a commit."""
        return self.pending_rows >= self.max_pending_rows

    @property
    def free_rows(self) -> int:
        """Return for how many rows there is room."""
        return self.max_pending_rows - self.pending_rows

    def tell(self, flusher: Callable[[], None]) -> None:
        """Call `flusher` from now on when something may be due sooner than `rest_seconds` said."""
        self._tell = flusher

    def want_flush(self) -> None:
        """Make the batch due at once, or when it is full anyway: a rank drains, or somebody is to be told of it."""
        if not self.is_empty:
            self._wanted = True
            self._tell()

    def due(self, now: float) -> str | None:
        """Return why the batch should be flushed now ("rows", "age", "wanted"), or None."""
        if self._opened_at is None:
            return None
        if self._is_filled:
            return "rows"
        if self._wanted and not self._is_worth_waiting(now):
            return "wanted"
        return "age" if now - self._opened_at >= self.flush_after_seconds else None

    def rest_seconds(self, now: float) -> float:
        """Return for how long nothing will be due if nothing is told by then."""
        if self._opened_at is None:
            return math.inf
        if self._is_filled:
            return 0.0
        return _LOOK_SECONDS if self._wanted else self._opened_at + self.flush_after_seconds - now

    def release(self, batch: PendingBatch) -> None:
        """Forget `batch`: it is committed."""
        self._rows_in_flight -= batch.rows

    @property
    def _weight(self) -> int:
        return self._rows - self._samples + self._samples // SAMPLES_A_ROW

    @property
    def _is_filled(self) -> bool:
        return self._weight >= self.flush_rows or self._rows >= self.max_pending_rows

    def _is_worth_waiting(self, now: float) -> bool:
        """Return whether the batch will be full at once, if it goes on to fill as the one before did."""
        if self._wanted_at is None:
            self._wanted_at = now
        return now - self._wanted_at < SOON_SECONDS and self.flush_rows - self._weight <= self._rate * SOON_SECONDS

    def _opened(self, now: float) -> None:
        """Note that something was gathered: it opens a batch, or fills one."""
        is_first = self._opened_at is None
        if is_first:
            self._opened_at = now
            if self._filled is not None:
                since, weight = self._filled
                self._rate = weight / max(now - since, _MOMENT)
        if is_first or self._is_filled:
            self._tell()

    def _handed_over(self) -> None:
        """Count what was gathered as on its way; what comes next opens another batch."""
        self._rows_in_flight += self._rows
        if self._opened_at is not None:
            self._filled = self._opened_at, self._weight
        self._rows, self._samples, self._opened_at, self._wanted, self._wanted_at = 0, 0, None, False, None


@dataclass(slots=True, kw_only=True)
class Batcher(FlushClock):
    """What ranks, exporters and the service itself bring; rows in flight bound the pulls."""

    _pieces: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    _bodies: list[ValidBody] = field(default_factory=list)
    _scrapes: list[Scrape] = field(default_factory=list)
    _grid: Grid = field(default_factory=Grid)
    _watermarks: dict[str, int] = field(default_factory=dict)

    def add_body(self, body: ValidBody, now: float) -> None:
        """Take a body, and the last seq it brings its incarnation to."""
        self._bodies.append(body)
        self._rows += body.rows
        self.add({}, now, watermarks={body.context.incarnation: body.last})

    def add_scrape(self, scrape: Scrape, now: float) -> None:
        """Take what was scraped of an exporter."""
        self._scrapes.append(scrape)
        self._rows += scrape.rows
        self._samples += scrape.rows
        self.add({}, now)

    def add(self, tables: Mapping[str, pa.Table], now: float, *, watermarks: Mapping[str, int] | None = None) -> None:
        """Take `tables`, and the last seq they bring each incarnation to."""
        for dataset, table in tables.items():
            if table.num_rows:
                self._pieces[dataset].append(table)
                self._rows += table.num_rows
        self._watermarks.update(watermarks or {})
        # A body without rows still moves a watermark, or its records would be asked for again after a restart.
        if self._pieces or self._watermarks or self._scrapes:
            self._opened(now)

    def take(self) -> PendingBatch:
        """Return everything gathered; it stays counted until `settled`."""
        batch = PendingBatch(
            pieces={dataset: tuple(pieces) for dataset, pieces in self._pieces.items()},
            bodies=tuple(self._bodies),
            scrapes=tuple(self._scrapes),
            grid=self._grid,
            watermarks=dict(self._watermarks),
            rows=self._rows,
        )
        self._pieces, self._bodies, self._scrapes, self._watermarks = defaultdict(list), [], [], {}
        self._handed_over()
        return batch
