"""A store with rows of all datasets, drawn from a seed, in which each query of the documentation finds rows.

The rows have NaN, infinities, nulls, odd names, equal keys and several attempts whose steps overlap.
"""

import datetime as dt
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS, IMPORT_PREFIX
from rankscope_storage.base.schema import dataset_schema

Row = dict[str, Any]

START: Final = dt.datetime(2026, 3, 1, 23, 59, 58, 250_001, dt.UTC)
RUNS: Final = ("my-run", "another-run", "r", "pretraining", "odd 'run'/ü=%\"\\n")
ODD: Final = (math.nan, math.inf, -math.inf, None)
STEPS: Final = 30
_POOLS: Final[dict[str, tuple[Any, ...]]] = {
    "run": RUNS,
    "attempt": (0, 0, 1, None),
    "rank": (0, 1, 2, None),
    "incarnation": ("x0", "x1", None),
    "micro_step": (None, None, 0, 1),
    "vpp_stage": (None, None, 0),
    "index": (None, None, 0, 1),
    "call_seq": (None, None, 3),
    "ts_origin": ("rank", "rank", "log", None),
    "kind": ("grad_unreduced", "grad_reduced", "param_before", "param_after", "exp_avg"),
    "tensor": ("blocks.0.weight", "blocks.1.weight", 'odd "tensor\'s"\\ü'),
    "module": ("blocks.0.weight", "head"),
    "placement": ("full", "shard", "replica", None),
    "shard_group": ("0-1", "2-3", None),
    "replicas": ("0-2", "0-3", "1,3", None),
    "hash": (7, 7, 7, 8, -9, None),
    "op": ("all_reduce", "_all_gather_base", "broadcast", "norm", "gather"),
    "group": ("dp", None),
    "group_id": ("0", "0", "1", None),
    "group_ranks": ("0-2", "0-1,3", "2", "", None),
    "state": ("left", "entered", None),
    "is_p2p": (False, False, None, True),
    "collective_seq": (1, 2, 3, 4, None),
    "nans": (0, 0, 0, 2, None),
    "infs": (0, 0, 1, None),
    "dtype": ("float32", "bfloat16", None),
    "labels": (None, '{"phase":"data"}', '{"gpu":"0"}', '{"bad":NaN}'),
    "details": (
        None,
        '{"state":"missed","fired_step":3,"samples":["a",1.50,null],"was":"off","now":null}',
        '{"x":NaN}',
    ),
    "source_kind": ("live", "live", "csv"),
    "tags": (None, '{"a":"b"}', "{}"),
    "note": (None, 'ein "Satz"', ""),
    "target": ("node-7", "node 8"),
    "metric": ("DCGM_FI_DEV_POWER_USAGE", "up"),
    "config": ('{"git_commit":"abc","argv":["a b","c"]}', None),
    "name": ("loss", "learning_rate", "eval_loss"),
}


