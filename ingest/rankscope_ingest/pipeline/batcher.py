"""Collect poll responses, scrapes and rows of the service in batches, and decide when to flush a batch.

The module performs no I/O, and the time is an argument. The rows of a batch count as pending until the commit of the
batch. The flusher retries a failed batch unchanged and before the next batch. Rows of an incarnation are therefore
never reordered, and the watermark is always the end of a sequence of records without gaps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.record_channel.bodies import ValidBody, decode, plain_text
from rankscope_ingest.scrape.sample_table import Grid, Scrape

SAMPLES_A_ROW: Final = 3
"""Number of samples of exporters that together count as one row in the decision whether a batch is full.

The number is high because larger flushes are cheaper: each flush stores the names of all series again. The cost per
sample of a flush with five scrapes is one third lower than that of a flush with three scrapes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBatch:
    """The content of one commit, as received. The flush thread decodes the poll responses and builds the tables."""

    pieces: Mapping[str, tuple[pa.Table, ...]]
    bodies: tuple[ValidBody, ...] = ()
    scrapes: tuple[Scrape, ...] = ()
    grid: Grid = field(default_factory=Grid)  # caches the series names of previous batches
    watermarks: Mapping[str, int]
    rows: int
    info: Mapping[str, str] = field(default_factory=dict)  # stored in the information of the commit

    def as_it_came(self) -> object:
        """Return the undecoded content of the batch. This content is written to quarantine if it cannot be decoded."""
        return self

    def parts(self) -> Sequence[PendingBatch]:
        """Divide the batch into the smallest batches that can be stored one after another.

        Each poll response is in one batch, together with the rows of the service that have the seq of one of its
        records, such as gap events. If these rows came later, the store would drop them as already stored. Rows without
        a seq are in further batches, one for each table.
        """
        found, pieces = [], [(dataset, table) for dataset, tables in self.pieces.items() for table in tables]
        pieces += [("samples", scrape.table()) for scrape in self.scrapes]
        for body in self.bodies:
            beside, rest = [], []
            for dataset, table in pieces:
                own = _of(table, body.context.incarnation, body.last)
                beside.append((dataset, table.filter(own)))
                rest.append((dataset, table.filter(pc.invert(own))))
            pieces = [(dataset, table) for dataset, table in rest if table.num_rows]
            found.append(_part(self, beside, (body,), {body.context.incarnation: body.last}))
        known = {name for part in found for name in part.watermarks}
        left = {name: seq for name, seq in self.watermarks.items() if name not in known}
        numbered = [(dataset, table.filter(_numbered(table))) for dataset, table in pieces]
        if left or any(table.num_rows for _, table in numbered):
            found.append(_part(self, numbered, (), left))
        return found + [
            _part(self, [(dataset, others)], (), {})
            for dataset, table in pieces
            if (others := table.filter(pc.invert(_numbered(table)))).num_rows
        ]

    def tables(self) -> dict[str, pa.Table]:
        """Decode the content of the batch; return a mapping from dataset to table."""
        tables = decode(self.bodies) if self.bodies else {}
        for dataset, pieces in self.pieces.items():
            decoded = [plain_text(tables[dataset])] if dataset in tables else []
            tables[dataset] = pa.concat_tables([*decoded, *pieces])
        if self.scrapes:
            scraped = self.grid.table(self.scrapes)
            tables["samples"] = pa.concat_tables([scraped, tables["samples"]]) if "samples" in tables else scraped
        return tables


def _part(batch: PendingBatch, pieces: list[tuple[str, pa.Table]], bodies: Any, watermarks: Any) -> PendingBatch:
    kept: dict[str, tuple[pa.Table, ...]] = {}
    for dataset, table in pieces:
        if table.num_rows:
            kept[dataset] = (*kept.get(dataset, ()), table)
    rows = sum(body.rows for body in bodies) + sum(table.num_rows for tables in kept.values() for table in tables)
    return PendingBatch(pieces=kept, bodies=bodies, watermarks=watermarks, rows=rows, info=batch.info)


def _numbered(table: pa.Table) -> pa.ChunkedArray:
    """Return a boolean mask of the rows that have a sequence number (seq), and thus belong to a record of a process."""
    if "seq" not in table.column_names or "incarnation" not in table.column_names:
        return pa.chunked_array([pa.repeat(pa.scalar(False), table.num_rows)])
    return pc.and_(pc.is_valid(table["seq"]), pc.is_valid(table["incarnation"]))


def _of(table: pa.Table, incarnation: str, last: int) -> pa.ChunkedArray:
    numbered = _numbered(table)
    if not pc.any(numbered).as_py():
        return numbered
    of_process = pc.equal(table["incarnation"].cast(pa.string()), incarnation)
    return pc.fill_null(pc.and_kleene(pc.and_(of_process, numbered), pc.less_equal(table["seq"], last)), False)


