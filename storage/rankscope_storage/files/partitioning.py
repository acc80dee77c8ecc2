"""Assign rows to partitions and generate the names of data files. This module does no I/O.

The partition `part` is a hint for people and for the selection of files. Only the columns of the rows, and the
statistics in the Delta log, determine which rows a file contains.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.security.escaping import path_segment
from rankscope_storage.base.schema import fingerprint
from rankscope_storage.files.sorting import dictionary_encoded, one_chunk

OWN_PART_ROWS: Final = 100_000
"""If a run has at least this many rows of a dataset in one flush, these rows get a separate part (partition)."""

SHARED_PREFIX: Final = "_shared-"

LONGEST_PART: Final = 200
"""Largest length of a part name in bytes. File systems permit 255, including the prefix `part=`."""

_DIGEST_LENGTH: Final = 16
_DAY_MICROSECONDS: Final = 86_400_000_000
_ROUNDED_FILE: Final = re.compile(r"-m(\d+)\.parquet$")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The part (partition) of each row of a table: `codes` has one index into `names` per row."""

    names: Sequence[str]
    codes: npt.NDArray[np.integer]


def parts(table: pa.Table, dataset: str, today: dt.date) -> Iterator[tuple[str, pa.Table]]:
    """Divide the rows of one flush into parts (partitions); yield the name and the rows of each part."""
    names = _day_parts(table, today) if dataset == "samples" else _run_parts(table, today)
    if len(names.names) == 1:
        yield names.names[0], table
        return
    used = np.flatnonzero(np.bincount(names.codes, minlength=len(names.names)))
    for code in used.tolist():
        rows = table if len(used) == 1 else table.take(pa.array(np.flatnonzero(names.codes == code)))
        yield names.names[code], rows


def _run_parts(table: pa.Table, today: dt.date) -> _Parts:
    encoded = dictionary_encoded(table.column("run"))
    if len(encoded.dictionary.unique()) < len(encoded.dictionary):
        encoded = encoded.dictionary_decode().dictionary_encode()
    runs, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)
    own = np.bincount(codes, minlength=len(runs)) >= OWN_PART_ROWS
    shared = len(runs)
    codes = codes if own.all() else np.where(own[codes], codes, shared)
    return _Parts([*map(own_part, runs), shared_part(today)], codes)


def _day_parts(table: pa.Table, today: dt.date) -> _Parts:
    times = one_chunk(table.column("ts")).view(pa.int64())
    if len(times) and not times.null_count:  # nearly always of one day: no sorting needed
        low, high = (value.as_py() // _DAY_MICROSECONDS for value in pc.min_max(times).values())
        if low == high:
            return _Parts([_day(low)], np.zeros(len(times), np.int8))
    days, codes = np.unique(pc.fill_null(times, 0).to_numpy() // _DAY_MICROSECONDS, return_inverse=True)
    if times.null_count:
        codes = np.where(times.is_null().to_numpy(zero_copy_only=False), len(days), codes)
    return _Parts([*map(_day, days.tolist()), today.isoformat()], codes)


def _day(number: int) -> str:
    """Return a day, given as the number of days since 1970-01-01, as text.

    Days outside of Python's calendar are permitted.
    """
    return str(np.datetime64(number, "D"))


def own_part(run: str) -> str:
    """Return the name of the part (partition) that has rows of `run` only.

    A name that is too long is shortened and ends with a digest.
    """
    segment = path_segment(run)
    if len(segment) <= LONGEST_PART:
        return segment
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST_LENGTH]
    kept = run[:LONGEST_PART]
    while len(path_segment(kept)) > LONGEST_PART - _DIGEST_LENGTH - 1:
        kept = kept[:-1]
    return f"{path_segment(kept)}~{digest}"  # encoded names contain no tilde


def shared_part(day: dt.date) -> str:
    """Return the name of the part (partition) that all runs without a separate part share for rows flushed on `day`."""
    return f"{SHARED_PREFIX}{day.isoformat()}"


def data_file(dataset: str, part: str, mantissa_bits: int | None = None, *, whole: bool = False) -> str:
    """Return a unique path for a new file, relative to the store.

    Set `whole` if the file also has the UNWRITTEN columns, which are null in most files and then absent. The file name
    contains `mantissa_bits`, so that readers find the number of mantissa bits of rounded statistics in the Delta log.
    """
    rounded = "" if mantissa_bits is None else f"-m{mantissa_bits}"
    return f"dataset={dataset}/part={part}/{fingerprint(dataset, whole=whole)}-{uuid.uuid4().hex}{rounded}.parquet"


def file_fingerprint(path: str) -> str:
    """Return the fingerprint of the columns of the file at `path`, which is part of the file's name."""
    return path.rsplit("/", 1)[-1].split("-", 1)[0]


def file_mantissa_bits(path: str) -> int | None:
    """Return the mantissa bits of the statistics in the file at `path`; None if they were not rounded."""
    match = _ROUNDED_FILE.search(path)
    return int(match[1]) if match else None
