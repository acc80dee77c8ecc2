"""Costs of a service by the number of ranks, and the simulation's prediction for 1,000 ranks with its measurement.

    python benchmarks/sizing.py calibrate predict measure

`calibrate` measures a service with 100 and 300 ranks. `predict` computes the table of costs, writes it into
cli/rankscope/sizing/costs.py, and simulates 1,000 ranks with it. `measure` measures them. All of it takes 12 minutes.
`limit` increases the rate of 1,000 ranks until the service cannot hold it. Results are in benchmarks/sizing.json.
Run `measure` only after the prediction is committed. The ranks are those of `fleet`: one process, prepared records.

CPU times depend on the load of the machine. During each run, a fixed piece of work is timed too, and all CPU times of
a run are divided by its slowness, which is the ratio to the first run.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _fleet_service import Sample, Service
from _history_store import START, Builder, losses
from _rows import Row, machine, print_rows
from fleet import FLUSH_SECONDS, Size, Watched, verdict, watch
from simulation.fleet import Scenario, simulate

import rankscope.sizing.costs
from rankscope.sizing.costs import STATISTICS, Costs
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import located
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance.compaction import SILENCE, compact

RESULTS = Path(__file__).with_suffix(".json")
TABLE = Path(rankscope.sizing.costs.__file__)
CALIBRATION = (
    Size(ranks=100, seconds=5, steps=16),
    Size(ranks=300, seconds=5, steps=16),
    Size(ranks=300, tensors=25, seconds=5, steps=16),
    Size(ranks=300, tensors=25, seconds=0.5, steps=160),
)
LARGE = (Size(ranks=1000, tensors=250, seconds=5, steps=16), Size(ranks=1000, seconds=5, steps=16))
RATES = tuple(Size(ranks=1000, seconds=seconds, steps=int(40 / seconds)) for seconds in (2.5, 1.25, 0.5))
"""Loads of 6, 12 and 30 million samples per second: `limit` ends with the first one that the service cannot hold."""
IDLE_SECONDS = 10.0
TOLERANCE = 0.25
UNITS = {"lag_median": "s", "lag_p99": "s", "cores": "cores", "commits_per_second": "per second", "memory": "MB"}


def measured(size: Size) -> dict[str, Any]:
    """Return the figures of one service under `size`."""
    folder = Path(tempfile.mkdtemp(prefix="rankscope-sizing-"))
    try:
        service = Service(folder, {"ingest": {"flush_after_seconds": FLUSH_SECONDS}, "notify": {"mode": "off"}})
        try:
            looks, references = [], [_reference_seconds()]
            for _ in range(2):  # the first interval contains the rest of the start
                time.sleep(IDLE_SECONDS)
                looks.append(service.sample())
            watched = watch(size, service, lambda: references.append(_reference_seconds()))
        finally:
            service.stop()
        stored = _stored(service.store, watched.reports[-1]["lives"], size)
        merged = _merged(service.store) if size.tensors < 100 else {}
    finally:
        shutil.rmtree(folder)
    return _figures(size, looks, watched) | stored | merged | {"reference": statistics.median(references)}


def _figures(size: Size, looks: list[Sample], watched: Watched) -> dict[str, Any]:
    """Return counts and CPU seconds from the first report to the end of the drain, and memory and lag."""
    seen = [pair for pair in zip(watched.reports, watched.samples, strict=True) if pair[1].page]  # it may be too busy
    (first, start), (_, end) = seen[0], seen[-1]
    last = [sample for report, sample in seen if not report["is_draining"]][-1]
    steady, counts, page = last.at - start.at, watched.reports[-1]["counts"], end.page
    stored = sum(value for name, value in page.items() if name.startswith("rankscope_ingest_rows_committed_total"))
    records = page["rankscope_ingest_records_total"]
    told = sorted(watched.reports[-1]["told_seconds"])
    return {
        "ranks": size.ranks,
        "tensors": size.tensors,
        "step_seconds": size.seconds,
        "seconds": end.at - start.at,
        "idle": (looks[1].cpu_seconds - looks[0].cpu_seconds) / (looks[1].at - looks[0].at),
        "start_cpu": start.cpu_seconds - looks[1].cpu_seconds,
        "start_polls": first["counts"]["polls"],
        "start_records": first["counts"].get("records", 0),
        "polls": counts["polls"] - first["counts"]["polls"],
        "records": counts["records"] - first["counts"].get("records", 0),
        "cpu": end.cpu_seconds - start.cpu_seconds,
        "loop_cpu": end.loop_seconds - start.loop_seconds,
        "record_rows": stored / records,
        "record_bytes": page["rankscope_ingest_bytes_total"] / records,
        "commits": end.commits - start.commits,
        "commits_per_second": (last.commits - start.commits) / steady,
        "cores": (last.cpu_seconds - start.cpu_seconds) / steady,
        "loop_cores": (last.loop_seconds - start.loop_seconds) / steady,
        "memory": max(sample.resident_mb for sample in watched.samples),
        "pending_rows": max(sample.rows_pending for sample in watched.samples),
        "start_memory": looks[1].resident_mb,
        "lag_median": statistics.median(told),
        "lag_p99": told[int(0.99 * len(told))],
        "lag_end": max(report["lag_seconds"] for report in watched.steady),
        "load": os.getloadavg()[0],
    }


def _reference_seconds() -> float:
    """Return the CPU seconds of a fixed piece of work that sorts and compresses, as a flush does."""
    values = np.random.default_rng(1).normal(size=200_000).astype(np.float32)
    began = time.thread_time()
    for _ in range(2):
        zlib.compress(np.sort(values).tobytes(), 1)
    return time.thread_time() - began


def _stored(store: Path, lives: list[dict[str, Any]], size: Size) -> dict[str, Any]:
    """Return files of the store. Raise RuntimeError if a row is missing or stored twice."""
    files = Log.open(located(store), sync_to_disk).snapshot().files.to_pylist()
    rows = sum(file["rows"] for file in files if file["dataset"] == "tensor_stats")
    published = sum(life["published"] for life in lives) * size.tensors
    if rows != published:
        raise RuntimeError(f"{rows:,} rows of tensors are stored, but {published:,} were published")
    return {"files": len(files), "stored_mb": sum(file["size_bytes"] for file in files) / 1e6}


def _merged(store: Path) -> dict[str, Any]:
    """Merge the small files; return the CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    report = compact(located(store), sync_to_disk, now=dt.datetime.now(dt.UTC) + 2 * SILENCE)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "merged_rows": report.rows,
        "merge_cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def _scalar_bytes() -> float:
    """Return the bytes of a stored scalar with noise, in one file of 300,000 rows of 100 ranks."""
    with tempfile.TemporaryDirectory(prefix="rankscope-sizing-") as folder:
        builder = Builder(Path(folder))
        builder.append({"scalars": losses("run", 100, range(3_000), 0.5, np.random.default_rng(0))}, START.date())
        return float(sum(file["size_bytes"] / file["rows"] for file in builder.files()))


