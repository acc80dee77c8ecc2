"""Time of the first request for data of a page: each is to a new process of the service, after one health request."""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from _fleet_service import Service
from _history_store import Builder, many_runs, wide_training, with_charts
from _rows import Row

_SETTLE_SECONDS = 3.0
"""Time in seconds after the start, in which the service looks for maintenance."""

STORES: Mapping[str, Callable[[Path], Builder]] = {
    "chart": lambda root: with_charts(root, steps=834, loss_steps=200_000, chart_steps=1_000_000),
    "heat": lambda root: wide_training(root, tensors=10_000, steps=1000),
    "list": lambda root: many_runs(root, runs=1000, steps=1000),
}
"""Stores by part: 1e8 samples and a run of 1e6 steps; 10,000 tensors at 1,000 steps; 1,000 runs of 1,000 steps."""

REQUESTS: Mapping[str, tuple[tuple[str, str, float], ...]] = {
    "chart": (
        ("curve of 1e6 steps", "/data/curve?run=chart&name=loss&markers=1", 300),
        ("page of a run of 1e6 steps", "/runs/chart", 0),
    ),
    "heat": (
        ("grid of 10,000 tensors x 1,000 steps", "/data/grid?run=wide&kind=grad_reduced&op=norm&height=430", 1000),
        ("the same, 2,000 x 1,000 cells", "/data/grid?run=wide&kind=grad_reduced&op=norm", 1000),
    ),
    "list": (("list of 1,000 runs", "/", 200),),
}
"""Name, address and target in milliseconds of the requests of each part; 0: no target."""


def measured(part: str, folder: Path, rounds: int) -> Iterator[Row]:
    """Build the store of `part` in `folder` unless it exists, and measure its requests."""
    if not (folder / part / "store").exists():
        STORES[part](folder / part / "store")
    for name, address, target in REQUESTS[part]:
        times, size = zip(*(_request(folder / part, address) for _ in range(rounds)), strict=True)
        wall, cpu = ([one[at] for one in times] for at in (0, 1))
        goal = f"target {target:.0f} ms; " if target else ""
        note = f"{goal}worst {max(wall):.0f}, CPU {statistics.median(cpu):.0f}, {size[0] / 1000:,.0f} kB"
        yield Row(f"{name}, median of {rounds}", statistics.median(wall), "ms", note)


def _request(folder: Path, address: str) -> tuple[tuple[float, float], int]:
    """Return wall time and CPU time of the service in milliseconds for one request, and the size of the answer."""
    service = Service(folder, {})
    try:
        time.sleep(_SETTLE_SECONDS)
        before = service.sample().cpu_seconds
        asked = urllib.request.Request(service.url + address, headers={"Accept-Encoding": "gzip"})
        began = time.perf_counter()
        with urllib.request.urlopen(asked, timeout=60) as answer:
            size = len(answer.read())
        wall = 1000 * (time.perf_counter() - began)
        return (wall, 1000 * (service.sample().cpu_seconds - before)), size
    finally:
        service.stop()
