"""What a question tells of each data file: a file never changes, so it is asked of it once in a process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.escaping import sql_string
from rankscope_storage.asking.views import empty_select

_KEPT_FILES: Final = 10_000
_BATCH_FILES: Final = 200
_BATCH_BYTES: Final = 64_000_000
"""What is asked of so much together, about 8 million scalars or 5 million statistics of tensors, fits into memory."""

Ask = Callable[[str], pa.Table]
"""Runs SQL."""


class ByFile:
    """What `select`, of the files of `dataset`, tells of each, and `refine` makes of it: rows of `schema`."""

    def __init__(
        self,
        dataset: str,
        select: str,
        *,
        where: str,
        schema: pa.Schema,
        refine: Callable[[pa.Table], pa.Table] | None = None,
    ) -> None:
        self._dataset = dataset
        self._select = select
        self._where = where
        self._schema = schema
        self._refine = refine
        self._seen: OrderedDict[str, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, files: Sequence[str], ask: Ask) -> pa.Table:
        """Return what is told of all `files`; `ask` is used for those that were not yet looked through."""
        known: dict[str, pa.Table | None] = {path: self._seen.get(path) for path in files}
        unseen = [path for path, rows in known.items() if rows is None]
        for batch in _batches(unseen):
            known |= self._look_through(batch, ask)
        with self._lock:
            self._seen.update(known)
            while len(self._seen) > _KEPT_FILES:
                self._seen.popitem(last=False)
        found = list(known.values())
        return pa.concat_tables(found) if found else self._schema.empty_table()

    def _look_through(self, files: Sequence[str], ask: Ask) -> dict[str, pa.Table]:
        listed = ", ".join(map(sql_string, files))
        # By name, and with all columns there are: files of an older shape may lack some.
        told = ask(
            f"SELECT filename, {self._select} FROM ({empty_select(self._dataset)} UNION ALL BY NAME SELECT * "
            f"FROM read_parquet([{listed}], hive_partitioning = false, union_by_name = true, filename = true)) "
            f"WHERE {self._where} GROUP BY ALL"
        )
        if self._refine is not None:
            told = self._refine(told)
        names, rows = told.column("filename"), told.select(self._schema.names).cast(self._schema)
        return {path: rows.filter(pc.equal(names, path)) for path in files}


def _batches(files: Sequence[str]) -> Iterator[list[str]]:
    """Divide `files` into lists that are neither too long nor, if that can be, too large."""
    batch: list[str] = []
    size = 0
    for path in files:
        of_file = _size(path)
        if batch and (len(batch) == _BATCH_FILES or size + of_file > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += of_file
    if batch:
        yield batch


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0  # whoever reads it will say what is wrong with it
