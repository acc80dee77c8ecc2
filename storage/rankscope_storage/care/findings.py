"""What an examination of a store can find, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fault(enum.StrEnum):
    """What is the matter with a file or the log. The first seven are damage, the others are only worth knowing."""

    TORN_LOG = "torn log entry"
    MISSING = "missing file"
    UNREADABLE = "unreadable file"
    OUT_OF_REACH = "file out of reach"
    OTHER_SIZE = "other size than the log says"
    OTHER_CONTENT = "other content than the log says"
    DUPLICATES = "rows stored twice"
    EMPTY_ENTRY = "empty log entry"
    ALIKE = "rows alike"
    GAP = "records missing"
    UNUSED = "unused files"
    STAGED = "unfinished files"

    @property
    def is_damage(self) -> bool:
        """Whether rows are lost, doubled, or cannot be found by who asks for them."""
        return self not in (Fault.EMPTY_ENTRY, Fault.ALIKE, Fault.GAP, Fault.UNUSED, Fault.STAGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found: where, and in words what it means."""

    fault: Fault
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What was looked at, and what was found. `version` is None where the log cannot be read."""

    version: int | None
    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing found is damage."""
        return not any(finding.fault.is_damage for finding in self.findings)