def fitted(runs: list[dict[str, Any]]) -> Costs:
    """Return the costs that explain the runs best (relative least squares, no cost below 0)."""
    known = Costs(idle=statistics.median(run["idle"] for run in runs))
    slow = _slowness(runs)
    causes = np.array(
        [[run["polls"], run["records"], run["records"] * run["record_rows"] / 1e6] for run in runs], float
    )
    spent = [
        run["cpu"] / slowness - known.idle * run["seconds"] - known.commit * run["commits"]
        for run, slowness in zip(runs, slow, strict=True)
    ]
    poll, record, row = _nonnegative(causes, np.array(spent))
    loop = [run["loop_cpu"] / slowness for run, slowness in zip(runs, slow, strict=True)]
    poll_loop, record_loop, row_loop = _nonnegative(causes, np.array(loop))
    least = {"poll": poll, "record": record, "row": row}
    loops = {"poll_loop": min(poll_loop, poll), "record_loop": min(record_loop, record), "row_loop": min(row_loop, row)}
    # The first records of a rank arrive with its first polls; the polls before them are a part of its registration.
    starts = [run["start_cpu"] / slowness - poll * run["ranks"] for run, slowness in zip(runs, slow, strict=True)]
    slowly = [number for number, run in enumerate(runs) if run["step_seconds"] >= 5]
    causes = np.array([[1.0, runs[number]["ranks"]] for number in slowly])
    _, registration = _nonnegative(causes, np.array([starts[number] for number in slowly]))
    merges = [run for run in runs if run.get("merged_rows")]
    records = np.array([[1, run["tensors"] * STATISTICS] for run in runs], float)
    wire_record, wire_sample = _nonnegative(records, np.array([run["record_bytes"] for run in runs]))
    costs = dataclasses.replace(
        known,
        **least,
        **loops,
        registration=registration,
        merge=sum(run["merge_cpu"] / run["merged_rows"] for run in merges) / len(merges) * 1e6,
        wire_record=wire_record,
        wire_sample=wire_sample,
        stored_scalar=_scalar_bytes(),
    )
    pending = [simulate(_scenario(size, costs)).pending_rows for size in CALIBRATION]
    base = statistics.median(run["start_memory"] for run in runs)
    causes = np.array([[run["ranks"], rows / 1e6] for run, rows in zip(runs, pending, strict=True)], float)
    rank, row_bytes = _nonnegative(causes, np.array([run["memory"] - base for run in runs]))
    costs = dataclasses.replace(costs, base_memory=base, rank_memory=rank, row_memory=row_bytes)
    return Costs(**{name: float(f"{value:.3g}") for name, value in dataclasses.asdict(costs).items()})


