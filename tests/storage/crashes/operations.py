"""What is killed, on which store it begins, and what is found afterwards. Everything here runs in forked children.

An operation gets the folder of a store and `say`, by which it tells what it has acknowledged.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_contract.model.rollups import BUCKET_STEPS
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.log.checkpoints import write_checkpoint
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER, has_entries
from rankscope_storage.maintenance import compaction_plan, vacuum
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.repair import repair
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.maintenance.vacuum import maintain
from rankscope_storage.runs.edit import merge as join
from rankscope_storage.runs.edit import remove, rename

Say = Callable[[int], None]

RANKS: Final = 2
RECORDS: Final = 15
_BEGAN: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_LATER: Final = _BEGAN + dt.timedelta(days=30)


def rows(first: int, count: int, *, run: str = "r", process: str = "i") -> Batch:
    """Records `first` to `first + count - 1` of each rank, a loss and two tensors; ten are a bucket of rollups."""
    records = [(rank, seq) for rank in range(RANKS) for seq in range(first, first + count)]
    common = [
        {
            "run": run,
            "attempt": 0,
            "rank": rank,
            "incarnation": f"{process}{rank}",
            "seq": seq,
            "step": seq * BUCKET_STEPS // 10,
            "ts": _BEGAN + dt.timedelta(seconds=seq),
            "ts_origin": "rank",
        }
        for rank, seq in records
    ]
    tables = {
        "scalars": [{**row, "name": "loss", "value": 1.0 / (1 + row["seq"])} for row in common],
        "tensor_stats": [
            {**row, "kind": "k", "tensor": f"t{number}", "norm": 1.5, "nans": 0, "infs": 0, "zeros": 0, "numel": 4}
            for row in common
            for number in range(2)
        ],
    }
    return Batch(
        tables={name: pa.Table.from_pylist(listed) for name, listed in tables.items()},
        watermarks={f"{process}{rank}": first + count - 1 for rank in range(RANKS)},
    )


def append(root: Path, say: Say, records: int = RECORDS, at_once: int = 2) -> None:
    """What a service does from its start: claim, go on where the store stands, acknowledge each commit."""
    with Store.open(root, create=True).claim(owner=f"pid {os.getpid()}") as writer:
        seq = min(writer.watermark(f"i{rank}") for rank in range(RANKS)) + 1
        while seq < records:
            count = min(at_once, records - seq)
            writer.append(rows(seq, count))
            seq += count
            say(seq)


def begin(root: Path, say: Say) -> None:
    """A first start: the store is made, and all that there is comes in one commit."""
    append(root, say, at_once=RECORDS)


def silent(_: int) -> None:
    """Tell nobody."""


def merge(root: Path, say: Say) -> None:
    """Compaction of whatever is not one file."""
    compaction_plan.SMALL_FILES = 1
    compact(root, sync_to_disk)


def clean(root: Path, say: Say) -> None:
    """Maintenance that finds everything old enough to go: replaced files, leavings, entries of the log."""
    vacuum.REMOVED_FILES_HOURS = 0  # type: ignore[misc]
    maintain(root, sync_to_disk)


def roll_up(root: Path, say: Say) -> None:
    """Retention: rows become rollups."""
    retain(root, Retention(raw_days=1, scalars_days=1), sync_to_disk, now=_LATER)


def roll_up_in_part(root: Path, say: Say) -> None:
    """Retention: the older bucket of each file becomes rollups, and the rest of the file is written anew."""
    kept = Retention(raw_days=1 / 86_400, scalars_days=1 / 86_400)
    retain(root, kept, sync_to_disk, now=_BEGAN + dt.timedelta(seconds=1 + 12))


def expire(root: Path, say: Say) -> None:
    """Retention: rollups go."""
    retain(root, Retention(raw_days=1, scalars_days=1, rollup_days=2), sync_to_disk, now=_LATER)


def call_otherwise(root: Path, say: Say) -> None:
    """A run gets another name, unless it has that already."""
    if any(row["run"] == "r" for row in content(root)["scalars"]):
        rename(root, "r", "s", sync_to_disk)


def take_away(root: Path, say: Say) -> None:
    """A run is removed, another that shares its files stays."""
    remove(root, "other", sync_to_disk)


def put_together(root: Path, say: Say) -> None:
    """A run is joined to another."""
    join(root, "other", "r", sync_to_disk)


def mend(root: Path, say: Say) -> None:
    """Repair of a torn newest entry, and of a file that is gone."""
    repair(root, sync_to_disk)


OPERATIONS: Final[dict[str, Callable[[Path, Say], None]]] = {
    "create": begin,
    "append": append,
    "compact": merge,
    "maintain": clean,
    "roll up": roll_up,
    "roll up in part": roll_up_in_part,
    "expire": expire,
    "rename": call_otherwise,
    "remove": take_away,
    "join": put_together,
    "repair": mend,
}


def prepare(operation: str, root: Path) -> None:
    """Make the store that `operation` begins with."""
    if operation == "create":
        return
    if operation == "append":  # a checkpoint is due in the midst of what follows
        append(root, silent, records=2)
        write_checkpoint(root, sync_to_disk)
        append(root, silent, records=9, at_once=1)
        return
    append(root, silent, at_once=5)
    if operation == "maintain":
        merge(root, silent)
        part = next(root.glob("dataset=scalars/part=*"))
        for leaving in (part / "orphan.parquet", root / "_staging" / "left", root / LOG_FOLDER / f"{99:020d}.json#1"):
            leaving.write_bytes(b"x")
        age(root)
    if operation == "expire":
        roll_up(root, silent)
    if operation == "roll up in part":
        merge(root, silent)
    if operation in ("remove", "join"):
        with Store.open(root).claim(owner="another") as writer:
            writer.append(rows(0, RECORDS, run="other", process="j"))
    if operation == "remove":
        merge(root, silent)  # what is small and over shares files
    if operation == "repair":
        newest = max((root / LOG_FOLDER).glob("*.json"))
        newest.with_name(f"{int(newest.stem) + 1:020d}.json").write_bytes(newest.read_bytes()[:40])
        max(root.glob("dataset=scalars/part=*/*.parquet"), key=lambda path: path.stat().st_mtime_ns).unlink()


def age(root: Path) -> None:
    """Make every file old enough to go, if nobody needs it."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (1_700_000_000, 1_700_000_000))


