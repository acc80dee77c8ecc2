"""Compare one data file with its entry in the Delta log; define the findings and the report of a check."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.schema import DATASETS
from rankscope_storage.base.schema import DATASET_KEY, schema_version
from rankscope_storage.files.older_integers import has_older_integers


class FindingKind(enum.StrEnum):
    """The kind of a finding of a store check. `is_damage` is true for damage, false for information."""

    TORN_LOG = "torn log entry"
    MISSING = "missing file"
    UNREADABLE = "unreadable file"
    OUT_OF_REACH = "file out of reach"
    OTHER_SIZE = "size differs from the log"
    OTHER_CONTENT = "content differs from the log"
    DUPLICATES = "rows stored twice"
    EMPTY_ENTRY = "empty log entry"
    ALIKE = "rows alike"
    GAP = "records missing"
    OLDER_INTEGERS = "older encoding"
    UNUSED = "unused files"
    STAGED = "unfinished files"

    @property
    def is_damage(self) -> bool:
        """Return whether the finding is damage: rows are lost or stored twice, or queries cannot find them."""
        return self not in (
            FindingKind.EMPTY_ENTRY,
            FindingKind.ALIKE,
            FindingKind.GAP,
            FindingKind.OLDER_INTEGERS,
            FindingKind.UNUSED,
            FindingKind.STAGED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of a check: its kind, the path of the file, and an explanation."""

    kind: FindingKind
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of a check: its findings and the size of the checked store.

    `version` is None if the Delta log is unreadable.
    """

    version: int | None
    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Return True if the store is intact: no finding of the check is damage."""
        return not any(finding.kind.is_damage for finding in self.findings)


_RANGES: Final = ("run", "attempt", "step")
"""Columns whose range in the Delta log selects files: with a wrong range, queries would not find the rows."""


def check_file(root: Path, file: Mapping[str, Any], *, deep: bool) -> Finding | None:
    """Return the defect of `file`, a row of `Snapshot.files`, or its older encoding, or None.

    With `deep`, every value of the file is decoded.
    """
    defect = _defect(root / file["path"], file, deep=deep)
    return defect and Finding(kind=defect[0], path=file["path"], text=f"{defect[1]}; {describe_rows(file)}")


def _defect(path: Path, file: Mapping[str, Any], *, deep: bool) -> tuple[FindingKind, str] | None:
    try:
        size = path.stat().st_size
        if size != file["size_bytes"]:
            return FindingKind.OTHER_SIZE, f"has {size} bytes, {file['size_bytes']} in the log"
        content = pq.ParquetFile(path)
        for text in _differences(content.metadata, file):
            return FindingKind.OTHER_CONTENT, text
        if deep:
            for group in range(content.metadata.num_row_groups):
                content.read_row_group(group)
        if has_older_integers(content.metadata):
            return FindingKind.OLDER_INTEGERS, "has integers in an older encoding"
    except FileNotFoundError:
        return FindingKind.MISSING, "does not exist"
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow reports damage as OSError without a number
            return FindingKind.OUT_OF_REACH, f"cannot be read now ({os.strerror(error.errno)})"
        return FindingKind.UNREADABLE, f"cannot be decoded: {str(error).splitlines()[0]}"
    return None


def _differences(metadata: pq.FileMetaData, file: Mapping[str, Any]) -> Iterator[str]:
    own = metadata.metadata or {}
    declared = own.get(DATASET_KEY.encode())
    if declared is None:  # another tool wrote the file, for example OPTIMIZE by delta-rs
        needed = (field.name for field in DATASETS.get(file["dataset"], ()) if not field.nullable)
        if missing := sorted(set(needed) - set(metadata.schema.names)):
            yield f"lacks the columns {', '.join(missing)} of the dataset {file['dataset']}"
    elif declared != file["dataset"].encode():
        yield f"does not declare the dataset {file['dataset']}"
    if schema_version(own) > SCHEMA_VERSION:
        yield f"has schema version {schema_version(own)}, and this Rankscope supports up to {SCHEMA_VERSION}"
    if file["rows"] not in {None, metadata.num_rows}:
        yield f"has {metadata.num_rows} rows, {file['rows']} in the log"
    for column in _RANGES:
        found, logged = footer_range(metadata, column), (file[f"{column}_min"], file[f"{column}_max"])
        if found is not None and logged[0] is not None and found != logged:
            yield f"has {column} {found[0]} to {found[1]}, {logged[0]} to {logged[1]} in the log"


def footer_range(metadata: pq.FileMetaData, column: str) -> tuple[Any, Any] | None:
    """Return minimum and maximum of `column` over all row groups of a file.

    None if the footer does not contain them.
    """
    index = metadata.schema.names.index(column) if column in metadata.schema.names else None
    lows, highs = [], []
    for group in range(metadata.num_row_groups if index is not None else 0):
        chunk = metadata.row_group(group).column(index)
        counted = chunk.statistics
        if counted is not None and counted.has_min_max:
            lows.append(counted.min)
            highs.append(counted.max)
        elif counted is None or counted.null_count != chunk.num_values:
            return None
    return (min(lows), max(highs)) if lows else None


def describe_rows(file: Mapping[str, Any]) -> str:
    """Return a text that describes the rows of `file`: dataset, run, steps and their number."""
    run = file["run_min"] if file["run_min"] == file["run_max"] else f"{file['run_min']} to {file['run_max']}"
    steps = "" if file["step_min"] is None else f", steps {file['step_min']} to {file['step_max']}"
    return f"{file['rows']} rows of {file['dataset']}, run {run}{steps}"


def size_of(path: Path) -> int:
    """Return the size of the file at `path` in bytes, or 0 if a running service has just deleted the file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
