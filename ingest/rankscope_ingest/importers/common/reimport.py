"""Find the stored rows of an imported log that a new import of the same log replaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.branches import StoredScalars
from rankscope_ingest.importers.common.importer import Faults, ImportedBlock, ImportedRun, Importer, Options
from rankscope_ingest.importers.common.lines import readable
from rankscope_ingest.importers.common.log_identity import KnownImport, stream_of
from rankscope_ingest.importers.common.runner import errors_about, refuse_options, source_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaceable:
    """The stored rows of one imported log."""

    incarnations: frozenset[str]
    """The incarnation of the log, and those of the streams that the log contains now."""
    kind: str
    attempts: frozenset[int]
    """The attempts whose rows without an incarnation are from this log alone; their `source_kind` is `kind`."""


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
    before = source_of(path, run, importer, known, stored).before
    if before is None or before.kind != importer.name or (path.is_dir() and before.path != str(path.absolute())):
        raise IngestError(
            f"{path} with its current content is not imported into the run {run!r}: import it without --reimport"
        )
    sources, records = _content(path, importer, options)
    if not records or _is_shorter(path, before, records):
        raise IngestError(
            f"{path} has fewer records than its last import into the run {run!r} has read: --reimport would lose them"
        )
    streams = {stream_of(before.incarnation, source) for source in sources if source}
    others = [log for log in known if log.incarnation != before.incarnation]
    attempts = _attempts(before) - {attempt for log in others for attempt in _attempts(log)}
    return Replaceable(
        incarnations=frozenset({before.incarnation, *streams}),
        kind=before.kind,
        attempts=frozenset() if is_live else frozenset(attempts),
    )


def _content(path: Path, importer: Importer, options: Options) -> tuple[set[str], int]:
    """Return the names of the sources in the log and its number of records."""
    sources: set[str] = set()
    records = 0
    with errors_about(path), readable(path):
        for item in importer.read(path, Faults(options=options)):
            if not isinstance(item, ImportedRun):
                sources.add(item.source)
                records += item.records if isinstance(item, ImportedBlock) else 1
    return sources, records


def _is_shorter(path: Path, before: KnownImport, records: int) -> bool:
    """Return whether the log at `path` lacks a part that the import `before` has read.

    Another release may derive fewer records from the same bytes of a file.
    """
    if before.marks:
        return path.stat().st_size < before.marks[-1][0]
    return records < before.records


def _attempts(log: KnownImport) -> set[int]:
    last = max((end.attempt for end in log.ends.values()), default=log.attempt)
    return set(range(log.attempt, last + 1))
