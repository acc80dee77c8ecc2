"""Which log is which, over time: one that has grown or was moved is the same, one that was replaced is another.

A log is known again by its content: what was read when it was last imported is still its beginning, or, where it has
been cut since, its beginning is still what was read. How far it was read stands in the store as an event of type
`import`, so that no state is kept anywhere else.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType
from rankscope_ingest.base.errors import IngestError
from rankscope_storage.connection import Connection

_IDENTITY_BYTES: Final = 4096
_PROBE_BYTES: Final = 1 << 16
_LISTED_ENDS: Final = 10_000
_FIRST_MARK: Final = 8

KNOWN: Final = "SELECT details FROM events WHERE run = $run AND type = $type ORDER BY ordinal"


@dataclass(frozen=True, slots=True)
class End:
    """How far a rank had come when its log was last read."""

    attempt: int
    step: int | None
    ts: int | None  # UTC µs


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownImport:
    """What the store knows of a log that was imported."""

    incarnation: str
    path: str
    kind: str
    marks: tuple[tuple[int, str], ...]
    """Sizes, rising, and digests of so many bytes from the beginning; the last is of all that was read.

    A folder has none.
    """

    records: int
    malformed: int = 0
    attempt: int = 0
    """Where the log's own attempt 0 stands in the run."""

    ends: Mapping[int | None, End] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the `details` of the event."""
        ends = [[rank, end.attempt, end.step, end.ts] for rank, end in self.ends.items()][:_LISTED_ENDS]
        named = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ends"}
        return json.dumps({**named, "ends": ends}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> KnownImport:
        """Return what `to_json` wrote. Raises ValueError for anything else."""
        try:
            document = json.loads(text)
            ends = {rank: End(attempt, step, ts) for rank, attempt, step, ts in document["ends"]}
            marks = tuple((int(size), str(digest)) for size, digest in document["marks"])
            known = {name: document[name] for name in KnownImport.__dataclass_fields__}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an import: {error!r}") from error
        return KnownImport(**(known | {"ends": ends, "marks": marks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A log about to be read. `before` is what the store knows of it, None when it is new to it."""

    incarnation: str
    before: KnownImport | None = None
    replaced: KnownImport | None = None
    """Another log that stood at the same path."""


def known_imports(connection: Connection, run: str) -> list[KnownImport]:
    """Return the logs that were imported as `run`, each as it was last read, in the order of their first import."""
    rows = connection.query(KNOWN, {"run": run, "type": EventType.IMPORT.value}).to_pylist()
    latest: dict[str, KnownImport] = {}
    for row in rows:
        known = _parsed(row["details"])
        if known is not None:
            latest[known.incarnation] = known
    return list(latest.values())


def _parsed(details: str | None) -> KnownImport | None:
    try:
        return KnownImport.from_json(details or "")
    except ValueError:
        return None  # of a newer version, or by another hand: the watermark still keeps rows from being stored twice


def identify(path: Path, run: str, known: Sequence[KnownImport], identity: str | None = None) -> Source:
    """Return which log stands at `path`: one of `known`, or a new one. `identity` is what its content says it is."""
    if identity is not None:
        incarnation = stream_of(run, identity)
        return Source(incarnation=incarnation, before=_of(incarnation, known))
    if path.is_dir():
        incarnation = incarnation_of(path, run)
        return Source(incarnation=incarnation, before=_of(incarnation, known))
    named = [one for one in known if Path(one.path).name == path.name and one.marks]
    moved = [one for one in known if one not in named and one.records and not _still_there(one, path)]
    for candidates in (named, moved):
        for one in sorted(candidates, key=lambda one: -one.marks[-1][0] if one.marks else 0):
            if begins_like(path, one.marks):
                return Source(incarnation=one.incarnation, before=one)
    taken = {one.incarnation for one in known}
    own = (incarnation_of(path, run, generation=generation) for generation in itertools.count())
    return Source(incarnation=next(one for one in own if one not in taken), replaced=named[-1] if named else None)


def marks(path: Path, size: int) -> tuple[tuple[int, str], ...]:
    """Return digests of the first `size` bytes and of the powers of two below. Raises IngestError when unreadable."""
    sizes = [1 << power for power in range(_FIRST_MARK, 63) if 1 << power < size]
    found = [(one, _digest(path, one)) for one in [*sizes, size]]
    return tuple((one, digest) for one, digest in found if digest is not None)


