"""Append records 0 to N-1 of two ranks like a service, after the stored ones.

Usage: python appending.py STORE N
"""

import os
import sys

import pyarrow as pa

from rankscope_storage.api.store import Batch, Store

RANKS, TENSORS = 2, 4


def tables(first: int, count: int) -> dict[str, pa.Table]:
    """Return the rows of `count` records of each rank."""
    common = {"run": "r", "attempt": 0, "ts_origin": "rank"}
    rows = [
        {**common, "rank": rank, "incarnation": f"i{rank}", "seq": seq, "step": seq}
        for rank in range(RANKS)
        for seq in range(first, first + count)
    ]
    scalars = [{**row, "name": "loss", "value": 1.0} for row in rows]
    statistics = [{**row, "kind": "k", "tensor": f"t{number}"} for row in rows for number in range(TENSORS)]
    return {"scalars": pa.Table.from_pylist(scalars), "tensor_stats": pa.Table.from_pylist(statistics)}


def main(path: str, records: int) -> None:
    """Append until all records are stored, and print a line after each commit."""
    with Store.open(path).claim(owner=f"pid {os.getpid()}") as writer:
        seq = min(writer.watermark(f"i{rank}") for rank in range(RANKS)) + 1
        while seq < records:
            count = min(1 + seq % 3, records - seq)
            watermarks = {f"i{rank}": seq + count - 1 for rank in range(RANKS)}
            writer.append(Batch(tables=tables(seq, count), watermarks=watermarks))
            seq += count
            print(seq, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
