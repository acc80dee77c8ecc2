"""Recognize logs that were imported before, even if a log has grown or was moved since then.

A log is the same if it still begins with the bytes that the last import read, whatever its path is. A log that was
truncated since then is the same if its whole content is the beginning of these bytes, and one that has lost its
beginning, if it contains the last lines that the last import read. Each import is stored as an event of type `import`,
which contains the number and digests of the bytes read, and the state from which the next import reads on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType
from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_name
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.decisions import Choices
from rankscope_ingest.importers.common.failures import ending_after, failure_event
from rankscope_ingest.importers.common.lines import open_log, readable
from rankscope_storage.base.datasets import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.connection import Connection

_IDENTITY_BYTES: Final = 4096
PROBE_BYTES: Final = 1 << 16
_LISTED_ENDS: Final = 10_000
_FIRST_MARK: Final = 8

Mark = tuple[int, str]
"""A size, and a digest of that many bytes from the beginning of a log."""

_TAIL_BYTES: Final = 1 << 16
_TAIL_LINES: Final = (1, 4, 16, 64)
_DIGIT: Final = re.compile(rb"\d")

_KNOWN: Final = """\
SELECT run, arg_max(details, ordinal) AS details FROM events WHERE {} AND type = $type
GROUP BY run, incarnation ORDER BY min(ordinal)"""


@dataclass(frozen=True, slots=True)
class End:
    """The last attempt, step and time of one rank in a log, at the time of its last import."""

    attempt: int
    step: int | None
    ts: int | None  # UTC µs


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownImport:
    """The facts about an imported log that are stored in the details of its import event."""

    incarnation: str
    path: str
    kind: str
    marks: tuple[tuple[int, str], ...]
    """Pairs of a size and a digest of that many bytes from the beginning of the log, by ascending size.

    The last size is the number of bytes that the import read. If the log is a folder, there are no pairs.
    """

    records: int
    malformed: int = 0
    attempt: int = 0
    """The rows of attempt 0 of the log are stored with this attempt number of the run."""

    ends: Mapping[int | None, End] = field(default_factory=dict)
    imported_from: str | None = None
    """Value of the label `imported_from` of the log's scalars; None if they do not have this label."""
    is_settled: bool = False
    """True if the import has left out no record at the end of the log that a later import of the same bytes stores."""
    begins_at: int = 0
    """Number of the first record that is stored for this log.

    The log shares the records before it with another log, for which they are stored.
    """
    choices: Choices | None = None
    """The decision about the step and the loss of the log."""
    state: Mapping[str, Any] | None = None
    """State behind the last complete line, from which the next import reads on; None if it reads the complete log."""
    axis: Mapping[str, Any] | None = None
    """The state of the axis behind the log, which the positions of later logs of the run depend on: see `Positions`."""

    def to_json(self) -> str:
        """Return these facts as the JSON text that is stored in `details` of the import event."""
        ends = [[rank, end.attempt, end.step, end.ts] for rank, end in self.ends.items()][:_LISTED_ENDS]
        named = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ends"}
        named["choices"] = None if self.choices is None else dataclasses.asdict(self.choices)
        return json.dumps({**named, "ends": ends}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> KnownImport:
        """Return the facts in `text`, which `to_json` has written. Raises ValueError for any other text."""
        try:
            document = json.loads(text)
            known = {name: document[name] for name in KnownImport.__dataclass_fields__ if name in document}
            known["ends"] = {rank: End(attempt, step, ts) for rank, attempt, step, ts in document["ends"]}
            known["marks"] = tuple((int(size), str(digest)) for size, digest in document["marks"])
            known["choices"] = Choices.from_json(known["choices"]) if known.get("choices") else None
            known.setdefault("is_settled", document.get("fingerprint") is not None)  # of an earlier release
            return KnownImport(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the details of an import event are invalid: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The identity of a log that is to be read.

    `before` has the facts about the last import of the log; it is None for a log that was never imported.
    """

    incarnation: str
    before: KnownImport | None = None
    replaced: KnownImport | None = None
    """The facts about another log that was imported from the same path before; None if there is no such log."""
    begins_at: int = 0
    """Number of the first record to store.

    The log shares the records before it with another log, for which they are already stored.
    """
    branches_from: KnownImport | None = None
    """The facts about an imported log that has the same beginning as this new log, but differs from it later.

    None if there is no such imported log.
    """
    behind: tuple[int, int] | None = None
    """Offset of the first new byte, and number of the lines before it, in a log that has lost its beginning."""


def known_imports(connection: Connection, run: str) -> list[KnownImport]:
    """Return the logs that were imported into `run`, in order of their first import.

    Each log has the facts of its last import.
    """
    return known_imports_of(connection, [run])[run]


def known_imports_of(connection: Connection, runs: Collection[str]) -> dict[str, list[KnownImport]]:
    """Return the result of `known_imports` for each of `runs`, with one query."""
    condition, parameters = any_of(runs)
    latest: dict[str, dict[str, KnownImport]] = {run: {} for run in runs}
    for row in connection.query(_KNOWN.format(condition), parameters | {"type": EventType.IMPORT.value}).to_pylist():
        try:
            known = KnownImport.from_json(row["details"] or "")
        except ValueError:
            continue  # of a newer release or another program; the watermark still prevents duplicate rows
        latest[row["run"]][known.incarnation] = known
    return {run: list(logs.values()) for run, logs in latest.items()}


def any_of(runs: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return an SQL condition that the column `run` is one of `runs`, and the parameters of the condition.

    The store selects files by such a condition, but not by a condition with a list as its parameter.
    """
    named = {f"run_{number}": run for number, run in enumerate(runs)}
    return f"run IN ({', '.join(f'${name}' for name in named)})", named


def stored_path(path: Path) -> str:
    """Return the absolute `path` as an import event contains it, with secrets masked."""
    return redacted_name(str(path.absolute()), MAX_DOCUMENT)


def identify(path: Path, run: str, known: Sequence[KnownImport], identity: str | None = None) -> Source:
    """Return the identity of the log at `path`, which is a log in `known` or a new log.

    `identity` is a text that all versions of the log share; it is None if the importer does not provide such a text.
    """
    if identity is not None or path.is_dir():
        incarnation = incarnation_of(path, run) if identity is None else stream_of(run, identity)
        before = next((log for log in known if log.incarnation == incarnation), None)
        return Source(incarnation=incarnation, before=before)
    name = stored_path(path).rpartition("/")[2]
    named = [log for log in known if log.path.rpartition("/")[2] == name and log.marks]
    candidates = [*named, *(log for log in known if log not in named and log.records and log.marks)]
    for log in sorted(candidates, key=lambda log: (log not in named, -log.marks[-1][0])):
        if has_equal_beginning(path, log.marks):
            return Source(incarnation=log.incarnation, before=log, begins_at=log.begins_at)
    if (found := _without_beginning(path, candidates)) is not None:
        return found
    taken = {log.incarnation for log in known}
    free = (incarnation_of(path, run, generation=generation) for generation in itertools.count())
    incarnation = next(candidate for candidate in free if candidate not in taken)
    return Source(incarnation=incarnation, replaced=named[-1] if named else None)


def with_common_beginning(path: Path, known: Iterable[KnownImport]) -> KnownImport | None:
    """Return the log in `known` that has the longest common beginning with the file at `path`, of 256 bytes or more."""
    digests: dict[int, str | None] = {}
    longest: tuple[int, KnownImport | None] = (0, None)
    for log in known:
        for size, digest in log.marks:
            if size not in digests:
                digests[size] = _digest(path, size)
            if digests[size] == digest and size > longest[0]:
                longest = size, log
    return longest[1]


def is_unchanged(path: Path, log: KnownImport) -> bool:
    """Return whether the file at `path` is the log `log` with the content that was imported completely."""
    with readable(path):
        if not (log.is_settled and log.marks and log.path == stored_path(path) and path.is_file()):
            return False
        return path.stat().st_size == log.marks[-1][0] and has_equal_beginning(path, log.marks)


def is_shorter(path: Path, log: KnownImport | None) -> bool:
    """Return whether the file at `path` has only the beginning of the imported log `log`."""
    return log is not None and bool(log.marks) and path.stat().st_size < log.marks[-1][0]


def tails(path: Path, offset: int) -> list[tuple[int, str]]:
    """Return pairs of a size and a digest of the last 1, 4, 16 and 64 lines before `offset`, the end of a line."""
    with readable(path), open_log(path) as file:
        file.seek(max(0, offset - _TAIL_BYTES))
        block = file.read(min(offset, _TAIL_BYTES))
    lines = block.splitlines(keepends=True)
    texts = [b"".join(lines[-count:]) for count in _TAIL_LINES if count <= len(lines)]
    return [(len(text), _short(text)) for text in texts]


def _without_beginning(path: Path, known: Sequence[KnownImport]) -> Source | None:
    """Return the identity of a log that contains the last lines of a log in `known`, at another place."""
    wanted: dict[int, list[tuple[KnownImport, list[tuple[int, str]]]]] = {}
    for log in known:
        if log.state is not None and log.state["tails"]:
            wanted.setdefault(log.state["tails"][0][0], []).append((log, log.state["tails"]))
    if not wanted:
        return None
    with readable(path), open_log(path) as file:
        offset, recent = 0, deque[bytes](maxlen=_TAIL_LINES[-1])
        for number, line in enumerate(file, 1):
            offset += len(line)
            recent.append(line)
            for log, sizes in wanted.get(len(line), ()):
                # One equal line may be a banner of each start of the program.
                size, digest = max((pair for pair in sizes[1:] or sizes if pair[0] <= offset), default=(1, ""))
                is_last = _short(line) == sizes[0][1] and _DIGIT.search(line)
                if is_last and _short(b"".join(recent)[-size:]) == digest:
                    return Source(incarnation=log.incarnation, before=log, behind=(offset, number))
    return None


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def marks(path: Path, size: int) -> tuple[tuple[int, str], ...]:
    """Return pairs of a size and a digest of that many bytes of the file, ascending by size.

    The sizes are `size` and all lower powers of two from 256. Raises IngestError if the file is unreadable.
    """
    sizes = [1 << power for power in range(_FIRST_MARK, 63) if 1 << power < size]
    found = [(mark, _digest(path, mark)) for mark in [*sizes, size]]
    return tuple((mark, digest) for mark, digest in found if digest is not None)


def has_equal_beginning(path: Path, known: Sequence[tuple[int, str]]) -> bool:
    """Return whether the file at `path` begins like an imported log.

    `known` has pairs of a size and a digest of that many bytes of the imported log, by ascending size. Only one pair is
    compared: the one with the largest size that does not exceed the size of the file.
    """
    with readable(path):
        size = path.stat().st_size
    fitting = next((mark for mark in reversed(known) if mark[0] <= size), None)
    return fitting is not None and _digest(path, fitting[0]) == fitting[1]


def _digest(path: Path, size: int) -> str | None:
    """Return a digest of the first and the last 64 KiB among the first `size` bytes; None if the file is shorter."""
    with readable(path), open_log(path) as file:
        begin = file.read(min(size, PROBE_BYTES))
        file.seek(max(0, size - PROBE_BYTES))
        end = file.read(min(size, PROBE_BYTES))
    return None if len(end) < min(size, PROBE_BYTES) else digest_of(size, begin, end)


def digest_of(size: int, begin: bytes, end: bytes) -> str:
    """Return the digest of a mark: of its size, and of the first and the last 64 KiB of that many bytes."""
    return _short(b"%d\0%s\0%s" % (size, begin, end))


def stream_of(log: str, source: str) -> str:
    """Return the identity of the stream `source` of a log. `log` is the identity of the log or the name of a run.

    The result is a digest of both texts and does not depend on the path of the log.
    """
    return _incarnation([text.encode("utf-8", "surrogateescape") for text in (log, source)])


def incarnation_of(path: Path, run: str, *, generation: int = 0) -> str:
    """Return the identity of a new log: a digest of run, file name and first line.

    None of these three changes when the log grows. `generation` distinguishes logs that have the same name and first
    line.
    """
    first_line = b""
    with readable(path):
        if path.is_file():
            with open_log(path) as file:
                first_line = file.readline(_IDENTITY_BYTES)
    parts = [run.encode(), path.name.encode("utf-8", "surrogateescape"), first_line]
    return _incarnation([*parts, *([b"generation %d" % generation] if generation else [])])


def _incarnation(parts: Sequence[bytes]) -> str:
    return IMPORT_PREFIX + _short(b"\0".join(parts))


@dataclass(slots=True)
class Extent:
    """The first and last time (UTC µs) and the last step of one attempt."""

    first_ts: int | None = None
    last_ts: int | None = None
    last_step: int | None = None
    first_row: int | None = None
    last_row: int | None = None
    """Sequence number of the last row with numbers."""
    last_timed_row: int | None = None
    """Sequence number of the last row with a time."""
    ending: tuple[str, str] | None = None
    """State and reason of an end according to the errors after this row."""

    @property
    def ended_at(self) -> int | None:
        """The last time, or None if it is that of the beginning: most rows are after it, or it is the only time."""
        first, last, timed = self.first_row or 0, self.last_row or 0, self.last_timed_row or 0
        is_of_beginning = last > first and (self.first_ts == self.last_ts or timed - first < last - timed)
        return None if is_of_beginning else self.last_ts


class Extents:
    """The range of times and steps of each attempt, and the end of each rank, in the tables of an import.

    The end of a rank consists of its last attempt, step and time.
    """

    def __init__(self) -> None:
        self.by_attempt: dict[int, Extent] = {}
        self.ends: dict[int | None, End] = {}

    @property
    def last_step(self) -> int | None:
        """The highest step of all attempts, or None without a step."""
        return _highest(*(extent.last_step for extent in self.by_attempt.values()))

    def add(self, tables: Mapping[str, pa.Table]) -> None:
        """Widen the ranges of times and steps of each attempt so that they include the rows of `tables`.

        `tables` maps a dataset to its table.
        """
        for dataset, table in tables.items():
            for row in _summary(table):
                extent = self._add(row["attempt"] or 0, row["rank"], row["step_max"], row["ts_min"], row["ts_max"])
                extent.first_row = _lowest(extent.first_row, row["seq_min"])
                if dataset == "scalars":  # an event may have the time of the row before it
                    extent.last_row, extent.ending = row["seq_max"], None
                    extent.last_timed_row = _highest(extent.last_timed_row, row["timed_max"])
        events = (
            tables["events"].select(["attempt", "seq", "type", "message"]).to_pylist() if "events" in tables else []
        )
        for row in events:
            extent = self.by_attempt[row["attempt"] or 0]
            is_end = row["type"] in {EventType.ERROR, EventType.EXIT}
            found = failure_event(row["message"] or "", is_certain=False) if is_end else None
            if found is not None and row["seq"] > (extent.last_row or -1):
                extent.ending = ending_after(extent.ending, found[1])

    def _add(self, attempt: int, rank: int | None, step: int | None, first: int | None, last: int | None) -> Extent:
        extent = self.by_attempt.setdefault(attempt, Extent())
        extent.first_ts = _lowest(extent.first_ts, first)
        extent.last_ts = _highest(extent.last_ts, last)
        extent.last_step = _highest(extent.last_step, step)
        end = self.ends.get(rank)
        if end is None or attempt > end.attempt:
            self.ends[rank] = End(attempt, step, last)
        elif attempt == end.attempt:
            self.ends[rank] = End(attempt, _highest(end.step, step), _highest(end.ts, last))
        return extent


def first_attempt(tables: Mapping[str, pa.Table], known: Sequence[KnownImport]) -> tuple[int, KnownImport | None]:
    """Return the attempt number of the run with which the rows of attempt 0 of a new log are stored.

    `tables` has the first rows of the new log, `known` the other imported logs of the run. The new log continues the
    last attempt of an earlier log if the steps of the new log are higher, or if both logs were written at the same
    time, for example by two nodes. If the steps of the new log begin again, the new log is the next attempt.

    The second result is a log in `known` that may contain the same steps of the same rank and attempt, or None.
    """
    rows = [row for table in tables.values() for row in _summary(table)] if known else []
    ends: dict[int | None, End] = {}
    for log in known:
        for rank, end in log.ends.items():
            if rank not in ends or _order(end) > _order(ends[rank]):
                ends[rank] = end
    begins = [row for row in rows if row["rank"] in ends and not row["attempt"]]
    attempts = (_next_attempt(ends[row["rank"]], row["step_min"], row["ts_min"]) for row in begins)
    attempt = max(attempts, default=0)
    overlaps = (log for log in known for row in rows if _has_step(log.ends.get(row["rank"]), row["step_min"], attempt))
    return attempt, next(overlaps, None)


def _has_step(end: End | None, step: int | None, attempt: int) -> bool:
    if end is None or end.step is None or step is None:
        return False
    return end.attempt == attempt and step <= end.step


def _next_attempt(before: End, step: int | None, ts: int | None) -> int:
    if ts is not None and before.ts is not None and ts <= before.ts:
        return 0  # written at the same time
    if step is None or before.step is None or step > before.step:
        return before.attempt
    return before.attempt + 1


def _order(end: End) -> tuple[int, int]:
    return end.attempt, -1 if end.step is None else end.step


def _summary(table: pa.Table) -> list[dict[str, int | None]]:
    """Return one row for each (attempt, rank) in a table, with the lowest and highest step and time (UTC µs)."""
    count = table.num_rows
    columns = {
        name: table.column(name) if name in table.column_names else pa.nulls(count, pa.int64())
        for name in ("attempt", "rank", "step", "ts", "seq")
    }
    columns["ts"] = columns["ts"].cast(pa.int64())
    columns["timed"] = pc.if_else(columns["ts"].is_valid(), columns["seq"], None)
    wanted = [(name, function) for name in ("step", "ts", "seq", "timed") for function in ("min", "max")]
    found: list[dict[str, int | None]] = (
        pa.table(columns).group_by(["attempt", "rank"], use_threads=False).aggregate(wanted).to_pylist()
    )
    return found


def _highest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _lowest(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


_KEPT: Final = ("scalars", "events", "samples")
_BY_STATE: Final = """\
SELECT run FROM attempts_history WHERE {condition} AND source_kind = 'live'
UNION SELECT run FROM runs_history WHERE {condition} AND source_kind = 'live'
"""
_BY_SCALARS: Final = "SELECT DISTINCT run FROM scalars WHERE {condition} AND NOT starts_with(incarnation, $prefix)"


def is_live(connection: Connection, run: str) -> bool:
    """Return whether the store contains data of `run` that its ranks reported, now or earlier."""
    return run in live_runs(connection, [run])


def live_runs(connection: Connection, runs: Collection[str]) -> frozenset[str]:
    """Return those of `runs` of which the store contains data that their ranks reported, now or earlier."""
    found: set[str] = set()
    # The second query reads many rows, and is needed only for runs that the first one has not found.
    for query, more in ((_BY_STATE, {}), (_BY_SCALARS, {"prefix": IMPORT_PREFIX})):
        if others := [run for run in runs if run not in found]:
            condition, parameters = any_of(others)
            rows = connection.query(query.format(condition=condition), parameters | more)
            found.update(rows["run"].to_pylist())
    return frozenset(found)


def label_of(path: Path) -> str:
    """Return the value of the label `imported_from` for the log at `path`: the last two parts of the path."""
    return "/".join(path.absolute().parts[-2:]).encode(errors="replace").decode()


def kept_apart(tables: Mapping[str, pa.Table], imported_from: str) -> tuple[dict[str, pa.Table], int]:
    """Return the rows of a log that can be stored next to rows of ranks, and the number of the log's other rows."""
    kept = {name: table for name, table in tables.items() if name in _KEPT}
    if "scalars" in kept:
        kept["scalars"] = _labelled(kept["scalars"], imported_from)
    return kept, sum(table.num_rows for name, table in tables.items() if name not in _KEPT)


def _labelled(scalars: pa.Table, imported_from: str) -> pa.Table:
    column = scalars.column("labels").combine_chunks().cast(pa.string()).dictionary_encode(null_encoding="encode")
    texts = [
        canonical_labels({**json.loads(text or "{}"), IMPORTED_FROM: imported_from})
        for text in column.dictionary.to_pylist()
    ]
    labels = pa.DictionaryArray.from_arrays(column.indices, pa.array(texts, pa.string()))
    field = scalars.schema.field("labels")
    return scalars.set_column(scalars.schema.names.index("labels"), field, labels.cast(field.type))
