"""Store the records that an importer yields, in batches and each record exactly once.

A record is identified by its number in its source.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType, RunState, Severity
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.defaults import DEFAULT_RULES
from rankscope_contract.security.redaction import redacted_json
from rankscope_ingest.base.tables import FROM_INGEST, constant, rows_table, table_schema
from rankscope_ingest.importers.common.importer import (
    RECORD_COLUMN,
    Fault,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRecord,
    ImportedRun,
    Importer,
    KnownByContent,
)
from rankscope_ingest.importers.common.lines import readable
from rankscope_ingest.importers.common.log_identity import (
    Extents,
    KnownImport,
    Source,
    first_attempt,
    identify,
    marks,
    stream_of,
)
from rankscope_ingest.importers.common.rules import RuleEvaluator
from rankscope_storage.api.store import Batch, Commit

BATCH_RECORDS: Final = 20_000
BATCH_ROWS: Final = 500_000

_CODED: Final = pa.dictionary(pa.int32(), pa.string())

Progress = Callable[[int], None]
"""A function that an import calls with the number of bytes of the log that were read so far."""


class Appender(Protocol):
    """The methods of a store writer that an import uses."""

    def append(self, batch: Batch) -> Commit:
        """Store the rows of the batch durably, except those of records that are already stored."""

    def watermark(self, incarnation: str) -> int:
        """Return the last stored sequence number of `incarnation`, or -1 if no record of it is stored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """The result of an import. `rows_stored` counts only rows that were not stored before."""

    run: str
    source_kind: str
    records: int
    rows_stored: int
    last_step: int | None
    malformed: int
    faults: tuple[Fault, ...]
    passed_over: int = 0
    anomalies: int = 0
    attempts: int = 0
    state: str | None = None
    is_known: bool = False
    """True if the log was imported before, even if it has grown since then."""
    is_replacement: bool = False
    """True if another log was at this path at the last import, because the log was rotated or truncated since then."""


def import_records(
    path: Path,
    appender: Appender,
    importer: Importer,
    *,
    run: str,
    progress: Progress | None = None,
    known: Sequence[KnownImport] | None = None,
    rules: Sequence[AnomalyRule] = DEFAULT_RULES,
) -> ImportReport:
    """Import the log at `path` into the store as the run `run`. Raises IngestError if the log cannot be read.

    `known` has the logs of this run that are already imported. If it is given, a rotated or moved log is recognized, a
    restart in another file becomes another attempt, and the import is stored as an event. `progress` is called with the
    number of bytes read. `rules` are applied to the new rows.
    """
    faults = Faults()
    with readable(path):
        identity = importer.identity(path) if isinstance(importer, KnownByContent) else None
    source = identify(path, run, known or (), identity)
    others = tuple(log for log in known or () if log.kind == importer.name and log.incarnation != source.incarnation)
    intake = _Intake(path, run, importer.name, source, others, appender, RuleEvaluator(rules))
    stored = 0
    with readable(path):
        for batch in intake.batches(importer.read(path, faults), faults, progress):
            stored += sum(appender.append(batch).rows.values())
        if progress:
            progress(faults.read_bytes)
        note = None if known is None else intake.note(faults)
    if (intake.records or intake.facts) and (stored or note is None or note != source.before):
        appender.append(intake.dimensions(note))
    return ImportReport(
        run=run,
        source_kind=importer.name,
        records=intake.records,
        rows_stored=stored,
        last_step=intake.extents.last_step,
        malformed=faults.count,
        faults=tuple(faults.first),
        passed_over=faults.passed_over,
        anomalies=intake.anomalies,
        attempts=len(intake.extents.by_attempt),
        state=intake.facts.get("state"),
        is_known=source.before is not None,
        is_replacement=source.replaced is not None,
    )


