"""Compare one data file with its entry in the log. Faults, findings and the report of a check."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_contract import SCHEMA_VERSION
from rankscope_storage.base.schema import DATASET_KEY, schema_version


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
    def is_intact(self) -> bool:
        """Whether nothing found is damage."""
        return not any(finding.fault.is_damage for finding in self.findings)


_RANGES: Final = ("run", "attempt", "step")
"""Columns by whose range in the log files are skipped: a wrong one hides rows."""


def check_file(root: Path, file: Mapping[str, Any], *, deep: bool) -> Finding | None:
    """Return what is wrong with `file`, a row of a Snapshot's files; with `deep`, every value is decoded."""
    path = root / file["path"]
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return _finding(Fault.MISSING, file, "is not there")
    except OSError as error:
        return _out_of_reach(file, error)
    if size != file["size_bytes"]:
        return _finding(Fault.OTHER_SIZE, file, f"has {size} bytes, {file['size_bytes']} in the log")
    try:
        return _examine_content(pq.ParquetFile(path), file, deep=deep)
    except FileNotFoundError:
        return _finding(Fault.MISSING, file, "is not there")
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow tells of damage by OSError without a number
            return _out_of_reach(file, error)
        return _finding(Fault.UNREADABLE, file, f"cannot be decoded: {str(error).splitlines()[0]}")


def _examine_content(content: pq.ParquetFile, file: Mapping[str, Any], *, deep: bool) -> Finding | None:
    for text in _differences(content.metadata, file):
        return _finding(Fault.OTHER_CONTENT, file, text)
    if deep:
        for group in range(content.metadata.num_row_groups):
            content.read_row_group(group)
    return None


def _differences(metadata: pq.FileMetaData, file: Mapping[str, Any]) -> Iterator[str]:
    own = metadata.metadata or {}
    if own.get(DATASET_KEY.encode()) != file["dataset"].encode():
        yield f"does not say that it holds {file['dataset']}"
    if schema_version(own) > SCHEMA_VERSION:
        yield f"has schema version {schema_version(own)}, and this Rankscope supports up to {SCHEMA_VERSION}"
    if metadata.num_rows != file["rows"]:
        yield f"has {metadata.num_rows} rows, {file['rows']} in the log"
    for column in _RANGES:
        found, said = footer_range(metadata, column), (file[f"{column}_min"], file[f"{column}_max"])
        if found is not None and said[0] is not None and found != said:
            yield f"has {column} {found[0]} to {found[1]}, {said[0]} to {said[1]} in the log"


def footer_range(metadata: pq.FileMetaData, column: str) -> tuple[Any, Any] | None:
    """Return the range of `column` over all row groups of a file; None where its footer does not say."""
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
    """Return in words which rows `file` holds."""
    run = file["run_min"] if file["run_min"] == file["run_max"] else f"{file['run_min']} to {file['run_max']}"
    steps = "" if file["step_min"] is None else f", steps {file['step_min']} to {file['step_max']}"
    return f"{file['rows']} rows of {file['dataset']}, run {run}{steps}"


def size_of(path: Path) -> int:
    """Return the bytes of the file at `path`, 0 where a service beside us has just removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _out_of_reach(file: Mapping[str, Any], error: OSError) -> Finding:
    return _finding(Fault.OUT_OF_REACH, file, f"cannot be read now ({os.strerror(error.errno or errno.EIO)})")


def _finding(fault: Fault, file: Mapping[str, Any], text: str) -> Finding:
    return Finding(fault=fault, path=file["path"], text=f"{text}; {describe_rows(file)}")