class Rows:
    """Draws rows of a store. Numbers of rows and times increase in the order in which rows are made."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.count = itertools.count(1)

    def value(self, field: pa.Field) -> Any:
        if field.name in _POOLS:
            chosen = self.draw.choice(_POOLS[field.name])
            return (
                next(value for value in _POOLS[field.name] if value is not None)
                if chosen is None and not field.nullable
                else chosen
            )
        if field.nullable and self.draw.random() < 0.1:
            return None
        if pa.types.is_list(field.type):
            return self.draw.choice([[], [1, 2, -3]]) if field.type.value_type == pa.int64() else ["tied", "ü"]
        if pa.types.is_timestamp(field.type):
            return START + dt.timedelta(microseconds=self.draw.randrange(60_000_000))
        if pa.types.is_floating(field.type):
            return self.draw.choice(ODD) if self.draw.random() < 0.15 else float(self.draw.randrange(-8, 40)) / 3
        if pa.types.is_integer(field.type):
            return self.draw.randrange(STEPS)
        return self.draw.choice([True, False]) if field.type == pa.bool_() else self.draw.choice(["x", "it's ü"])

    def any(self, dataset: str, **known: Any) -> Row:
        """Return a row whose columns are drawn, apart from those in `known`."""
        number = next(self.count)
        fixed = {
            "seq": number,
            "ordinal": 1_772_400_000_000_000 + number * 7,
            "zeros": 3,
            "numel": self.draw.choice([0, 4, 5]),
        }
        columns = fixed | known
        schema = dataset_schema(dataset)
        return {one.name: columns[one.name] if one.name in columns else self.value(one) for one in schema}


def _events(rows: Rows, run: str) -> Iterator[Row]:
    own: Row = {
        "run": run,
        "attempt": 0,
        "rank": 0,
        "incarnation": _incarnation(run, 0, 0),
        "ts_origin": "rank",
        "labels": None,
    }
    kinds = (
        "anomaly",
        "step_skipped",
        "gap",
        "hang",
        "stacks",
        "flight_record",
        "capture",
        "budget",
        "incident",
        "xid",
    )
    frames = {"threads": [{"frames": ["train.py[7]", 'loss "x"']}], "state": "began"}
    for kind in kinds:
        yield from (rows.any("events", **own | {"type": kind, "rank": rank}) for rank in (0, 1))
        yield rows.any("events", **own, type=kind, details=json.dumps(frames))
    for attempt, rank in itertools.product(range(3), range(2)):
        known = {**own, "attempt": attempt, "rank": rank, "incarnation": _incarnation(run, attempt, rank), "step": None}
        yield rows.any("events", **known | {"type": "launch", "ts_origin": "ingest", "ts": _time(attempt, 0)})
        jump = json.dumps({"offset_us": (attempt - 1) * 5_000_000 + rank})
        yield rows.any("events", **known, type="clock", details=jump, value=float(attempt - 1))
        for place, state in enumerate(("began", "ended", "began")):
            ts = _time(attempt, STEPS - 3 + 2 * place)
            yield rows.any(
                "events", **known | {"type": "hang", "ts": ts, "details": json.dumps({"state": state}), "value": 0.25}
            )


def _incarnation(run: str, attempt: int, rank: int) -> str:
    return f"i{RUNS.index(run)}{attempt}{rank}"


def _time(attempt: int, step: int) -> dt.datetime:
    return START + dt.timedelta(seconds=attempt * 100 + step, microseconds=step * 1237)


def _scalars(rows: Rows, run: str) -> Iterator[Row]:
    phases = ("data", "forward", "checkpoint", "evaluation", "mine", "first_step")
    for attempt, rank, step in itertools.product(range(3), range(2), range(1, STEPS + 1)):
        known: Row = {
            "run": run, "attempt": attempt, "rank": rank, "incarnation": _incarnation(run, attempt, rank),
            "seq": step, "micro_step": None,
            "vpp_stage": None, "step": step + 10 * attempt, "position": step + 10 * attempt, "ts": _time(attempt, step),
            "ts_origin": "rank", "labels": None, "unit": None,
        }  # fmt: skip
        numbers = {
            "loss": 3 / step if step % 11 else rows.draw.choice(ODD), "step_seconds": 0.4 + (step * 7 % 5) / 9,
            "tokens_total": 4096.0 * step, "mfu": 0.3 + rank / 7, "pre_collective_seconds": 0.1 * (rank + 1),
            "learning_rate": 0.01 / (attempt + 1),
        }  # fmt: skip
        for name, value in numbers.items():
            yield rows.any("scalars", **known | {"name": name, "value": value})
        for phase in phases:
            yield rows.any(
                "scalars",
                **known | {"name": "step_phase_seconds", "value": 0.05, "labels": json.dumps({"phase": phase})},
            )
        yield rows.any(
            "scalars", **known | {"name": "overhead_seconds", "value": step / 9, "labels": '{"thread":"publisher"}'}
        )
        yield rows.any(
            "scalars", **known | {"name": "gpu_clock_hertz", "value": 1.4e9, "labels": '{"clock":"sm"}', "step": None}
        )
    imported = {"attempt": 0, "rank": None, "incarnation": f"{IMPORT_PREFIX}1", "labels": '{"imported_from":"x.log"}'}
    yield from (rows.any("scalars", run=run, name="loss", value=2.0, **imported) for _ in range(9))
    yield from (rows.any("scalars", run=run, position=None, ts=_time(0, 1)) for _ in range(60))


def _tensors(rows: Rows, run: str) -> Iterator[Row]:
    for step, rank, kind, tensor in itertools.product((1, 2, 12, 13), range(3), _POOLS["kind"], _POOLS["tensor"]):
        placement = "replica" if kind == "grad_reduced" else "shard"
        known = {
            "run": run,
            "attempt": 1,
            "rank": rank,
            "step": step,
            "kind": kind,
            "tensor": tensor,
            "placement": placement,
        }
        norm = 1e6 if step == 12 else float(1 + rank + step)
        yield rows.any("tensor_stats", **known, norm=norm, norm_baseline=rows.draw.choice([1.0, 2.5, 0.0, None]))
    yield from (rows.any("tensor_stats", run=run) for _ in range(150))
    zero = {"run": run, "kind": "grad_reduced", "tensor": "zeros", "zeros": 3, "numel": 4}
    yield from (rows.any("tensor_stats", **zero, norm=1.0 + step / 3, step=step) for step in range(9))


def _tables(seed: int) -> Iterator[tuple[str, list[Row]]]:
    rows = Rows(seed)
    for run in RUNS:
        yield "scalars", list(_scalars(rows, run))
        yield "events", list(_events(rows, run))
        yield "tensor_stats", list(_tensors(rows, run))
        update = {"run": run, "attempt": 1, "rank": 0, "kind": "update_norm", "module": "blocks.0.weight"}
        yield "features", [rows.any("features", **update, step=step) for step in (1, 2, 12)]
        calls = itertools.product(range(3), (1, 2), range(1, 4))
        call = {"run": run, "group_id": "0", "is_p2p": False, "group_ranks": "0-3"}
        yield (
            "collectives",
            [
                rows.any("collectives", **call, attempt=attempt, rank=rank, collective_seq=seq)
                for rank, attempt, seq in calls
            ],
        )
        alike = {
            "run": run,
            "attempt": 0,
            "kind": "param_after",
            "tensor": "head",
            "replicas": "0-3",
            "vpp_stage": None,
        }
        yield (
            "hashes",
            [
                rows.any("hashes", **alike, rank=rank, step=step, hash=hash_)
                for step, hashes in enumerate(((7, 7, 8, 9), (7, 8, 7, 8), (7, 7, 7, 7), (1, None, 1, 1)))
                for rank, hash_ in enumerate(hashes)
            ],
        )
        state = {"run": run, "planned_steps": 1000}
        yield (
            "attempts",
            [
                rows.any(
                    "attempts",
                    **state,
                    attempt=number,
                    state="running",
                    source_kind="live",
                    started_at=_time(number, 0),
                )
                for number in (0, 1, 2, 2)
            ],
        )
        yield (
            "runs",
            [
                rows.any(
                    "runs",
                    **state,
                    state=rows.draw.choice(["running", "failed"]),
                    attempt=2,
                    config='{"git_commit":"abc","argv":["a b","c"],"hyperparameters":{"learning_rate":0.1}}',
                )
                for _ in range(3)
            ],
        )
    for dataset in DATASETS:
        if dataset.endswith("_rollups"):
            spans = {"step": (-100, 0, 100, None)}
            yield (
                dataset,
                [
                    rows.any(
                        dataset,
                        step=step,
                        first_step=step,
                        last_step=None if step is None else step + 60,
                        ts=START,
                        **(
                            {"name": "loss", "labels": None}
                            if dataset == "scalar_rollups"
                            else {"kind": "grad_reduced", "tensor": "blocks.0.weight", "nonfinite_rows": 1}
                        ),
                        run=run,
                    )
                    for run in RUNS
                    for step in spans["step"]
                    for _ in range(3)
                ],
            )
        else:
            usable = [
                rows.any(dataset, state="running") if dataset in {"runs", "attempts"} else rows.any(dataset)
                for _ in range(90)
            ]
            yield dataset, usable
    yield (
        "samples",
        [
            rows.any("samples", target="node-7", metric="DCGM_FI_DEV_POWER_USAGE", labels='{"gpu":"0"}')
            for _ in range(9)
        ],
    )
    known = {"type": "capture", "ts": START, "tensor": "w"}
    yield "events", [rows.any("events", **known, details=details) for details in _POOLS["details"]]


def make_store(folder: Path, seed: int = 0) -> Path:
    """Write the store; return its folder."""
    with Store.open(folder, create=True).claim(owner="test") as writer:
        for dataset, rows in _tables(seed):
            table = pa.Table.from_pylist(rows, schema=dataset_schema(dataset))
            own = {
                one: int(seq)
                for one, seq in zip(table["incarnation"].to_pylist(), table["seq"].to_pylist(), strict=True)
                if one
            }
            writer.append(Batch(tables={dataset: table}, watermarks=own))
    return folder
