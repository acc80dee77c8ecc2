"""Processes of part writers of `make test-scale`, and the check of one snapshot by its content.

`python -m tests.scale.writers ROOT append NUMBER` appends records and prints the count that is acknowledged;
`python -m tests.scale.writers ROOT compact` merges files and writes checkpoints until it is killed.
"""

import io
import os
import sys
from collections import Counter
from typing import Any, Final

import obstore
import pyarrow.parquet as pq
from deltalake import DeltaTable
from tests.storage.crashes.operations import RANKS, rows

from rankscope_storage.api.store import Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.maintenance import compaction

WRITERS: Final = 4
RECORDS: Final = 125
"""Records of each writer. Each is one commit, so that all writers make 500 commits."""
ROWS: Final = {"scalars": 1, "tensor_stats": 2}
"""Rows of a record of one rank."""


def process_of(number: int) -> str:
    """Return the prefix of the incarnations of a writer, which a restarted writer continues."""
    return f"writer{number}-"


def append(root: str, number: int) -> None:
    """Claim a shard, continue after the stored records, and print the number of records after each commit."""
    process = process_of(number)
    with Store.open(root).claim(f"{number}/{WRITERS}", owner=f"pid {os.getpid()}") as writer:
        stored = min(writer.watermark(f"{process}{rank}") for rank in range(RANKS)) + 1
        for seq in range(stored, RECORDS):
            writer.append(rows(seq, 1, run=f"run{number}", process=process))
            print(seq + 1, flush=True)


def compact(root: str) -> None:
    """Merge small files, and print the number of merged files and of refused merges."""
    compaction.SMALL_FILES = 4
    store = Store.open(root)
    while True:
        report = compaction.compact(store.root, sync_to_disk)
        print(report.files_removed, report.refused, flush=True)


class Reader:
    """A reader that opens the newest snapshot with delta-rs, and reads every data file once. Files do not change."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: dict[str, Counter[tuple[str, str, int]]] = {}
        self._objects = obstore.store.from_url(root)
        self.versions: list[int] = []

    def records(self) -> dict[str, int]:
        """Return the number of records of each incarnation in the newest snapshot.

        Fails unless each record up to this number has all its rows once, and the watermark is the last of them.
        """
        table = DeltaTable(self._root)
        counted: Counter[tuple[str, str, int]] = Counter()
        for path in table.get_add_actions(flatten=True)["path"].to_pylist():
            counted += self._content(path)
        newest: dict[str, int] = {}
        for _, incarnation, seq in counted:
            newest[incarnation] = max(newest.get(incarnation, 0), seq + 1)
        wanted = Counter({(d, i, seq): n for d, n in ROWS.items() for i, last in newest.items() for seq in range(last)})
        assert wanted == counted, f"version {table.version()}: {wanted - counted} missing, {counted - wanted} too many"
        marks = {incarnation: table.transaction_version(f"w:{incarnation}") for incarnation in newest}
        assert {incarnation: last - 1 for incarnation, last in newest.items()} == marks, f"version {table.version()}"
        self.versions.append(table.version())
        return newest

    def _content(self, path: str) -> Counter[tuple[str, str, int]]:
        if path not in self._files:
            found: Any = pq.read_table(
                io.BytesIO(obstore.get(self._objects, path).bytes()), columns=["incarnation", "seq"]
            )
            dataset = path.removeprefix("dataset=").partition("/")[0]
            keys = zip(found["incarnation"].to_pylist(), found["seq"].to_pylist(), strict=True)
            self._files[path] = Counter((dataset, incarnation, seq) for incarnation, seq in keys)
        return self._files[path]


if __name__ == "__main__":
    if sys.argv[2] == "append":
        append(sys.argv[1], int(sys.argv[3]))
    else:
        compact(sys.argv[1])
