"""A store with rows in every view and macro, and a query for each of them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from tests.view.training import MAIN, START, Size, write_store

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.query.statements import definitions

_BEGAN: Final = dt.datetime.fromtimestamp(START / 1e6, dt.UTC)
_CURVE: Final = f"WITH c AS (SELECT run, step, rank, value FROM scalars WHERE run = '{MAIN}' AND name = 'loss')"
_CALLS: Final = {
    "ema": f"{_CURVE} FROM ema(c, step, value, 0.1, series := rank)",
    "moving_average": f"{_CURVE} FROM moving_average(c, step, value, 5, series := rank)",
    "p10": f"{_CURVE} FROM p10(c, value, series := rank)",
    "perplexity": f"{_CURVE} SELECT step, rank, perplexity(value) FROM c WHERE value < 20",
    "downsample": f"{_CURVE} FROM downsample(c, step, value, 20, series := rank)",
    "scalar_curve": f"FROM scalar_curve('{MAIN}', points := 20)",
    "top_deviations": f"FROM top_deviations('{MAIN}')",
    "bucket_deviations": f"FROM bucket_deviations('{MAIN}')",
}
"""A query for each macro; a view is read completely."""


def queries() -> dict[str, str]:
    """Return a query for each public view and macro, except the views of datasets without a reader's logic."""
    return {name: _CALLS.get(name, f"FROM {name}") for name in definitions(prefix="rankscope_raw_")}


def write_reader_store(root: Path) -> None:
    """Create a store with several runs, hashes that differ, collectives, and rollups of the oldest steps."""
    write_store(root, Size(steps=240))
    with Store.open(root).claim(owner="readers") as writer:
        tables = {"hashes": _hashes(), "collectives": _collectives(), "histograms": _histograms()}
        rows = {name: pa.Table.from_pylist(listed, schema=dataset_schema(name)) for name, listed in tables.items()}
        writer.append(Batch(tables=rows, watermarks={}))
    retain(root, Retention(raw_days=1, scalars_days=1), sync_to_disk, now=_BEGAN + dt.timedelta(days=1, minutes=12))


def _common(rank: int, step: int) -> dict[str, Any]:
    ts = _BEGAN + dt.timedelta(days=2, seconds=step)
    return {"run": MAIN, "attempt": 0, "rank": rank, "step": step, "ordinal": step, "ts": ts, "ts_origin": "rank"}


def _hashes() -> list[dict[str, Any]]:
    return [
        _common(rank, step)
        | {
            "kind": "param_after",
            "tensor": f"t{number}",
            "replicas": "0-3",
            "hash": _hash(step) + (rank == 2 and step > 300),
        }
        for step in range(295, 305)
        for rank in range(4)
        for number in range(3)
    ]


def _hash(step: int) -> int:
    """Return one of the numbers in the whole range of the column, as real hashes are."""
    return (step * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63)


def _collectives() -> list[dict[str, Any]]:
    call = {
        "incarnation": "readers", "op": "all_reduce", "group": "dp", "group_id": "0", "group_size": 2,
        "group_ranks": "0-1", "bytes": 12, "dtype": "float32", "state": "left", "backend": "gloo", "is_p2p": False,
    }  # fmt: skip
    return [
        _common(rank, step)
        | call
        | {"collective_seq": step, "t_start": _BEGAN + dt.timedelta(days=2, seconds=step + 0.1 * rank)}
        for step in range(300, 330)
        for rank in range(2)
    ]


def _histograms() -> list[dict[str, Any]]:
    names = {field.name: field.type for field in dataset_schema("histograms")}
    lists = {name: [1, 2, step] for step in (3,) for name, type_ in names.items() if pa.types.is_list(type_)}
    return [
        _common(0, step) | {"kind": "grad_reduced", "tensor": "t", "scheme": "log2"} | lists for step in range(300, 310)
    ]
