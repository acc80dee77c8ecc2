"""Result rows of a benchmark, and their table. Benchmarks print medians and ratios from one run."""

from __future__ import annotations

import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure; `note` is its reference or its method."""

    name: str
    value: float
    unit: str
    note: str = ""


def cpu_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median process CPU seconds of `work` over `rounds`, after one warm-up call."""
    work()
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def ratio_with_interval(pairs: Sequence[tuple[float, float]], resamples: int = 2000) -> tuple[float, float, float]:
    """Return the median of a/b over pairs, and its 95 % bootstrap interval."""
    ratios = [a / b for a, b in pairs]
    draw = random.Random(1)  # noqa: S311 - resampling, no secret
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return statistics.median(ratios), medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def machine() -> str:
    """Return the processor, its number of cores, the kernel and the load, in one line."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"{processor}, {os.cpu_count()} cores, Linux {platform.release()}, Python {python}, load {load:.1f}"


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Print one benchmark's rows as a Markdown table."""
    print(f"\n### {title}\n\n| figure | value | unit | note |\n|---|---:|---|---|")
    for row in rows:
        print(f"| {row.name} | {_short(row.value)} | {row.unit} | {row.note} |", flush=True)


def _short(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
