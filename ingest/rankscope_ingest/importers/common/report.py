"""The result of an import, as the command prints it."""

from __future__ import annotations

import dataclasses

from rankscope_ingest.importers.common.importer import Fault
from rankscope_ingest.importers.common.log_identity import KnownImport


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
    notes: tuple[str, ...] = ()
    """Sentences about the log as a whole."""
    passed_over: int = 0
    anomalies: int = 0
    attempts: int = 0
    state: str | None = None
    is_known: bool = False
    """True if the log was imported before, even if it has grown since then."""
    imported_from: str | None = None
    """Label of the scalars of a log that is kept apart from the data of the run's ranks; None without such data."""
    left_out: int = 0
    """Number of rows that are not stored, because they could not be kept apart from the data of the run's ranks."""
    attempt: int = 0
    """Number of the run's attempt as which attempt 0 of the log is stored."""
    branches_from: str | None = None
    """Path of the imported log from which this new log differs after a common beginning; None without one."""
    first_step: int | None = None
    """Step of the first record that differs, if there is such a log."""
    is_unchanged: bool = False
    """True if the file was not read, because it has not changed since its last import."""
    is_replacement: bool = False
    """True if another log was at this path at the last import, because the log was rotated or truncated since then."""


def overlap_notes(overlap: KnownImport | None) -> list[str]:
    """Return the message about a log that may contain steps of an imported log; no message without one."""
    if overlap is None:
        return []
    shown = "if both contain a scalar at a step, the value that was imported last is shown"
    return [f"has steps of the same time and ranks as {overlap.path}, so both are one attempt; {shown}"]


def unchanged_report(run: str, before: KnownImport) -> ImportReport:
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
