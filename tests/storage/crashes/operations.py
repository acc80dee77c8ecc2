"""The operations that are killed, the stores before them, and the checks afterwards. Runs in forked children."""

import datetime as dt
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from tests.storage.older_encoding import split_integers

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import BUCKET_STEPS
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location
from rankscope_storage.log import shard_lock
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER, entries
from rankscope_storage.maintenance import compaction, vacuum
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.copying import copy_store
from rankscope_storage.maintenance.repair import repair
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.maintenance.upgrade import upgrade
from rankscope_storage.maintenance.vacuum import maintain
from rankscope_storage.runs.edit import merge as join
from rankscope_storage.runs.edit import remove, rename
from rankscope_storage.writer.writer import write_checkpoint

Acknowledge = Callable[[int], None]

STORE_1: Final = Path(__file__).parents[1] / "data" / "store_1"
RANKS: Final = 2
RECORDS: Final = 15
_BEGAN: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_LATER: Final = _BEGAN + dt.timedelta(days=30)


def rows(first: int, count: int, *, run: str = "r", process: str = "i") -> Batch:
    """Return records `first` to `first + count - 1` of each rank: a loss and two tensors. Ten are a rollup bucket."""
    records = [(rank, seq) for rank in range(RANKS) for seq in range(first, first + count)]
    common = [
        {"run": run, "attempt": 0, "rank": rank, "incarnation": f"{process}{rank}", "seq": seq, "ts_origin": "rank",
         "step": seq * BUCKET_STEPS // 10, "ts": _BEGAN + dt.timedelta(seconds=seq)}
        for rank, seq in records
    ]  # fmt: skip
    counts = {"nans": 0, "infs": 0, "zeros": 0, "numel": 4}
    tensors = [{"kind": "k", "tensor": f"t{number}", "norm": 1.5, **counts} for number in range(2)]
    scalars = [{**row, "name": "loss", "value": 1.0 / (1 + row["seq"])} for row in common]
    tables = {"scalars": scalars, "tensor_stats": [row | own for row in common for own in tensors]}
    return Batch(
        tables={name: pa.Table.from_pylist(listed) for name, listed in tables.items()},
        watermarks={f"{process}{rank}": first + count - 1 for rank in range(RANKS)},
    )


def append(root: Location, acknowledge: Acknowledge, records: int = RECORDS, per_commit: int = 2) -> None:
    """Run like a service: claim the shard, continue after the stored records, acknowledge each commit."""
    with Store.open(root, create=True).claim(owner=f"pid {os.getpid()}") as writer:
        seq = min(writer.watermark(f"i{rank}") for rank in range(RANKS)) + 1
        while seq < records:
            count = min(per_commit, records - seq)
            writer.append(rows(seq, count))
            seq += count
            acknowledge(seq)


def objects(root: Location) -> Any:
    """Return a client, independent of the package, for the files below `root`."""
    return obstore.store.LocalStore(root, mkdir=True) if isinstance(root, Path) else obstore.store.from_url(str(root))


def keys(root: Location) -> list[str]:
    """Return the paths of all files below `root`, oldest first."""
    found = sorted(objects(root).list().collect(), key=lambda one: one["last_modified"])
    return [one["path"] for one in found]


def silent(_: int) -> None:
    """Ignore the acknowledged records."""


def merge(root: Location, *_: Any) -> None:
    compaction.SMALL_FILES = 1
    compact(root, sync_to_disk)


def clean(root: Location, *_: Any) -> None:
    """Run maintenance on old files: replaced files, orphan files, log entries."""
    vacuum.REMOVED_FILES_HOURS = 0  # type: ignore[misc]
    maintain(root, sync_to_disk)


def mend(root: Location, *_: Any) -> None:
    """Repair a store with a missing file and, in a folder, a torn newest entry, which was written just now."""
    shard_lock.SILENT_SECONDS = 0  # type: ignore[misc]
    repair(root, sync_to_disk)


def roll_up(root: Location, days: float = 1, now: dt.datetime = _LATER, **more: float) -> None:
    """Run retention: rows of more than `days` become rollups."""
    retain(root, Retention(raw_days=days, scalars_days=days, **more), sync_to_disk, now=now)


def rename_run(root: Location, _: Acknowledge) -> None:
    if any(row["run"] == "r" for row in content(root)["scalars"]):
        rename(root, "r", "s", sync_to_disk)


def import_small_logs(root: Location, _: Acknowledge) -> None:
    """Import three small logs with two commits. Their folder is that of the killer. The time is constant."""
    from rankscope.access.log_import import import_logs, plan_logs
    from rankscope_ingest import importers

    folder = Path(tempfile.gettempdir(), "logs")
    folder.mkdir(exist_ok=True)
    for number in range(3):
        if not (path := folder / f"log{number}.jsonl").exists():
            path.write_text("".join(f'{{"step": {step}, "loss": {number + 1 / step}}}\n' for step in range(1, 4)))
    importers.GROUP_LOGS = 2  # type: ignore[misc]
    plan, _ = plan_logs([folder], None, None, "UTC")
    with mock.patch("time.time_ns", return_value=int(_LATER.timestamp()) * 1_000_000_000):
        import_logs(plan, root, "0/1", rules=(), shown=None, options=importers.Options(), out=None)


OPERATIONS: Final[dict[str, Callable[[Location, Acknowledge], object]]] = {
    "create": lambda root, acknowledge: append(root, acknowledge, per_commit=RECORDS),
    "append": append,
    "compact": merge,
    "rewrite": lambda root, _: compact(root, sync_to_disk, rewrite=True),  # of an older encoding
    "maintain": clean,
    "roll up": lambda root, _: roll_up(root),
    # The older bucket of each file becomes a rollup, and the other rows are written again.
    "roll up in part": lambda root, _: roll_up(root, 1 / 86_400, _BEGAN + dt.timedelta(seconds=1 + 12)),
    "expire": lambda root, _: roll_up(root, rollup_days=2),
    "rename": rename_run,
    "remove": lambda root, _: remove(root, "other", sync_to_disk),  # a run that shares its files with another
    "join": lambda root, _: join(root, "other", "r", sync_to_disk),
    "repair": mend,
    "import": import_small_logs,
    "upgrade": lambda root, _: upgrade(root, sync_to_disk),  # of a store of an earlier release
    "copy": lambda root, _: None if entries(root) else copy_store(root / SOURCE, root, sync_to_disk),
}

SOURCE: Final = "_source"
"""Name of the store that is copied, in the folder of the copy."""
UNREADABLE: Final = ("create", "copy", "repair")
"""Operations before which there is no store, or one that cannot be read."""


def prepare(operation: str, root: Location) -> None:
    if operation == "create":
        return
    if operation == "copy":
        append(root / SOURCE, silent, per_commit=5)
        return
    if operation == "upgrade":
        for path in filter(Path.is_file, STORE_1.rglob("*")):
            objects(root).put(str(path.relative_to(STORE_1)), path)
        return
    if operation == "append":  # a checkpoint becomes due during the operation
        append(root, silent, records=2)
        write_checkpoint(root, sync_to_disk)
        append(root, silent, records=9, per_commit=1)
        return
    if operation == "rewrite":
        with split_integers():
            append(root, silent, per_commit=5)
        return
    append(root, silent, per_commit=5)
    if operation == "maintain":
        merge(root, silent)
        part = next(key for key in keys(root) if key.startswith("dataset=scalars/")).rpartition("/")[0]
        objects(root).put(f"{part}/orphan.parquet", b"x")
        if isinstance(root, Path):
            for orphan in (root / "_staging" / "left", root / LOG_FOLDER / f"{99:020d}.json#1"):
                orphan.write_bytes(b"x")
        age(root)
    if operation == "expire":
        roll_up(root)
    if operation == "roll up in part":
        merge(root, silent)
    if operation in ("remove", "join"):
        with Store.open(root).claim(owner="another") as writer:
            writer.append(rows(0, RECORDS, run="other", process="j"))
    if operation == "remove":
        merge(root, silent)  # small ended runs share files
    if operation == "repair":
        if isinstance(root, Path):  # objects are never incomplete
            newest = max((root / LOG_FOLDER).glob("*.json"))
            newest.with_name(f"{int(newest.stem) + 1:020d}.json").write_bytes(newest.read_bytes()[:40])
        objects(root).delete([[key for key in keys(root) if key.startswith("dataset=scalars/")][-1]])


def age(root: Location) -> None:
    """Make every local file and folder old enough for vacuum. A proxy does this for objects."""
    for path in root.rglob("*") if isinstance(root, Path) else ():
        os.utime(path, (1_700_000_000, 1_700_000_000))


def content(root: Location) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of the newest version, by dataset and sorted, without the query code of the package."""
    # The details of import events are omitted, because they contain the path of the log.
    found: dict[str, list[dict[str, Any]]] = {}
    for file in Log.open(root, sync_to_disk, may_be_older=True).snapshot().files.to_pylist():
        table = pq.ParquetFile(io.BytesIO(objects(root).get(file["path"]).bytes())).read()
        kept = [name for name in table.column_names if (file["dataset"], name) != ("events", "details")]
        found.setdefault(file["dataset"], []).extend(table.select(kept).to_pylist())
    return {name: sorted(listed, key=repr) for name, listed in sorted(found.items())}


def after(operation: str, root: Location) -> dict[str, Any]:
    """Return the state after a kill, and after the operation was repeated and the store vacuumed."""
    # No step may fail: the next process needs no repair after a kill.
    readable = bool(entries(root)) and operation != "repair"
    found = content(root) if readable else {}
    whole = not readable or operation == "upgrade" or check(root).is_intact
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


def left_over(root: Location) -> list[str]:
    """Return the files that no version contains, among those that a killed process can leave."""
    live = {row["path"] for row in Log.open(root, sync_to_disk).snapshot().files.to_pylist()}
    other = [*(root / "_staging").iterdir(), *(root / LOG_FOLDER).glob("*#*")] if isinstance(root, Path) else []
    data = [key for key in keys(root) if key.startswith("dataset=")]
    return sorted([*(key for key in data if key not in live), *(path.name for path in other)])