def _slowness(runs: list[dict[str, Any]]) -> list[float]:
    return [run["reference"] / runs[0]["reference"] for run in runs]


def _nonnegative(causes: np.ndarray, values: np.ndarray) -> list[float]:
    """Return the factors of the columns of `causes`, none below 0, with the least relative error of the sums."""
    best: tuple[float, list[float]] = (float("inf"), [0.0] * causes.shape[1])
    weighted, ones = causes / values[:, None], np.ones(len(values))
    for chosen in range(1, 1 << causes.shape[1]):
        columns = [number for number in range(causes.shape[1]) if chosen >> number & 1]
        found = np.linalg.lstsq(weighted[:, columns], ones, rcond=None)[0]
        error = float(np.sum((weighted[:, columns] @ found - ones) ** 2))
        if found.min() >= 0 and error < best[0] - 1e-12:
            best = error, [float(found[columns.index(n)]) if n in columns else 0.0 for n in range(causes.shape[1])]
    return best[1]


def _scenario(size: Size, costs: Costs, seconds: float = 85.0) -> Scenario:
    return Scenario(ranks=size.ranks, tensors=size.tensors, step_seconds=size.seconds, seconds=seconds, costs=costs)


def predicted(size: Size, costs: Costs) -> dict[str, float]:
    """Return the figures that the simulation predicts for `size`; cores and commits without the first 10 s."""
    first, whole = (simulate(_scenario(size, costs, seconds)) for seconds in (10.0, 85.0))
    return {
        "lag_median": whole.lag_median,
        "lag_p99": whole.lag_p99,
        "cores": (whole.cpu_seconds - first.cpu_seconds) / 75.0,
        "commits_per_second": (whole.commits - first.commits) / 75.0,
        "memory": whole.memory(_scenario(size, costs)),
    }


def _compared(size: Size, forecast: dict[str, float], runs: list[dict[str, Any]]) -> list[Row]:
    """Return the prediction for `size` and the figures of the last run; cores are at the speed of the first one."""
    figures = runs[-1] | {"cores": runs[-1]["cores"] / _slowness(runs)[-1]}
    errors = {name: value / figures[name] - 1 for name, value in forecast.items()}
    return [
        Row(
            f"{size.ranks:,} ranks x {size.tensors:,} tensors: {name}",
            figures[name],
            UNITS[name],
            verdict(abs(errors[name]) <= TOLERANCE, f"predicted {value:.4g}, {errors[name]:+.0%}"),
        )
        for name, value in forecast.items()
    ]


def _write_table(costs: Costs) -> None:
    """Replace the values in the table of `rankscope.sizing.costs`."""
    text = TABLE.read_text()
    for name, value in dataclasses.asdict(costs).items():
        text = re.sub(rf"(    {name}: float = _measured\()[^,]+", rf"\g<1>{value!r}", text)
    TABLE.write_text(text)


def _part(name: str, results: dict[str, Any]) -> list[Row]:
    """Make one part of the benchmark, put it into `results`, and return its rows."""
    if name == "calibrate":
        if len(results.get("calibration", [])) == len(CALIBRATION):
            results.clear()  # otherwise it was interrupted
        results.setdefault("machine", machine())
        runs = results.setdefault("calibration", [])
        for size in CALIBRATION[len(runs) :]:
            runs.append(measured(size))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        return [Row(f"{run['ranks']} ranks x {run['tensors']:,} tensors", run["cores"], "cores") for run in runs]
    if name == "predict":
        costs = fitted(results["calibration"])
        results["costs"] = dataclasses.asdict(costs)
        results["predictions"] = [predicted(size, costs) for size in LARGE]
        _write_table(costs)
        return [
            Row(f"{one.name}", results["costs"][one.name], one.metadata["unit"]) for one in dataclasses.fields(Costs)
        ]
    if name == "measure":
        results["measurements"], rows = [], []
        for size, forecast in zip(LARGE, results["predictions"], strict=True):
            results["measurements"].append(measured(size))
            rows += _compared(size, forecast, [*results["calibration"], results["measurements"][-1]])
        return rows
    results["limit"] = []
    for size in RATES:
        results["limit"].append(measured(size))
        if results["limit"][-1]["lag_end"] > 2 * FLUSH_SECONDS:
            break
    return [
        Row(f"{size.name}: lag at the end", run["lag_end"], "s")
        for size, run in zip(RATES, results["limit"], strict=False)
    ]


def run(parts: Sequence[str] = ("calibrate", "predict", "measure")) -> list[Row]:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = []
    for name in parts:
        rows += _part(name, results)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["help"]
    if set(chosen) - {"calibrate", "predict", "measure", "limit"}:
        sys.exit(__doc__)
    print_rows((__doc__ or "").splitlines()[0], run(chosen))
