"""What an importer is, and what it yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

KEPT_FAULTS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecord:
    """What a log says about one step. `rows` holds rows by dataset, without the columns that all rows have."""

    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    step: int | None = None
    rank: int | None = None
    ts: int | None = None  # UTC µs, as the log tells it
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that could not be read."""

    line: int
    text: str


@dataclass(slots=True)
class Faults:
    """Counts what could not be read, and keeps the first few for the user."""

    count: int = 0
    first: list[Fault] = field(default_factory=list)

    def add(self, line: int, text: str) -> None:
        """Note that `line` (from 1) could not be read, and why."""
        self.count += 1
        if len(self.first) < KEPT_FAULTS:
            self.first.append(Fault(line, text))


class Importer(Protocol):
    """Reads one format."""

    name: str
    """Stored as `source_kind` of the run."""

    def detect(self, path: Path, head: bytes) -> float:
        """Return how sure it is, 0 (not this format) … 1, that it understands a file that begins with `head`."""
        ...

    def read(self, path: Path, faults: Faults) -> Iterator[ImportedRecord]:
        """Yield the records in the order of the file, without holding all of them.

        A file that has grown must yield the same records first: their number in this order is their identity.
        """
        ...
