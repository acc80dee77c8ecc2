"""Store the records that an importer yields, in batches and each record exactly once.

A record is identified by its number within its source, such as a file or a rank of a log folder.

A log may repeat the beginning of an earlier imported log and then differ from it. A training that resumes from a
checkpoint writes such a log: its file contains the history up to the checkpoint, and then values that differ from those
of the earlier log. The records of the new log before the first difference are already stored. The records from the
first difference on are those of a later attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract import __version__
from rankscope_contract.model.events import EventType, RunState, Severity
from rankscope_contract.model.redaction import redacted_json
from rankscope_contract.rules import AnomalyRule
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.base.tables import FROM_INGEST, rows_table, table_schema
from rankscope_ingest.importers.common.decisions import Choices, Options
from rankscope_ingest.importers.common.importer import (
    Checkpoint,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRun,
    Importer,
    ImportReport,
    unkept_notes,
)
from rankscope_ingest.importers.common.lines import is_settled, readable
from rankscope_ingest.importers.common.log_identity import (
    Extents,
    KnownImport,
    Source,
    first_attempt,
    identify,
    is_shorter,
    is_unchanged,
    kept_apart,
    label_of,
    marks,
    stored_path,
    stream_of,
    tails,
    with_common_beginning,
)
from rankscope_ingest.importers.common.positions import Numbering, Positions
from rankscope_ingest.importers.common.resume import decoded, encoded
from rankscope_ingest.importers.common.rules import IMPORT_RULES, RuleEvaluator
from rankscope_storage.api.store import Batch, Commit
from rankscope_storage.connection import Connection

_COLUMNS: Final = ("seq", "step", "name", "value")
_STORED: Final = f"SELECT {', '.join(_COLUMNS)} FROM scalars WHERE run = $run AND incarnation = $incarnation"  # noqa: S608

StoredScalars = Callable[[str], pa.Table]
"""A function that returns the stored scalars of an incarnation: seq, step, name and value."""


def stored_scalars(connection: Connection, run: str) -> StoredScalars:
    """Return a function that reads the scalars of an incarnation of `run` from the store."""
    return lambda incarnation: connection.query(_STORED, {"run": run, "incarnation": incarnation})


def branch_of(
    source: Source, known: Sequence[KnownImport], imported: Iterable[Imported], stored: StoredScalars
) -> Source:
    """Return the identity of a new log that begins like `source.before`, a log that was imported before.

    The candidates are `source.before` and the logs in `known` that are stored as branches of `source.before`. The
    result is the identity of the first candidate of which the stored scalars are equal to those of the new log in all
    records that both have. If there is no such candidate, the result is the identity of a new branch. `imported` has
    the records of the new log. `stored` returns the stored scalars of an incarnation.
    """
    stream, scalars = _scalars(imported)
    by_incarnation = {log.incarnation: log for log in known}
    nearest, agreeing = source.before, 0
    for number in itertools.count():
        incarnation = stream_of(source.incarnation, f"branch {number}") if number else source.incarnation
        log = by_incarnation.get(incarnation)
        if log is None:
            return Source(incarnation=incarnation, begins_at=agreeing, branches_from=nearest)
        difference = _first_difference(scalars, stored(stream_of(incarnation, stream) if stream else incarnation))
        if not difference:  # an earlier release may have stored the first record differently
            return dataclasses.replace(source, incarnation=incarnation, before=log, begins_at=log.begins_at)
        if difference > agreeing:
            nearest, agreeing = log, difference
    raise AssertionError("unreachable: itertools.count() does not end")


def without_beginning(tables: Mapping[str, pa.Table], begins_at: int) -> dict[str, pa.Table]:
    """Return the rows of `tables` that belong to records from the number `begins_at` on, without empty tables."""
    kept = {name: table.filter(pc.field("seq") >= begins_at) for name, table in tables.items()}
    return {name: table for name, table in kept.items() if table.num_rows}


def _scalars(imported: Iterable[Imported]) -> tuple[str, pa.Table]:
    """Return the name of the first source (a file or a rank) of a log, and the scalars of this source."""
    numbering, stream, tables = Numbering(run="", incarnation=""), "", []
    for item in imported:
        if not isinstance(item, ImportedBlock):
            continue
        stream = stream if numbering.records else item.source
        if item.source == stream:
            rows = numbering.block(item)
            tables += [rows["scalars"].select(_COLUMNS)] if "scalars" in rows else []
    names = pa.field("name", pa.string())
    schema = pa.schema([("seq", pa.int64()), ("step", pa.int64()), names, ("value", pa.float64())])
    return stream, pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])


def _first_difference(imported: pa.Table, stored: pa.Table) -> int | None:
    """Return the number of the first record in which `imported` and `stored` differ; None without a difference.

    `imported` has the scalars of a new log, and `stored` those of a log that was imported before. Only records up to
    the end of the shorter log are compared, and only names that both logs have. A record of the log that was imported
    before may be absent from `stored`, because its rows have expired.
    """
    if not imported.num_rows or not stored.num_rows:
        return None
    last = min(pc.max(table["seq"]).as_py() for table in (imported, stored))
    first, second = (
        table.set_column(1, "step", table["step"].fill_null(-1)).filter(
            (pc.field("seq") <= last) & pc.field("name").isin(other["name"]) & pc.field("seq").isin(stored["seq"])
        )
        for table, other in ((imported, stored), (stored, imported))
    )
    different = [
        one.join(other, list(_COLUMNS), join_type="left anti")["seq"]
        for one, other in ((first, second), (second, first))
    ]
    return min((pc.min(records).as_py() for records in different if len(records)), default=None)


BATCH_ROWS: Final = 500_000
_STATES: Final = 2
"""Version of the states, increased whenever an object in them gets other attributes."""
NO_END: Final = "imported from a log"
"""Reason of the state of a run whose log contains no end of the run."""

_NUMBERS: Final = ("scalars", "tensor_stats", "samples")
"""Datasets of which each row has a number."""

Progress = Callable[[int], None]
"""A function that an import calls with the number of bytes of the log that were read so far."""


class Appender(Protocol):
    """The methods of a store writer that an import uses."""

    def append(self, batch: Batch) -> Commit:
        """Store the rows of the batch durably, except those of records that are already stored."""

    def watermark(self, incarnation: str) -> int:
        """Return the last stored sequence number of `incarnation`, or -1 if no record of it is stored."""


def import_records(
    path: Path,
    appender: Appender,
    importer: Importer,
    *,
    run: str,
    progress: Progress | None = None,
    known: Sequence[KnownImport] | None = None,
    rules: Sequence[AnomalyRule] = IMPORT_RULES,
    is_live: bool = False,
    stored: StoredScalars | None = None,
    options: Options = Options(),  # noqa: B008 - frozen
    choices: Choices | None = None,
    batch_rows: int = BATCH_ROWS,
) -> ImportReport:
    """Import the log at `path` into the store as the run `run`. Raises IngestError if the log cannot be read.

    `known` has the logs of this run that are already imported. If it is given, a rotated or moved log is recognized, a
    restart in another file becomes another attempt, and the import is stored as an event. `progress` is called with the
    number of bytes read. `rules` are applied to the new rows. With `is_live`, ranks of the run have reported data: the
    log is kept apart from these data, and changes neither the run nor its attempts. With `stored`, a log that differs
    from an imported log after a common beginning is recognized. `options` are those of the user for logs of lines.
    `choices` is a decision about a log that is not among `known`. A commit has about `batch_rows` rows.
    """
    refuse_options(path, importer, options)
    unchanged = (log for log in known or () if log.kind == importer.name and is_unchanged(path, log))
    if (last := next(unchanged, None)) is not None:
        _check_choices(path, last, options)
        return _unchanged_report(run, last)
    source = source_of(path, run, importer, known or (), stored)
    _check_choices(path, source.before, options)
    others = tuple(log for log in known or () if log.kind == importer.name and log.incarnation != source.incarnation)
    intake = _Intake(path, run, importer.name, source, others, appender, RuleEvaluator(rules), is_live)
    rows_stored = 0
    with errors_about(path), readable(path):
        key = _key(importer.name, rules, options)
        faults = intake.resumed(key, options)
        faults.choices = faults.choices or choices
        was_settled = path.is_dir() or getattr(importer, "is_settled", is_settled)(path)
        for batch in intake.batches(importer.read(path, faults), faults, batch_rows, progress):
            rows_stored += sum(appender.append(batch).rows.values())
        if progress:
            progress(faults.read_bytes)
        note = None if known is None else intake.note(faults, key, is_settled=was_settled)
    is_new = rows_stored or note is None or (note != source.before and not is_shorter(path, source.before))
    if (intake.records or intake.facts) and is_new:
        appender.append(intake.dimensions(note, [*faults.unkept]))
    return _report(intake, faults, rows_stored)


def refuse_options(path: Path, importer: Importer, options: Options) -> None:
    """Raise IngestError if the user has given options that the format of the log does not have."""
    known = getattr(importer, "options", ())
    if unknown := " and ".join(f"--{name}" for name in options.given() if name not in known):
        raise IngestError(f"{path} has the format {importer.name}, to which {unknown} does not apply: omit the option")


def _check_choices(path: Path, before: KnownImport | None, options: Options) -> None:
    """Raise IngestError if the user has chosen a loss or a year for a log that is stored with another one."""
    if before is None or before.choices is None:
        return
    with errors_about(path):
        before.choices.check(options)


@contextlib.contextmanager
def errors_about(path: Path) -> Iterator[None]:
    """Add the path of the log to an IngestError that does not contain it."""
    try:
        yield
    except IngestError as error:
        if str(path) in str(error):
            raise
        raise IngestError(f"{path}: {error}") from error


def _step_notes(before: KnownImport | None, now: Choices | None) -> list[str]:
    was = None if before is None else before.choices
    if was is None or now is None or now.numbers_rows or not was.numbers_rows:
        return []
    return ["the stored step was the number of a record, but later records have a counter: --reimport decides again"]


def _report(intake: _Intake, faults: Faults, rows_stored: int) -> ImportReport:
    source = intake.source
    return ImportReport(
        run=intake.run,
        source_kind=intake.kind,
        records=intake.records,
        rows_stored=rows_stored,
        last_step=intake.facts.get("last_step", intake.extents.last_step),
        malformed=faults.count,
        faults=tuple(faults.first),
        notes=(
            *faults.notes,
            *_step_notes(source.before, faults.choices),
            *unkept_notes([f"{name} ({count:,})" for name, count in faults.unkept.most_common()]),
            *_overlap_notes(intake.overlap),
        ),
        passed_over=faults.passed_over,
        anomalies=intake.anomalies,
        attempts=len(intake.extents.by_attempt),
        state=intake.facts.get("state"),
        reason=intake.facts.get("reason"),
        is_known=source.before is not None,
        attempt=intake.attempt or 0,
        branches_from=None if source.branches_from is None else source.branches_from.path,
        first_step=intake.first_step,
        imported_from=intake.imported_from,
        left_out=intake.left_out,
        has_numbers=intake.has_numbers,
        is_replacement=source.replaced is not None,
        unkept=tuple(faults.unkept),
    )


def _overlap_notes(overlap: KnownImport | None) -> list[str]:
    """Return a message that a new log may contain the same steps as `overlap`, a log that was imported before.

    Return an empty list if `overlap` is None.
    """
    if overlap is None:
        return []
    shown = "if both contain a scalar at a step, the value that was imported last is shown"
    return [f"has steps of the same time and ranks as {overlap.path}, so both are one attempt; {shown}"]


def _unchanged_report(run: str, before: KnownImport) -> ImportReport:
    """Return the report about a log that is not read again, from the facts about its last import."""
    return ImportReport(
        run=run,
        source_kind=before.kind,
        records=before.records,
        rows_stored=0,
        last_step=max((end.step for end in before.ends.values() if end.step is not None), default=None),
        malformed=before.malformed,
        faults=(),
        is_known=True,
        is_unchanged=True,
        imported_from=before.imported_from,
    )


def source_of(
    path: Path, run: str, importer: Importer, known: Sequence[KnownImport], stored: StoredScalars | None
) -> Source:
    """Return the identity of the log at `path`; `import_records` describes the arguments."""
    with readable(path):
        identity: str | None = getattr(importer, "identity", lambda _: None)(path)
    source = identify(path, run, known, identity)
    if stored is None or (source.before is None) is (identity is not None):
        return source
    before = source.before or with_common_beginning(path, (log for log in known if log.kind == importer.name))
    if before is None:
        return source
    origin = dataclasses.replace(source, incarnation=before.incarnation, before=before)
    with readable(path):
        found = branch_of(origin, known, importer.read(path, Faults(choices=before.choices)), stored)
    return found if identity is not None or found.branches_from is not None else source


def _key(kind: str, rules: Sequence[AnomalyRule], options: Options) -> str:
    """Return a text that changes with everything on which a state depends: release, format, rules and patterns."""
    parts = (__version__, _STATES, kind, list(rules), options.pattern)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclasses.dataclass
class _Intake:
    """One import: the log, its run, the other logs of the same format in the run, and the state between batches."""

    path: Path
    run: str
    kind: str
    source: Source
    others: Sequence[KnownImport]
    appender: Appender
    evaluator: RuleEvaluator
    is_live: bool

    def __post_init__(self) -> None:
        self.extents = Extents()
        self.anomalies = 0
        self.left_out = 0
        self.has_numbers = False
        self.overlap: KnownImport | None = None
        self.first_step: int | None = None
        before = self.source.before
        origin = before or self.source.branches_from
        named = None if origin is None else origin.imported_from  # also after the log was moved, and of its branches
        self.imported_from = (named or label_of(self.path)) if self.is_live else None
        self.attempt = None if before is None else before.attempt
        self.facts: dict[str, Any] = {}  # about the run; a log may contain them before its first record
        self._numberings: dict[str, Numbering] = {}
        self._touched: dict[str, Numbering] = {}
        self._waiting: dict[str, list[pa.Table]] = defaultdict(list)
        self._state: dict[str, Any] | None = None  # at the last checkpoint

    def resumed(self, key: str, options: Options) -> Faults:
        """Continue behind the last import of the log, and return its faults; return new faults without its state."""
        before, behind = self.source.before, self.source.behind
        faults = Faults(choices=None if before is None else before.choices, options=options)
        if before is None or before.state is None:
            return faults
        state = before.state
        is_whole = behind is not None or (state["is_final"] and not is_shorter(self.path, before))
        try:
            parts = decoded(state["objects"]) if is_whole and state["key"] == key else None
        except ValueError:
            parts = None
        if parts is not None:
            reader, faults, self.extents, self.evaluator, self._numberings = parts
            faults.reader, faults.options = reader, options
            faults.read_bytes, faults.lines = behind or (state["offset"], state["lines"])
        elif behind is not None:
            raise IngestError(
                "the log has lost its beginning, and its last import had another release, format, rules or pattern: "
                "import it as another run with --run"
            )
        return faults

    def _save(self, checkpoint: Checkpoint, faults: Faults) -> None:
        parts = encoded((checkpoint.reader, faults, self.extents, self.evaluator, self._numberings))
        place = {"offset": checkpoint.offset, "lines": checkpoint.lines, "is_final": checkpoint.is_final}
        self._state = None if parts is None else {**place, "objects": parts}

    @property
    def records(self) -> int:
        """The number of records of the log that were read so far, over all sources."""
        return sum(numbering.records for numbering in self._numberings.values())

    def batches(
        self, imported: Iterator[Imported], faults: Faults, batch_rows: int, progress: Progress | None
    ) -> Iterator[Batch]:
        """Yield the imported rows and their anomaly events in batches of about `batch_rows` rows."""
        rows = 0
        for item in imported:
            if isinstance(item, Checkpoint):
                self._save(item, faults)
                continue
            if isinstance(item, ImportedRun):
                named = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
                named["config"] = redacted_json(item.config)  # logs repeat command lines and settings with secrets
                self.facts |= {name: value for name, value in named.items() if value is not None}
                continue
            for dataset, table in self._tables(item).items():
                self._waiting[dataset].append(table)
                rows += table.num_rows
            if progress:
                progress(faults.read_bytes)
            if rows >= batch_rows:
                yield self._batch()
                rows = 0
        if self._touched:
            yield self._batch()

    def note(self, faults: Faults, key: str, *, is_settled: bool) -> KnownImport:
        """Return the facts about this import that the import event stores for the next import of the same log."""
        state = self._state
        if state is not None:
            last = [list(pair) for pair in tails(self.path, state["offset"])]
            state = {**state, "key": key, "tails": last}
        return KnownImport(
            incarnation=self.source.incarnation,
            path=stored_path(self.path),
            kind=self.kind,
            marks=() if self.path.is_dir() else marks(self.path, faults.read_bytes),
            records=self.records,
            malformed=faults.count,
            attempt=self.attempt or 0,
            ends=self.extents.ends,
            imported_from=self.imported_from,
            is_settled=is_settled,
            begins_at=self.source.begins_at,
            choices=faults.choices,
            state=state,
            axis=next(iter(self._numberings.values())).positions.state if self._numberings else None,
        )

    def dimensions(self, note: KnownImport | None, unkept: Sequence[str]) -> Batch:
        """Return a batch with rows of `runs` and `attempts`, and with the import event, which names `unkept` numbers.

        If the log does not contain the end of the run, the state of the run is "stopped". For a run of which ranks have
        reported, the batch has only the event.
        """
        now = time.time_ns() // 1000
        common = {"run": self.run, "ordinal": now, "ts": now, "ts_origin": FROM_INGEST}
        tables = {} if self.is_live else self._run_tables(common)
        if note is not None:
            event = {
                "attempt": self.attempt,
                "incarnation": note.incarnation,
                "type": EventType.IMPORT,
                "severity": Severity.INFO if self.source.branches_from is None else Severity.WARNING,
                "message": "; ".join([f"records of {Path(note.path).name}{self._branch()}", *unkept_notes(unkept)]),
                "details": note.to_json(),
            }
            tables["events"] = rows_table("events", [common | event])
        return Batch(tables=tables, watermarks={})

    def _branch(self) -> str:
        other = self.source.branches_from
        return "" if other is None else f", which differ from {other.path} from step {self.first_step} on"

    def _run_tables(self, common: Mapping[str, Any]) -> dict[str, pa.Table]:
        rows = [{**self._attempt_row(attempt), **common} for attempt in sorted(self.extents.by_attempt) or [0]]
        before = [end.attempt for log in self.others for end in log.ends.values()]
        tables = {"attempts": rows_table("attempts", rows)}
        if rows[-1]["attempt"] >= max(before, default=0):
            whole = {
                "last_step": self.facts.get("last_step", self.extents.last_step),
                "started_at": rows[0].get("started_at"),
            }
            tables["runs"] = rows_table("runs", [rows[-1] | whole])
        return tables

    def _attempt_row(self, attempt: int) -> dict[str, Any]:
        extent = self.extents.by_attempt.get(attempt)
        is_last = attempt == max(self.extents.by_attempt, default=0)
        row: dict[str, Any] = {
            "attempt": attempt,
            "state": RunState.STOPPED,
            "source_kind": self.kind,
            "reason": NO_END if is_last else "the log returns to an earlier step",
        }
        if extent is not None:
            row |= {"started_at": extent.first_ts, "ended_at": extent.ended_at, "last_step": extent.last_step}
            if extent.ending is not None and not is_last:
                row["state"], row["reason"] = extent.ending
        shared = ("planned_steps", "world_size", "config")
        return row | {name: value for name, value in self.facts.items() if is_last or name in shared}

    def _tables(self, block: ImportedBlock) -> dict[str, pa.Table]:
        """Return the rows of `block` as tables by dataset, with anomaly events; nothing if all rows are stored."""
        numbering = self._numbering(block.source)
        tables = numbering.block(block)
        self.has_numbers = self.has_numbers or not tables.keys().isdisjoint(_NUMBERS)
        if self.source.begins_at and numbering is next(iter(self._numberings.values())):
            tables = without_beginning(tables, self.source.begins_at)
            if self.first_step is None and "scalars" in tables:
                self.first_step = tables["scalars"]["step"][0].as_py()
        if self.imported_from is not None:
            tables, left_out = kept_apart(tables, self.imported_from)
            self.left_out += left_out
        watermark = self.appender.watermark(numbering.incarnation)
        is_stored = numbering.records - 1 <= watermark
        self._touched[numbering.incarnation] = numbering
        if self.attempt is None and tables:
            self.attempt, self.overlap = first_attempt(tables, self.others)
        tables = {name: _moved(table, self.attempt or 0) for name, table in tables.items()}
        self.extents.add(tables)
        if is_stored and not self.evaluator.learns_from(tables):
            return {}
        evaluated = self.evaluator.evaluate(tables)
        if is_stored:
            return {}
        self.anomalies += _new_anomalies(evaluated.get("events"), watermark)
        return evaluated

    def _numbering(self, source: str) -> Numbering:
        if source not in self._numberings:
            incarnation = self.source.incarnation
            if source:
                incarnation = stream_of(incarnation, source)
            earlier = [log.axis for log in self.others if log.axis and log.attempt <= (self.attempt or log.attempt)]
            self._numberings[source] = Numbering(run=self.run, incarnation=incarnation, positions=Positions(earlier))
        return self._numberings[source]

    def _batch(self) -> Batch:
        waiting, self._waiting = self._waiting, defaultdict(list)
        touched, self._touched = self._touched, {}  # of a folder of many files, only those read since the last batch
        watermarks = {incarnation: source.records - 1 for incarnation, source in touched.items() if source.records}
        return Batch(
            tables={name: concatenated(name, tables) for name, tables in waiting.items()}, watermarks=watermarks
        )


def _moved(table: pa.Table, attempt: int) -> pa.Table:
    """Return a copy of `table` in which the number `attempt` is added to each attempt number."""
    if not attempt:
        return table
    position = table.column_names.index("attempt")
    moved = pc.add(table.column("attempt"), pa.scalar(attempt, pa.int32()))
    return table.set_column(position, table.schema.field(position), moved)


def concatenated(dataset: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of `tables`, which differ at most in the dictionary encoding of their text columns."""
    if any(table.schema != tables[0].schema for table in tables):
        tables = [table.cast(table_schema(dataset)) for table in tables]
    return pa.concat_tables(tables).unify_dictionaries()


def _new_anomalies(events: pa.Table | None, watermark: int) -> int:
    """Return the number of anomaly events that are not stored yet.

    The sequence numbers of these events are above the watermark.
    """
    if events is None:
        return 0
    is_anomaly = pc.equal(events.column("type").cast(pa.string()), EventType.ANOMALY.value)
    is_new = pc.greater(events.column("seq"), watermark)
    return pc.sum(pc.and_(is_anomaly, is_new)).as_py() or 0
