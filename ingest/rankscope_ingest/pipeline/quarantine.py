"""Move rows that the store rejects at every attempt into separate files, so that all other rows are stored.

A rejected batch is divided until the rejected part is one poll response of one rank, or one table of the service.
Before the watermark advances past this part, the part is written to a folder next to the data, which no query reads. An
event in the store, a counter and a log message report the quarantine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType, Severity
from rankscope_contract.security.escaping import path_segment
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.pipeline.batcher import PendingBatch
from rankscope_ingest.reporting.rows import Stamp
from rankscope_storage.base.fsync import make_folders, sync_to_disk

log = logging.getLogger(__name__)

FOLDER: Final = "_quarantine"
"""Name of the quarantine folder, which is inside the folder of the store.

Readers of Delta tables, vacuum and retention ignore names that start with an underscore.
"""


class Quarantine:
    """Quarantine folder of a store.

    The flush thread writes rejected rows to the folder with `keep`. The event loop counts and logs these rows with
    `report`.
    """

    def __init__(self, store: Path, *, stamp: Callable[[], Stamp], count: Callable[[int], None]) -> None:
        self._store = store
        self._stamp = stamp
        self._count = count

    def keep(self, batch: PendingBatch, why: str) -> Path:
        """Write the rejected rows to disk and return their folder.

        If the same rows are written again, the name of the folder is the same.
        """
        folder = self._store / FOLDER / _name(batch)
        make_folders(folder, self._store, sync_to_disk)
        for name, write in _files(batch):
            write(folder / name)
            sync_to_disk(folder / name)
        report = {"error": why, "rows": batch.rows, "watermarks": dict(batch.watermarks), "info": dict(batch.info)}
        (folder / "why.json").write_text(json.dumps(report, indent=2) + "\n")
        sync_to_disk(folder / "why.json")
        sync_to_disk(folder)
        return folder

    def report(self, batch: PendingBatch, why: str, folder: Path) -> dict[str, pa.Table]:
        """Count and log rows that were moved to quarantine.

        Return a row of `events` for the store, if the rows belong to a run.
        """
        self._count(batch.rows)
        message = f"{batch.rows} rows cannot be stored and were moved to quarantine in {folder}: {why}"
        log.error(
            "%s. The folder has one Arrow file for each dataset: read them with pyarrow.ipc.open_file, correct and "
            "import them, or delete the folder. Please report the content of why.json",
            message,
            extra={"rows": batch.rows},
        )
        owner = _owner(batch)
        if owner is None:
            return {}
        row = owner | self._stamp().columns()
        row |= {"type": EventType.FAULT, "severity": Severity.CRITICAL, "value": float(batch.rows), "message": message}
        row["details"] = json.dumps({"folder": str(folder), "rows": batch.rows, "error": why}, sort_keys=True)
        return {"events": rows_table("events", [row])}


def parts(batch: PendingBatch) -> list[PendingBatch]:
    """Divide `batch` into the smallest batches that can be stored one after another.

    Each poll response is in one batch, together with the rows of the service that have the seq of one of its records,
    such as gap events. If these rows came later, the store would drop them as already stored. Rows without a seq are in
    further batches, one for each table.
    """
    found, pieces = [], [(dataset, table) for dataset, tables in batch.pieces.items() for table in tables]
    pieces += [("samples", scrape.table()) for scrape in batch.scrapes]
    for body in batch.bodies:
        beside, rest = [], []
        for dataset, table in pieces:
            own = _of(table, body.context.incarnation, body.last)
            beside.append((dataset, table.filter(own)))
            rest.append((dataset, table.filter(pc.invert(own))))
        pieces = [(dataset, table) for dataset, table in rest if table.num_rows]
        found.append(_part(batch, beside, (body,), {body.context.incarnation: body.last}))
    known = {name for part in found for name in part.watermarks}
    left = {name: seq for name, seq in batch.watermarks.items() if name not in known}
    numbered = [(dataset, table.filter(_numbered(table))) for dataset, table in pieces]
    if left or any(table.num_rows for _, table in numbered):
        found.append(_part(batch, numbered, (), left))
    return found + [
        _part(batch, [(dataset, others)], (), {})
        for dataset, table in pieces
        if (others := table.filter(pc.invert(_numbered(table)))).num_rows
    ]


def halves(batch: PendingBatch) -> tuple[PendingBatch, PendingBatch] | None:
    """Divide `batch` into two batches that together have the same content. Return None if it cannot be divided."""
    listed = parts(batch)
    if len(listed) < 2:
        return None
    middle = len(listed) // 2
    return _joined(listed[:middle]), _joined(listed[middle:])


def _joined(listed: list[PendingBatch]) -> PendingBatch:
    pieces = [(dataset, table) for part in listed for dataset, tables in part.pieces.items() for table in tables]
    bodies = tuple(body for part in listed for body in part.bodies)
    watermarks: dict[str, int] = {}
    for part in listed:
        watermarks |= part.watermarks  # in order: a later body of a process has a higher seq
    return _part(listed[0], pieces, bodies, watermarks)


def _part(batch: PendingBatch, pieces: list[tuple[str, pa.Table]], bodies: Any, watermarks: Any) -> PendingBatch:
    kept: dict[str, tuple[pa.Table, ...]] = {}
    for dataset, table in pieces:
        if table.num_rows:
            kept[dataset] = (*kept.get(dataset, ()), table)
    rows = sum(body.rows for body in bodies) + sum(table.num_rows for tables in kept.values() for table in tables)
    return PendingBatch(pieces=kept, bodies=bodies, watermarks=watermarks, rows=rows, info=batch.info)


def _numbered(table: pa.Table) -> pa.ChunkedArray:
    """Return a boolean mask of the rows that have a sequence number (seq), and thus belong to a record of a process."""
    if "seq" not in table.column_names or "incarnation" not in table.column_names:
        return pa.chunked_array([pa.repeat(pa.scalar(False), table.num_rows)])
    return pc.and_(pc.is_valid(table["seq"]), pc.is_valid(table["incarnation"]))


def _of(table: pa.Table, incarnation: str, last: int) -> pa.ChunkedArray:
    numbered = _numbered(table)
    if not pc.any(numbered).as_py():
        return numbered
    of_process = pc.equal(table["incarnation"].cast(pa.string()), incarnation)
    return pc.fill_null(pc.and_kleene(pc.and_(of_process, numbered), pc.less_equal(table["seq"], last)), False)


def _name(batch: PendingBatch) -> str:
    """Return the name of the folder for the rows of a rejected batch, inside the quarantine folder.

    If the same records are received again after a restart, the name is the same.
    """
    for incarnation, last in batch.watermarks.items():
        return f"{path_segment(incarnation)}-{last}"
    for receipts in batch.info.values():  # of remote write requests
        return f"pushed-{hashlib.blake2b(receipts.encode(), digest_size=12).hexdigest()}"
    return f"service-{uuid.uuid4().hex}"


def _files(batch: PendingBatch) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield the name of each file to write for a rejected batch, and the function that writes the file."""
    try:
        tables: Mapping[str, pa.Table] = batch.tables()
    except Exception:  # the reason for quarantine: keep the batch as received
        log.exception("unexpected error in decoding a batch; its undecoded content is written to the quarantine folder")
        yield "as_it_came.pickle", lambda path: path.write_bytes(pickle.dumps(batch.as_it_came()))
        return
    for dataset, table in tables.items():
        yield f"{dataset}.arrow", functools.partial(_write, table)


def _write(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table.unify_dictionaries())


def _owner(batch: PendingBatch) -> dict[str, Any] | None:
    """Return run, attempt, rank and incarnation of the rejected rows, as columns of an event.

    Columns with an unknown value are left out. The result is None if not even the run is known.
    """
    for body in batch.bodies:
        where = body.context
        return {"run": where.run, "attempt": where.attempt, "rank": where.rank, "incarnation": where.incarnation}
    for tables in batch.pieces.values():
        for table in tables:
            runs = table["run"].drop_null().unique().to_pylist() if "run" in table.column_names else []
            if runs:
                return {"run": str(runs[0])}
    return None
