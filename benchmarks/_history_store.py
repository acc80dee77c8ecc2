"""Stores with months of history in them, through the real writer and the real compaction, without waiting for months.

Nothing is synced here, and the clock is an argument; all else is as a service does it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope_storage.api.store import Store
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import DataFile, write_file
from rankscope_storage.files.sorting import parts
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.vacuum import maintain

KINDS = ("param_after", "grad_reduced", "exp_avg", "exp_avg_sq")
RUN = "main"
START = dt.datetime(2026, 9, 1, tzinfo=dt.UTC)


def nothing(path: Path) -> None:
    """Sync nothing."""


@dataclass
class Training:
    """One run: every tensor's log walks at random, and each rank's norm, extremes and mean scatter around it.

    Every fiftieth step one tensor of one rank has a NaN, so that hardly a file can be passed over for its footer.
    """

    ranks: int
    tensors: int
    seconds_per_step: float
    run: str = RUN
    kinds: tuple[str, ...] = KINDS
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.walk = np.zeros(self.tensors)
        self.names = [
            f"model.layers.{i // 25}.block.{i % 25}.weight" for i in range(-(-self.tensors // len(self.kinds)))
        ]

    def statistics(self, first: int, steps: int) -> pa.Table:
        """Return the rows of `steps` steps of all ranks."""
        shape = (self.ranks, steps, self.tensors)
        walk = self.walk + np.cumsum(self.random.normal(0, 0.01, (1, *shape[1:])), axis=1)
        self.walk = walk[0, -1]
        scale = np.exp(walk + self.random.normal(0, 0.04, shape)).astype(np.float32)
        spread = np.exp(self.random.normal(0, 0.08, (2, *shape))).astype(np.float32)
        rank, step, tensor = (axis.ravel() for axis in np.indices(shape, np.int32))
        step = step.astype(np.int64) + first
        zeros = np.where(tensor % 4 == 0, self.random.poisson(1000, tensor.size), 0)
        broken = (step % 50 == 0) & (rank == step // 50 % self.ranks) & (tensor == step * 7 % self.tensors)
        return pa.table(
            {
                **_identity(self.run, rank, step, self.seconds_per_step),
                "kind": pa.DictionaryArray.from_arrays(tensor % len(self.kinds), self.kinds),
                "tensor": pa.DictionaryArray.from_arrays(tensor // len(self.kinds), self.names),
                "norm": scale.ravel(),
                "min": (-scale * spread[0]).ravel(),
                "max": (scale * spread[1]).ravel(),
                "mean": (scale * self.random.normal(0, 0.3, shape)).astype(np.float32).ravel(),
                "nans": broken.astype(np.int64),
                "zeros": zeros,
                "norm_baseline": np.tile(np.exp(walk[0]).astype(np.float32), (self.ranks, 1, 1)).ravel(),
            }
        )

    def losses(self, first: int, steps: int) -> pa.Table:
        """Return the loss of each rank over `steps` steps."""
        return losses(self.run, self.ranks, range(first, first + steps), self.seconds_per_step, self.random)


def losses(run: str, ranks: int, steps: range, pace: float, random: np.random.Generator) -> pa.Table:
    """Return a loss that falls, with noise, of each rank and step, `pace` seconds apart."""
    rank, step = (axis.ravel() for axis in np.indices((ranks, len(steps)), np.int32))
    step = step.astype(np.int64) + steps.start
    value = 10 / (1 + step / 1000) + random.normal(0, 0.1, step.size)
    name = pa.DictionaryArray.from_arrays(np.zeros(step.size, np.int32), ["loss"])
    return pa.table({**_identity(run, rank, step, pace), "name": name, "value": value})


def _identity(run: str, rank: np.ndarray, step: np.ndarray, seconds_per_step: float) -> dict[str, object]:
    incarnations = [uuid.uuid5(uuid.NAMESPACE_OID, f"{run}/{number}").hex for number in range(int(rank.max()) + 1)]
    microseconds = int(START.timestamp() * 1e6) + (step * seconds_per_step * 1e6).astype(np.int64) + rank
    return {
        "run": pa.DictionaryArray.from_arrays(np.zeros(rank.size, np.int32), [run]),
        "attempt": np.zeros(rank.size, np.int32),
        "rank": rank,
        "incarnation": pa.DictionaryArray.from_arrays(rank, incarnations),
        "seq": step,
        "ordinal": step * (int(rank.max()) + 1) + rank,
        "step": step,
        "ts": pa.array(microseconds, pa.timestamp("us", tz="UTC")),
        "ts_origin": pa.DictionaryArray.from_arrays(np.zeros(rank.size, np.int32), ["rank"]),
    }


class Builder:
    """Appends as the writer does, on a day that the caller names."""

    def __init__(self, root: Path) -> None:
        Store.open(root, create=True, sync=nothing)
        self.root = root
        self._log = Log.open(root, nothing)

    def append(self, tables: Mapping[str, pa.Table], day: dt.date) -> None:
        """Commit one flush."""
        self._commit(
            write_file(self.root, dataset, part, rows, nothing)
            for dataset, table in tables.items()
            for part, rows in parts(conform(table, dataset), dataset, day)
        )

    def compact(self, now: dt.datetime) -> None:
        """Merge as the service does when its clock shows `now`."""
        compact(self.root, nothing, now=now)

    def multiply(self, times: int) -> None:
        """Commit every file `times` - 1 more times as one of another run: links, so that nothing has to be written."""
        listed = self.files()
        for copy in range(1, times):
            self._commit(self._linked(file, copy) for file in listed)

    def _linked(self, file: dict[str, Any], copy: int) -> DataFile:
        path = file["path"].replace(".parquet", f"{copy}.parquet")
        os.link(self.root / file["path"], self.root / path)
        run = f"copy-{copy}-{file['run_min']}"
        low, high = ({"run": run, "step": file[f"step_{end}"], "attempt": 0} for end in ("min", "max"))
        statistics = {"numRecords": file["rows"], "minValues": low, "maxValues": high, "nullCount": {}}
        return DataFile(
            path=path,
            dataset=file["dataset"],
            part=file["part"],
            rows=file["rows"],
            size_bytes=file["size_bytes"],
            modified_at_ms=0,
            statistics=json.dumps(statistics),
        )

    def files(self) -> list[dict[str, Any]]:
        """Return the files of the newest version."""
        self._log.refresh()
        return self._log.snapshot().files.to_pylist()

    def _commit(self, files: Iterable[DataFile]) -> None:
        self._log.refresh()
        self._log.commit(Change(added=list(files)))


def long_training(root: Path, steps: int, loss_steps: int) -> Builder:
    """Return a store with one run as it flushes at full speed: files of 1 to 1.5 million rows."""
    builder, training = Builder(root), Training(ranks=8, tensors=2500, seconds_per_step=1.0)
    for first in range(0, steps, 70):
        builder.append({"tensor_stats": training.statistics(first, min(70, steps - first))}, START.date())
    builder.append({"scalars": training.losses(0, loss_steps)}, START.date())
    builder.compact(START + dt.timedelta(days=1))
    maintain(root, nothing)
    return builder


def with_charts(root: Path, steps: int, loss_steps: int, chart_steps: int) -> Builder:
    """Return `long_training` with a second run, of which rank 0 logged loss, learning rate and speed at each step."""
    builder = long_training(root, steps, loss_steps)
    random = np.random.default_rng(1)
    for first in range(0, chart_steps, 250_000):
        rows = _scalars("chart", range(first, min(chart_steps, first + 250_000)), random)
        builder.append({"scalars": rows}, START.date())
    builder.compact(START + dt.timedelta(days=1))
    return builder


def wide_training(root: Path, tensors: int, steps: int) -> Builder:
    """Return a store with the gradients of `tensors` tensors at `steps` steps of one rank."""
    builder = Builder(root)
    training = Training(ranks=1, tensors=tensors, seconds_per_step=1.0, run="wide", kinds=("grad_reduced",))
    for first in range(0, steps, 100):
        builder.append({"tensor_stats": training.statistics(first, min(100, steps - first))}, START.date())
    builder.compact(START + dt.timedelta(days=1))
    maintain(root, nothing)
    return builder


def many_runs(root: Path, runs: int, steps: int) -> Builder:
    """Return a store with `runs` runs, of which each logged `steps` losses, learning rates and speeds on one rank."""
    builder, random = Builder(root), np.random.default_rng(2)
    for first in range(0, runs, 50):
        numbers = range(first, min(runs, first + 50))
        tables = [_scalars(f"run-{number:04d}", range(steps), random) for number in numbers]
        states = pa.table(
            {
                "run": [f"run-{number:04d}" for number in numbers],
                "attempt": pa.array([0] * len(numbers), pa.int32()),
                "ordinal": list(numbers),
                "ts": pa.array([START] * len(numbers), pa.timestamp("us", tz="UTC")),
                "ts_origin": ["ingest"] * len(numbers),
                "source_kind": ["live"] * len(numbers),
                "state": [("running", "completed", "failed")[number % 3] for number in numbers],
                "planned_steps": [2 * steps] * len(numbers),
                "last_step": [steps - 1] * len(numbers),
                "started_at": pa.array([START] * len(numbers), pa.timestamp("us", tz="UTC")),
            }
        )
        builder.append({"scalars": pa.concat_tables(tables), "runs": states}, START.date())
    builder.compact(START + dt.timedelta(days=1))
    maintain(root, nothing)
    return builder


def _scalars(run: str, steps: range, random: np.random.Generator) -> pa.Table:
    """Return loss, learning rate and speed of rank 0 at each step."""
    loss = losses(run, 1, steps, 0.5, random)
    at, length = loss.column_names.index("name"), np.zeros(loss.num_rows, np.int32)
    others = [
        loss.set_column(at, "name", pa.DictionaryArray.from_arrays(length, [name]))
        for name in ("learning_rate", "tokens_per_second")
    ]
    return pa.concat_tables([loss, *others])


def thirty_days(root: Path, steps: int, loss_steps: int, other_runs: int) -> Builder:
    """Return a store with the same run over 30 days, one flush per step, and with small other runs."""
    builder, days = Builder(root), 30
    training = Training(ranks=8, tensors=2500, seconds_per_step=days * 86_400 / steps)
    chatter = Training(ranks=8, tensors=1, seconds_per_step=days * 86_400 / loss_steps)
    per_step, day_before = loss_steps // steps, START.date()
    for step in range(steps):
        now = START + dt.timedelta(seconds=step * training.seconds_per_step)
        if now.date() != day_before:
            day_before = now.date()
            builder.compact(now)
        small = range(other_runs * step // steps, other_runs * (step + 1) // steps)
        tables = [
            {"tensor_stats": training.statistics(step, 1), "scalars": chatter.losses(step * per_step, per_step)},
            *(_small_run(number, now) for number in small),
        ]
        together = {name: pa.concat_tables([each[name] for each in tables]) for name in ("tensor_stats", "scalars")}
        builder.append(together, now.date())
    builder.compact(START + dt.timedelta(days=days, hours=1))
    maintain(root, nothing)
    return builder


def _small_run(number: int, now: dt.datetime) -> dict[str, pa.Table]:
    """Return 200 losses, and statistics of 20 tensors over as many steps."""
    run, random = f"other-{number:04d}", np.random.default_rng(number)
    tables = {
        "scalars": losses(run, 1, range(200), 1.0, random),
        "tensor_stats": Training(ranks=1, tensors=20, seconds_per_step=10.0, run=run, random=random).statistics(0, 20),
    }
    ago = (now - START) // dt.timedelta(microseconds=1)
    return {name: _later(table, ago) for name, table in tables.items()}


def _later(table: pa.Table, microseconds: int) -> pa.Table:
    stamps = pa.array(table["ts"].cast(pa.int64()).to_numpy() + microseconds, pa.timestamp("us", tz="UTC"))
    return table.set_column(table.column_names.index("ts"), "ts", stamps)