class Numbering:
    """Numbers the records of one source, and adds the columns that are equal in all rows.

    One source is one incarnation in the store.
    """

    def __init__(self, *, run: str, incarnation: str) -> None:
        self.run = run
        self.incarnation = incarnation
        self.records = 0

    def rows(self, records: Sequence[ImportedRecord]) -> dict[str, pa.Table]:
        """Return the rows of `records` as tables by dataset.

        Each record gets the next sequence number of the source; the next call continues after the last one.
        """
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        arrived = time.time_ns() // 1000
        for seq, record in enumerate(records, self.records):
            common = {name: getattr(record, name) for name in ("attempt", "rank", "step", "micro_step", "ts")}
            common |= {"run": self.run, "incarnation": self.incarnation, "seq": seq, "ordinal": arrived + seq}
            common["ts_origin"] = None if record.ts is None else record.ts_origin
            for dataset, own in record.rows.items():
                rows[dataset] += [{**common, **row} for row in own]
        self.records += len(records)
        return {dataset: rows_table(dataset, listed) for dataset, listed in rows.items() if listed}

    def block(self, block: ImportedBlock) -> dict[str, pa.Table]:
        """Return the tables of `block` with all columns of their datasets.

        Each record gets the next sequence number of the source; the next call continues after the last one.
        """
        arrived = time.time_ns() // 1000
        tables = {name: self._full(name, table, arrived) for name, table in block.tables.items() if table.num_rows}
        self.records += block.records
        return tables

    def _full(self, dataset: str, table: pa.Table, arrived: int) -> pa.Table:
        """Return `table` with all columns of `dataset`; columns that the table lacks are null.

        Text columns may be dictionary-encoded.
        """
        count = table.num_rows
        seq = pc.add(pc.cast(table.column(RECORD_COLUMN), pa.int64()), self.records)
        given = {name: table.column(name) for name in table.column_names if name != RECORD_COLUMN}
        given |= {
            "run": constant(self.run, count),
            "incarnation": constant(self.incarnation, count),
            "seq": seq,
            "ordinal": pc.add(seq, arrived),
            "attempt": pc.fill_null(given["attempt"], 0) if "attempt" in given else pa.array(np.zeros(count, np.int32)),
        }
        schema = table_schema(dataset)
        if unknown := given.keys() - set(schema.names):
            raise KeyError(f"dataset {dataset} has no columns {sorted(unknown)}, which the importer returned")
        columns, fields = [], []
        for field in schema:
            column = given.get(field.name)
            if column is None:
                column = pa.nulls(count, _CODED if pa.types.is_string(field.type) else field.type)
            elif not pa.types.is_dictionary(column.type):
                column = pc.cast(column, field.type)
            columns.append(column)
            fields.append(field.with_type(column.type))
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))


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

    def __post_init__(self) -> None:
        self.extents = Extents()
        self.anomalies = 0
        self.attempt = None if self.source.before is None else self.source.before.attempt
        self.facts: dict[str, Any] = {}  # about the run; a log may contain them before its first record
        self._numberings: dict[str, Numbering] = {}
        self._touched: dict[str, Numbering] = {}
        self._waiting: dict[str, list[pa.Table]] = defaultdict(list)

    @property
    def records(self) -> int:
        """The number of records of the log that were read so far, over all sources."""
        return sum(numbering.records for numbering in self._numberings.values())

    def batches(self, imported: Iterator[Imported], faults: Faults, progress: Progress | None) -> Iterator[Batch]:
        """Yield the imported rows and their anomaly events in batches of about 500,000 rows."""
        rows = 0
        for item in _grouped(imported):
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
            if rows >= BATCH_ROWS:
                yield self._batch()
                rows = 0
        if self._numberings:
            yield self._batch()

    def note(self, faults: Faults) -> KnownImport:
        """Return the facts about this import that the import event stores for the next import of the same log."""
        return KnownImport(
            incarnation=self.source.incarnation,
            path=str(self.path.absolute()),
            kind=self.kind,
            marks=() if self.path.is_dir() else marks(self.path, faults.read_bytes),
            records=self.records,
            malformed=faults.count,
            attempt=self.attempt or 0,
            ends=self.extents.ends,
        )

    def dimensions(self, note: KnownImport | None) -> Batch:
        """Return a batch with rows of `runs` and `attempts`, and with the import event.

        If the log does not contain the end of the run, the state of the run is "stopped".
        """
        now = time.time_ns() // 1000
        common = {"run": self.run, "ordinal": now, "ts": now, "ts_origin": FROM_INGEST}
        rows = [self._attempt_row(attempt) | common for attempt in sorted(self.extents.by_attempt) or [0]]
        before = [end.attempt for log in self.others for end in log.ends.values()]
        tables = {"attempts": rows_table("attempts", rows)}
        if rows[-1]["attempt"] >= max(before, default=0):
            whole = {"last_step": self.extents.last_step, "started_at": rows[0].get("started_at")}
            tables["runs"] = rows_table("runs", [rows[-1] | whole])
        if note is not None:
            event = {
                "attempt": self.attempt,
                "incarnation": note.incarnation,
                "type": EventType.IMPORT,
                "severity": Severity.INFO,
                "message": f"{note.records} records of {self.path.name}",
                "details": note.to_json(),
            }
            tables["events"] = rows_table("events", [common | event])
        return Batch(tables=tables, watermarks={})

    def _attempt_row(self, attempt: int) -> dict[str, Any]:
        extent = self.extents.by_attempt.get(attempt)
        is_last = attempt == max(self.extents.by_attempt, default=0)
        row: dict[str, Any] = {
            "attempt": attempt,
            "state": RunState.STOPPED,
            "source_kind": self.kind,
            "reason": "imported from a log" if is_last else "the log returns to an earlier step",
        }
        if extent is not None:
            row |= {"started_at": extent.first_ts, "ended_at": extent.last_ts, "last_step": extent.last_step}
        shared = ("planned_steps", "world_size", "config")
        return row | {name: value for name, value in self.facts.items() if is_last or name in shared}

    def _tables(self, item: list[ImportedRecord] | ImportedBlock) -> dict[str, pa.Table]:
        """Return the rows of `item`, a list of records or a block, as tables by dataset, with anomaly events.

        If all rows of `item` are already stored, the result is empty.
        """
        numbering = self._numbering(item.source if isinstance(item, ImportedBlock) else item[0].source)
        tables = numbering.block(item) if isinstance(item, ImportedBlock) else numbering.rows(item)
        watermark = self.appender.watermark(numbering.incarnation)
        is_stored = numbering.records - 1 <= watermark
        self._touched[numbering.incarnation] = numbering
        if self.attempt is None and tables:
            self.attempt = first_attempt(tables, self.others)
        tables = {name: _moved(table, self.attempt or 0) for name, table in tables.items()}
        self.extents.add(tables)
        if is_stored and "tensor_stats" not in tables:
            return {}  # these rows contribute to no baseline
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
            self._numberings[source] = Numbering(run=self.run, incarnation=incarnation)
        return self._numberings[source]

    def _batch(self) -> Batch:
        waiting, self._waiting = self._waiting, defaultdict(list)
        touched, self._touched = self._touched, {}  # of a folder of many files, only those read since the last batch
        watermarks = {incarnation: source.records - 1 for incarnation, source in touched.items() if source.records}
        return Batch(tables={name: _concat(name, tables) for name, tables in waiting.items()}, watermarks=watermarks)


def _grouped(imported: Iterator[Imported]) -> Iterator[list[ImportedRecord] | ImportedBlock | ImportedRun]:
    """Yield consecutive single records of one source as one list, and yield blocks of records and facts unchanged."""
    waiting: list[ImportedRecord] = []
    rows = 0
    for item in imported:
        continues = isinstance(item, ImportedRecord) and waiting and waiting[0].source == item.source
        if waiting and (not continues or rows >= BATCH_RECORDS):
            yield waiting
            waiting, rows = [], 0
        if isinstance(item, ImportedRecord):
            waiting.append(item)
            rows += 1 + sum(map(len, item.rows.values()))
        else:
            yield item
    if waiting:
        yield waiting


def _moved(table: pa.Table, attempt: int) -> pa.Table:
    """Return a copy of `table` in which `attempt` is added to each attempt number."""
    if not attempt:
        return table
    position = table.column_names.index("attempt")
    moved = pc.add(table.column("attempt"), pa.scalar(attempt, pa.int32()))
    return table.set_column(position, table.schema.field(position), moved)


def _concat(dataset: str, tables: Sequence[pa.Table]) -> pa.Table:
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
