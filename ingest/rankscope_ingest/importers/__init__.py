"""Importers, which store the log files of other training programs as runs of Rankscope.

To add an importer, add a module to this package that defines `IMPORTER`; `common.importer` describes the interface.
`import_records` imports one log. A repeated import of the same log stores only the records that were added to the log
since the last import.

The rows of many small logs are stored with few commits, and each log as if it were stored alone. A commit takes some 50
ms and one file per dataset, far more than a log of a few steps does. The rows, the watermarks and the import event of a
small log are in the same commit, together with those of other logs. A process that is killed has therefore stored each
small log completely or not at all.

A new import of a log may replace rows of an earlier import, which the module finds in the store.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.redaction import redacted_name
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.decisions import Choices, Options
from rankscope_ingest.importers.common.importer import (
    Detection,
    Faults,
    ImportedBlock,
    ImportedRun,
    Importer,
    ImportReport,
)
from rankscope_ingest.importers.common.lines import open_log, readable, refuse_binary, skip_hole
from rankscope_ingest.importers.common.log_identity import (
    KnownImport,
    is_live,
    is_shorter,
    known_imports,
    known_imports_of,
    live_runs,
    stream_of,
)
from rankscope_ingest.importers.common.rules import IMPORT_RULES
from rankscope_ingest.importers.common.runner import (
    NO_END,
    StoredScalars,
    concatenated,
    errors_about,
    import_records,
    refuse_options,
    source_of,
    stored_scalars,
)
from rankscope_ingest.importers.textlog import nearest_miss
from rankscope_ingest.importers.trainer_state import newer_log
from rankscope_storage.api.store import Batch, Commit, Writer
from rankscope_storage.base.errors import BatchError
from rankscope_storage.base.schema import conform
from rankscope_storage.connection import Connection
from rankscope_storage.writer.writer import newer


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaceable:
    """The stored rows of one imported log."""

    incarnations: frozenset[str]
    """The incarnation of the log, and those of the streams that the log contains now."""
    kind: str
    attempts: frozenset[int]
    """The attempts whose rows without an incarnation are from this log alone; their `source_kind` is `kind`."""
    choices: Choices | None
    """The decision that all records of the log suggest, if they contradict the one over its first records."""


def replaceable(
    path: Path,
    run: str,
    importer: Importer,
    known: Sequence[KnownImport],
    stored: StoredScalars | None,
    *,
    is_live: bool,
    options: Options = Options(),  # noqa: B008 - frozen
) -> Replaceable:
    """Read the log at `path` without storing it, and return the rows that its earlier import has stored.

    `import_records` describes the arguments. Raises IngestError if the log is not among the imported logs, if it cannot
    be read, or if it lacks records that are stored.
    """
    refuse_options(path, importer, options)
    source = source_of(path, run, importer, known, stored)
    before = source.before
    if before is None or before.kind != importer.name or (path.is_dir() and before.path != str(path.absolute())):
        raise IngestError(
            f"{path} with its current content is not imported into the run {run!r}: import it without --reimport"
        )
    faults = Faults(options=options)
    with errors_about(path), readable(path):
        items = importer.read(path, faults)
        blocks = [(item.source, item.records) for item in items if isinstance(item, ImportedBlock)]
    records = sum(count for _, count in blocks)
    has_fewer = is_shorter(path, before) if before.marks else records < before.records  # of a folder
    if not records or source.behind is not None or has_fewer:
        raise IngestError(
            f"{path} has fewer records than its last import into the run {run!r} has read: --reimport would lose them"
        )
    streams = {stream_of(before.incarnation, source) for source, _ in blocks if source}
    others = [log for log in known if log.incarnation != before.incarnation]
    attempts = _attempts(before) - {attempt for log in others for attempt in _attempts(log)}
    return Replaceable(
        incarnations=frozenset({before.incarnation, *streams}),
        kind=before.kind,
        attempts=frozenset() if is_live else frozenset(attempts),
        choices=faults.revised,
    )


def _attempts(log: KnownImport) -> set[int]:
    last = max((end.attempt for end in log.ends.values()), default=log.attempt)
    return set(range(log.attempt, last + 1))


GROUP_LOGS: Final = 500
"""Largest number of logs of a group. Their tables of a few rows each take about 50 MB."""

GROUP_ROWS: Final = 50_000
"""Number of held rows from which they are stored, a tenth of the rows that the import of one log holds."""


class LogGroup:
    """Holds the batches of imported logs until they are stored together; the appender of `import_records`.

    The imports of a group see the rows of earlier logs of the group as if they were stored. `on_stored` is called after
    each commit, when all rows of the logs that were imported completely are stored.
    """

    def __init__(
        self,
        writer: Writer,
        connection: Callable[[], Connection],
        on_stored: Callable[[], None] = lambda: None,
        *,
        is_new: bool = False,
    ) -> None:
        """`connection` returns the connection for queries. A store that `is_new` has no earlier import to ask for."""
        self._writer = writer
        self._connection = connection
        self._on_stored = on_stored
        self._is_new = is_new
        self._known: dict[str, dict[str, KnownImport]] = {}
        self._live: frozenset[str] = frozenset()
        self._held: list[Batch] = []
        self._rows = 0
        self._watermarks: dict[str, int] = {}

    def begin(self, runs: Collection[str]) -> None:
        """Store the held rows, and read the facts about `runs`, the runs of the next logs, from the store."""
        self.flush()
        known = {} if self._is_new else known_imports_of(self._connection(), runs)
        self._known = {run: {log.incarnation: log for log in known.get(run, ())} for run in runs}
        self._live = frozenset() if self._is_new else live_runs(self._connection(), runs)

    @property
    def is_stored(self) -> bool:
        """True if no row waits for `flush`."""
        return not self._held

    def known(self, run: str) -> list[KnownImport]:
        """Return the logs that were imported into `run`, in order of their first import."""
        return list(self._known[run].values())

    def is_live(self, run: str) -> bool:
        """Return whether ranks of `run` have reported data."""
        return run in self._live

    def stored(self, run: str) -> StoredScalars:
        """Return a function that returns the stored and the held scalars of an incarnation of `run`."""

        def scalars(incarnation: str) -> pa.Table:
            found = stored_scalars(self._connection(), run)(incarnation)
            held = [
                batch.tables["scalars"].filter(pc.field("incarnation") == incarnation).select(found.column_names)
                for batch in self._held
                if incarnation in batch.watermarks and "scalars" in batch.tables
            ]
            return pa.concat_tables([found, *(table.cast(found.schema) for table in held)])

        return scalars

    def append(self, batch: Batch) -> Commit:
        """Hold the new rows of `batch`, whose number is in the result; store all held rows if they are many.

        Raises IngestError for rows that the store would refuse, so that they do not prevent the storage of other logs.
        """
        stored = {incarnation: self.watermark(incarnation) for incarnation in batch.watermarks}
        try:
            tables = {name: newer(conform(table, name), stored) for name, table in batch.tables.items()}
        except BatchError as error:
            raise IngestError(str(error)) from error
        rows = {name: table.num_rows for name, table in tables.items() if table.num_rows}
        forward = {incarnation: seq for incarnation, seq in batch.watermarks.items() if seq > stored[incarnation]}
        self._note_imports(batch)
        if rows or forward:
            self._held.append(Batch(tables={name: tables[name] for name in rows}, watermarks=forward))
            self._rows += sum(rows.values())
            self._watermarks |= forward
        if self._rows >= GROUP_ROWS:
            self.flush()
        return Commit(version=0, rows=rows, files=0, seconds=0.0)

    def watermark(self, incarnation: str) -> int:
        """Return the last stored or held sequence number of `incarnation`, or -1 without one."""
        if incarnation not in self._watermarks:  # a refresh takes 2 ms: once for a group suffices
            self._watermarks[incarnation] = self._writer.watermark(incarnation, refresh=not self._watermarks)
        return self._watermarks[incarnation]

    def flush(self) -> None:
        """Store the held rows with one commit. After a StoreError, they are not held any more."""
        held, self._held, self._rows, self._watermarks = self._held, [], 0, {}
        if not held:
            return
        tables: dict[str, list[pa.Table]] = {}
        watermarks: dict[str, int] = {}
        for batch in held:
            watermarks |= batch.watermarks
            for name, table in batch.tables.items():
                tables.setdefault(name, []).append(table)
        whole = {name: concatenated(name, parts) for name, parts in tables.items()}
        self._writer.append(Batch(tables=whole, watermarks=watermarks))
        self._is_new = False
        self._on_stored()

    def _note_imports(self, batch: Batch) -> None:
        """Add the import event of a log, which is in a batch without watermarks, to the known imports of its run."""
        events = batch.tables.get("events")
        if batch.watermarks or events is None:
            return
        for run, details in zip(events["run"].to_pylist(), events["details"].to_pylist(), strict=True):
            log = KnownImport.from_json(details)
            self._known[run][log.incarnation] = log


__all__ = [
    "GROUP_LOGS",
    "IMPORT_RULES",
    "NO_END",
    "Choices",
    "Faults",
    "ImportReport",
    "ImportedBlock",
    "ImportedRun",
    "Importer",
    "KnownImport",
    "LogGroup",
    "Options",
    "detections",
    "find_importer",
    "import_records",
    "importers",
    "is_live",
    "known_imports",
    "newer_log",
    "replaceable",
    "run_name",
    "stored_scalars",
]

_HEAD_BYTES: Final = 65_536
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+")
_ROTATED: Final = re.compile(r"\.\d{1,9}$")


def importers() -> dict[str, Importer]:
    """Return all importers of this package; the key is the name of the importer."""
    return {importer.name: importer for importer in _importers()}


@functools.cache  # the list of modules takes 3 ms, and is needed for each of thousands of logs
def _importers() -> tuple[Importer, ...]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(module.IMPORTER for module in modules if hasattr(module, "IMPORTER"))


def detections(path: Path) -> list[tuple[Importer, Detection]]:
    """Return all importers, each with its confidence that it can read `path`, by descending confidence.

    `path` is a file or a folder. Raises IngestError if the file or folder cannot be read.
    """
    with readable(path):
        head = b"" if path.is_dir() else _head(path)
        found = [(importer, importer.detect(path, head)) for importer in importers().values()]
    return sorted(found, key=lambda pair: -pair[1].confidence)


def find_importer(path: Path) -> Importer:
    """Return the importer that most probably can read `path`. Raises IngestError with the known formats if none can."""
    found = detections(path)
    if not found or found[0][1].confidence <= 0:
        if path.is_file():
            if not path.stat().st_size:
                raise IngestError(f"{path} is empty: check the path")
            refuse_binary(path, _head(path))
        raise IngestError(f"{path} has an unknown format; known formats: {', '.join(sorted(importers()))}{_hint(path)}")
    return found[0][0]


def _hint(path: Path) -> str:
    """Return the requirements of a record, and the missing part of the most similar line of a file."""
    if not path.is_file():
        return ""
    miss = nearest_miss(_head(path))
    return (
        ". A record is a line with a step or an epoch and a number, such as `step 10 loss 2.5`, or a JSON object on a "
        f"line{f'; {miss}' if miss else ''}: see docs/importing-training-logs.md"
    )


def run_name(path: Path) -> str:
    """Return the run name for the log at `path` if the user gave none.

    The run name is the name of the file without suffix, or the name of the folder. A number at the end of a rotated log
    is removed too: `train.log.1` belongs to the run `train`. The names `trainer_state.json` and `checkpoint-N` are the
    same in every run, so the name of the enclosing folder is returned instead.
    """
    path = path.absolute()
    while path.stem == "trainer_state" or _CHECKPOINT.fullmatch(path.name):
        if path.parent == path:
            break
        path = path.parent
    if path.is_dir():
        return redacted_name(path.name) or "import"
    return redacted_name(Path(_ROTATED.sub("", path.name)).stem)


def _head(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise IngestError(f"{path} is neither a file nor a folder: write its content to a file first")
    with open_log(path) as file:
        skip_hole(file)
        return file.read(_HEAD_BYTES)