@dataclass(slots=True, kw_only=True)
class FlushClock:
    """Counts pending rows and decides when the next flush is due. Rows are pending until their commit.

    `rest_seconds` returns the time until the batch becomes due because of its age. The flusher is notified of every
    event that can make a batch due earlier: a batch starts, a batch is full, or a flush is requested.
    """

    flush_rows: int
    flush_after_seconds: float
    max_pending_rows: int
    _notify: Callable[[], None] = field(default=lambda: None, repr=False)
    _rows: int = 0
    _samples: int = 0  # of the rows, the samples of exporters
    _rows_in_flight: int = 0
    _opened_at: float | None = None
    _wanted: bool = False

    @property
    def pending_rows(self) -> int:
        """Return the number of rows that are received but not committed yet."""
        return self._rows + self._rows_in_flight

    @property
    def is_empty(self) -> bool:
        """Return whether the current batch is empty. An earlier batch may still be waiting for its commit."""
        return self._opened_at is None

    @property
    def is_full(self) -> bool:
        """Return whether polls and scrapes must wait because too many rows are pending."""
        return self.pending_rows >= self.max_pending_rows

    def free_rows(self) -> int:
        """Return how many more rows may become pending before polls and scrapes must wait."""
        return self.max_pending_rows - self.pending_rows

    def notify(self, flusher: Callable[[], None]) -> None:
        """Set the function to call when the batch may be due earlier than the last result of `rest_seconds`."""
        self._notify = flusher

    def want_flush(self) -> None:
        """Request a flush as soon as an earlier batch is committed."""
        if not self.is_empty:
            self._wanted = True
            self._notify()

    def due(self, now: float) -> str | None:
        """Return the reason why the current batch must be flushed now, or None if a flush is not due.

        The reason is "rows" if the batch is full, "age" if it is old enough, and "wanted" if a flush was requested.
        """
        if self._opened_at is None:
            return None
        if self._is_filled:
            return "rows"
        if self._wanted:
            return "wanted"
        return "age" if now - self._opened_at >= self.flush_after_seconds else None

    def rest_seconds(self, now: float) -> float:
        """Return the seconds until the current batch is due: infinity without a batch."""
        if self._opened_at is None:
            return math.inf
        return 0.0 if self._is_filled or self._wanted else self._opened_at + self.flush_after_seconds - now

    def take(self) -> PendingBatch:
        """Return the current batch and start an empty one.

        The rows of the returned batch count as pending until `release` is called for this batch.
        """
        raise NotImplementedError

    def release(self, batch: PendingBatch) -> None:
        """Subtract the rows of a committed batch from the pending rows."""
        self._rows_in_flight -= batch.rows

    @property
    def _weight(self) -> int:
        return self._rows - self._samples + self._samples // SAMPLES_A_ROW

    @property
    def _is_filled(self) -> bool:
        return self._weight >= self.flush_rows or self._rows >= self.max_pending_rows

    def _opened(self, now: float) -> None:
        """Start a batch if there is none; notify the flusher if a batch starts or is full."""
        is_first = self._opened_at is None
        if is_first:
            self._opened_at = now
        if is_first or self._is_filled:
            self._notify()

    def _taken(self) -> None:
        """Count the rows of the current batch as rows that are being committed.

        Rows that are added later start another batch.
        """
        self._rows_in_flight += self._rows
        self._rows, self._samples, self._opened_at, self._wanted = 0, 0, None, False


@dataclass(slots=True, kw_only=True)
class Batcher(FlushClock):
    """The current batch: poll responses of ranks, scrapes of exporters, and rows that the service creates."""

    _pieces: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    _bodies: list[ValidBody] = field(default_factory=list)
    _scrapes: list[Scrape] = field(default_factory=list)
    _grid: Grid = field(default_factory=Grid)
    _watermarks: dict[str, int] = field(default_factory=dict)

    def add_body(self, body: ValidBody, now: float) -> None:
        """Add a poll response. When it is committed, its last seq becomes the watermark of the process that sent it."""
        self._bodies.append(body)
        self._rows += body.rows
        self.add({}, now, watermarks={body.context.incarnation: body.last})

    def add_scrape(self, scrape: Scrape, now: float) -> None:
        """Add the samples of one scrape to the batch."""
        self._scrapes.append(scrape)
        self._rows += scrape.rows
        self._samples += scrape.rows
        self.add({}, now)

    def add(self, tables: Mapping[str, pa.Table], now: float, *, watermarks: Mapping[str, int] | None = None) -> None:
        """Add tables of rows by dataset, and the watermarks that apply after the commit of these rows.

        A watermark is the last committed sequence number of an incarnation.
        """
        for dataset, table in tables.items():
            if table.num_rows:
                self._pieces[dataset].append(table)
                self._rows += table.num_rows
        self._watermarks.update(watermarks or {})
        # A body without rows still moves a watermark. Its records would otherwise be requested again after a restart.
        if self._pieces or self._watermarks or self._scrapes:
            self._opened(now)

    def take(self) -> PendingBatch:
        """Return the current batch and start an empty one.

        The rows of the returned batch count as pending until `release` is called for this batch.
        """
        batch = PendingBatch(
            pieces={dataset: tuple(pieces) for dataset, pieces in self._pieces.items()},
            bodies=tuple(self._bodies),
            scrapes=tuple(self._scrapes),
            grid=self._grid,
            watermarks=dict(self._watermarks),
            rows=self._rows,
        )
        self._pieces, self._bodies, self._scrapes, self._watermarks = defaultdict(list), [], [], {}
        self._taken()
        return batch