def content(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of the newest version, by dataset, in one order; read without what the store itself reads by."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in Log.open(root, sync_to_disk).snapshot().files.to_pylist():
        found.setdefault(file["dataset"], []).extend(pq.ParquetFile(root / file["path"]).read().to_pylist())
    return {name: sorted(listed, key=repr) for name, listed in sorted(found.items())}


def after(operation: str, root: Path) -> dict[str, Any]:
    """What is found after a death, and what becomes of the store when the work is done again and all is tidied up.

    Nothing of it is allowed to fail: whoever comes next needs no remedy after a kill.
    """
    readable = has_entries(root) and operation != "repair"
    found = content(root) if readable else {}
    whole = not readable or check(root).is_intact
    OPERATIONS[operation](root, silent)
    redone = content(root)
    with Store.open(root).claim(owner="next") as writer:
        writer.append(rows(RECORDS, 1))
        watermark = writer.watermark("i0")
    age(root)
    clean(root, silent)
    return {
        "found": found,
        "whole": whole,
        "redone": redone,
        "watermark": watermark,
        "rows": {name: len(listed) for name, listed in content(root).items()},
        "whole in the end": check(root, deep=True).is_intact,
        "left": left_over(root),
    }


def left_over(root: Path) -> list[str]:
    """Return the files that nothing names, of those that a process can leave behind."""
    live = {row["path"] for row in Log.open(root, sync_to_disk).snapshot().files.to_pylist()}
    data = [path.relative_to(root).as_posix() for path in root.glob("dataset=*/part=*/*")]
    other = [*(root / "_staging").iterdir(), *(root / LOG_FOLDER).glob("*#*")]
    return sorted([*(path for path in data if path not in live), *(path.name for path in other)])
