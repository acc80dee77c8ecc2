"""The result of an import, as the command prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from rankscope_ingest.importers.common.importer import Fault
from rankscope_ingest.importers.common.log_identity import KnownImport

_SHOWN_NAMES: Final = 20


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
    """Messages to the user that concern the whole log and not a single line."""
    passed_over: int = 0
    anomalies: int = 0
    attempts: int = 0
    state: str | None = None
    reason: str | None = None
    is_known: bool = False
    """True if an earlier import has read the log, even if the log has grown since then."""
    imported_from: str | None = None
    """Value of the label that distinguishes the scalars of the log from those that ranks of the run reported.

    None if no rank of the run has reported.
    """
    left_out: int = 0
    """Number of rows of the log that are not stored, because they could not be distinguished from rows of ranks."""
    has_numbers: bool = True
    """True if a record that this import has read contains a number."""
    attempt: int = 0
    """The rows of attempt 0 of the log are stored with this attempt number of the run."""
    branches_from: str | None = None
    """Path of an earlier imported log that has the same beginning as this log, but differs from it later.

    None if there is no such earlier log.
    """
    first_step: int | None = None
    """Step of the first record in which this log differs from the log at `branches_from`, if that path is set."""
    is_unchanged: bool = False
    """True if the log was not read, because it has not changed since its last import."""
    unkept: tuple[str, ...] = ()
    """Names of the numbers that are not stored."""
    is_replacement: bool = False
    """True if the last import from this path read another log. That log was rotated or truncated since then."""


def unkept_notes(names: Sequence[str]) -> list[str]:
    """Return a message with the first 20 of `names`, the numbers that are not stored; an empty list without names."""
    more = len(names) - _SHOWN_NAMES
    shown = ", ".join(names[:_SHOWN_NAMES])
    return [f"not kept: {shown}{f' and {more:,} more' if more > 0 else ''}"] if names else []


def overlap_notes(overlap: KnownImport | None) -> list[str]:
    """Return a message that a new log may contain the same steps as `overlap`, a log that was imported before.

    Return an empty list if `overlap` is None.
    """
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
