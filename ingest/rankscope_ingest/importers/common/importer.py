"""What an importer is, and what it yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import pyarrow as pa

KEPT_FAULTS: Final = 20
FROM_LOG: Final = "log"
FROM_FILE: Final = "file"

RECORD_COLUMN: Final = "record"
"""Column of a block's tables: the record a row belongs to, from 0 within the block."""


@dataclass(frozen=True, slots=True)
class Detection:
    """How sure an importer is, 0 (not this format) … 1, and why, in a few words for the user."""

    confidence: float
    because: str


NOT_MINE: Final = Detection(0.0, "nothing of this format in it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecord:
    """What a log says about one step. `rows` holds rows by dataset, without the columns that all rows have.

    `source` names one stream of a folder (a file, a rank): records are numbered within it, so that a stream may grow
    without moving the numbers of another. A plain file has one, without a name.
    """

    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    step: int | None = None
    rank: int | None = None
    ts: int | None = None  # UTC µs, as the log tells it
    attempt: int = 0  # within this log, from 0
    micro_step: int | None = None
    ts_origin: str = FROM_LOG
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedBlock:
    """Many records of one source at once, in columns: the fast path.

    Each table holds columns of its dataset and `record` (int32, from 0 within the block); step, rank, ts, attempt,
    micro_step, vpp_stage and ts_origin stand in it where rows have them, and are null where they are absent.
    """

    records: int
    tables: Mapping[str, pa.Table]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """What a log says about the run as a whole. May come at any time; of several, each field's last value counts."""

    state: str | None = None  # see RunState
    reason: str | None = None
    planned_steps: int | None = None
    world_size: int | None = None
    config: str | None = None  # JSON
    started_at: int | None = None  # UTC µs
    ended_at: int | None = None


Imported = ImportedRecord | ImportedBlock | ImportedRun


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that could not be read."""

    line: int
    text: str


@dataclass(slots=True)
class Faults:
    """Counts what could not be read, and keeps the first few for the user; also how far the reading has come."""

    count: int = 0
    first: list[Fault] = field(default_factory=list)
    passed_over: int = 0
    """Lines that say nothing of what the importer looks for: other output in between, which is no fault."""
    read_bytes: int = 0
    """Set by whoever reads the file, for the progress bar."""

    def add(self, line: int, text: str) -> None:
        """Note that `line` (from 1) could not be read, and why."""
        self.count += 1
        if len(self.first) < KEPT_FAULTS:
            self.first.append(Fault(line, text))


class Importer(Protocol):
    """Reads one format."""

    name: str
    """Stored as `source_kind` of the run."""

    def detect(self, path: Path, head: bytes) -> Detection:
        """Say how likely it understands what begins with `head`; a folder comes with an empty head."""
        ...

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield what the log says in its own order, without holding all of it.

        A log that has grown must yield the same records first: their number within their source is their identity.
        """
        ...


@runtime_checkable
class KnownByContent(Protocol):
    """An importer of files written anew as they grow: their beginning changes, what they tell of first stays."""

    def identity(self, path: Path) -> str | None:
        """Return what every version and copy of the log at `path` has in common; None while it tells of nothing."""
        ...