def begins_like(path: Path, known: Sequence[tuple[int, str]]) -> bool:
    """Return whether a file and what was read of another have the same beginning, as far as the shorter one goes."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    fitting = [mark for mark in known if mark[0] <= size]
    return bool(fitting) and _digest(path, fitting[-1][0]) == fitting[-1][1]


def _digest(path: Path, size: int) -> str | None:
    """Return a digest of how the first `size` bytes begin and end. None when there are not so many."""
    try:
        with path.open("rb") as file:
            begin = file.read(min(size, _PROBE_BYTES))
            file.seek(max(0, size - _PROBE_BYTES))
            end = file.read(min(size, _PROBE_BYTES))
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(end) < min(size, _PROBE_BYTES):
        return None
    return hashlib.sha256(b"%d\0%s\0%s" % (size, begin, end)).hexdigest()[:32]


def stream_of(log: str, source: str) -> str:
    """Return the identity of the stream `source` of a log (or run), wherever that stands and whatever it is called."""
    digest = hashlib.sha256(b"\0".join(text.encode("utf-8", "surrogateescape") for text in (log, source))).hexdigest()
    return f"import-{digest[:32]}"


def incarnation_of(path: Path, run: str, source: str = "", *, generation: int = 0) -> str:
    """Return the identity of a log: its name and first line, which stay when it grows.

    `source` is a stream within it; `generation` tells it from others of the same name and first line.
    """
    first_line = b""
    try:
        if path.is_file():
            with path.open("rb") as file:
                first_line = file.readline(_IDENTITY_BYTES)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    parts: list[Any] = [run.encode(), path.name.encode("utf-8", "surrogateescape"), first_line]
    parts += [source.encode("utf-8", "surrogateescape")] if source else []
    parts += [b"generation %d" % generation] if generation else []
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"import-{digest[:32]}"


def _of(incarnation: str, known: Sequence[KnownImport]) -> KnownImport | None:
    return next((one for one in known if one.incarnation == incarnation), None)


def _still_there(one: KnownImport, path: Path) -> bool:
    """Return whether the log that was read stands where it did: then one of the same content is a copy of it."""
    there = Path(one.path)
    try:
        return there.is_file() and not there.samefile(path) and begins_like(there, one.marks)
    except (OSError, IngestError):
        return False


@dataclass(slots=True)
class Extent:
    """What is known of one attempt. Times are UTC µs."""

    first_ts: int | None = None
    last_ts: int | None = None
    last_step: int | None = None


class Extents:
    """Follows the tables of an import."""

    def __init__(self) -> None:
        self.by_attempt: dict[int, Extent] = {}
        self.ends: dict[int | None, End] = {}

    @property
    def last_step(self) -> int | None:
        """The highest step of all."""
        return max((one.last_step for one in self.by_attempt.values() if one.last_step is not None), default=None)

    def add(self, tables: Mapping[str, pa.Table]) -> None:
        """Take the rows of tables into account."""
        for table in tables.values():
            for row in _summary(table):
                self._add(row["attempt"] or 0, row["rank"], row["step_max"], row["ts_min"], row["ts_max"])

    def _add(self, attempt: int, rank: int | None, step: int | None, first: int | None, last: int | None) -> None:
        extent = self.by_attempt.setdefault(attempt, Extent())
        extent.first_ts = _least(extent.first_ts, first)
        extent.last_ts = _most(extent.last_ts, last)
        extent.last_step = _most(extent.last_step, step)
        end = self.ends.get(rank)
        if end is None or attempt > end.attempt:
            self.ends[rank] = End(attempt, step, last)
        elif attempt == end.attempt:
            self.ends[rank] = End(attempt, _most(end.step, step), _most(end.ts, last))


def first_attempt(tables: Mapping[str, pa.Table], known: Iterable[KnownImport]) -> int:
    """Return where attempt 0 of a new log stands in a run of which other logs are known.

    It goes on with the attempt that a log before it ended in when its steps go on from there, or when it was written at
    the same time, as that of another node. Steps that start again are another attempt.
    """
    ends: dict[int | None, End] = {}
    for one in known:
        for rank, end in one.ends.items():
            if rank not in ends or _order(end) > _order(ends[rank]):
                ends[rank] = end
    found = 0
    for table in tables.values():
        for row in _summary(table):
            before = ends.get(row["rank"])
            if before is not None and not row["attempt"]:
                found = max(found, _following(before, row["step_min"], row["ts_min"]))
    return found


def _following(before: End, step: int | None, ts: int | None) -> int:
    if ts is not None and before.ts is not None and ts <= before.ts:
        return 0  # written at the same time
    if step is None or before.step is None or step > before.step:
        return before.attempt
    return before.attempt + 1


def _order(end: End) -> tuple[int, int]:
    return end.attempt, -1 if end.step is None else end.step


def _summary(table: pa.Table) -> list[dict[str, int | None]]:
    """Return lowest and highest step and time of each (attempt, rank) of a table."""
    count = table.num_rows
    columns = {
        name: table.column(name) if name in table.column_names else pa.nulls(count, pa.int64())
        for name in ("attempt", "rank", "step", "ts")
    }
    columns["ts"] = columns["ts"].cast(pa.int64())
    wanted = [(name, how) for name in ("step", "ts") for how in ("min", "max")]
    found: list[dict[str, int | None]] = (
        pa.table(columns).group_by(["attempt", "rank"], use_threads=False).aggregate(wanted).to_pylist()
    )
    return found


def _least(one: int | None, other: int | None) -> int | None:
    return min((value for value in (one, other) if value is not None), default=None)


def _most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
