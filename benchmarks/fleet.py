"""A fleet of simulated ranks against one service: lag, memory, CPU, and every step of every rank exactly once.

    python benchmarks/run.py fleet
    RANKSCOPE_FLEET="ranks=1000 tensors=2500 seconds=5 steps=720 flapping=0 keep=900" python benchmarks/run.py fleet
    RANKSCOPE_FLEET="ranks=1000 tensors=2500 seconds=5 steps=720 flapping=100 keep=900" python benchmarks/run.py fleet

The ranks measure the lag, from the publication of a step to the confirmation that it is durable. The confirmation
arrives one poll after the commit. Without RANKSCOPE_FLEET the benchmark makes two short runs at full rate, one with a
tenth of the ranks flapping. A flapping rank exits and restarts as another process, refuses connections for 20 s, and
answers late or after the timeout, in this order. Retention is on: statistics become rollups after `keep` seconds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _fleet_bodies import SETS
from _fleet_check import Account, check
from _fleet_service import Sample, Service
from _rows import Row, print_rows

STATISTICS = 6
FLUSH_SECONDS = 10.0
SETTLE_SECONDS = 60.0
STOLEN_CORES = 0.1
"""A host that gives our processors to others shows nothing of us; a minute later the worst of it is caught up with."""
BLOCK_LOOKS = 18
"""Looks at memory that make one mean, three minutes of them: longer than retention takes for a piece, which is when
memory rises and falls."""
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the fleet and duration of the run."""

    ranks: int = 1000
    tensors: int = 2500
    seconds: float = 5.0
    steps: int = 16
    flapping: int = 0
    keep: float = 900.0

    @property
    def name(self) -> str:
        shaky = f", {self.flapping} flapping" if self.flapping else ""
        return f"{self.ranks:,} ranks x {self.tensors:,} tensors, a step in {self.seconds:g} s{shaky}"

    @property
    def samples_per_second(self) -> float:
        return self.ranks * self.tensors * STATISTICS / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Reports of the fleet per flush interval, and samples of the service at the same moments, until the drain ends."""

    reports: list[dict[str, Any]]
    samples: list[Sample]

    @property
    def steady(self) -> list[dict[str, Any]]:
        """Return the reports of the time in which the fleet trained."""
        return [report for report in self.reports if not report["is_draining"]]

    @property
    def during(self) -> list[Sample]:
        """Return the samples of the same time."""
        return self.samples[: len(self.steady)]


def sizes() -> list[Size]:
    """Return the runs that are asked for."""
    asked = os.environ.get("RANKSCOPE_FLEET")
    if not asked:
        return [Size(), Size(flapping=100)]
    given = dict(item.split("=", 1) for item in asked.split())
    kinds: dict[str, type] = {"ranks": int, "tensors": int, "seconds": float, "steps": int, "flapping": int}
    kinds["keep"] = float
    return [Size(**{name: kinds[name](value) for name, value in given.items()})]


def run() -> list[Row]:
    return [row for size in sizes() for row in _run(size)]


def _run(size: Size) -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="rankscope-fleet-", dir=os.environ.get("RANKSCOPE_FLEET_FOLDER")))
    try:
        service = Service(folder, _settings(size))
        try:
            watched = watch(size, service)
            files = service.files()
        finally:
            said = service.stop()
        if os.environ.get("RANKSCOPE_FLEET_LOUD"):
            print(said, file=sys.stderr)
        account = check(service.store, watched.reports[-1]["lives"], tensors=size.tensors, sets=min(size.ranks, SETS))
        return _rows(size, watched, account, files)
    finally:
        shutil.rmtree(folder)


def _settings(size: Size) -> dict[str, dict[str, object]]:
    return {
        "ingest": {"flush_after_seconds": FLUSH_SECONDS},
        "retention": {"raw_days": size.keep / 86_400, "every_seconds": min(60.0, size.keep / 2)},
        "notify": {"mode": "off"},
    }


def watch(size: Size, service: Service, on_report: Callable[[], object] = lambda: None) -> Watched:
    """Let the fleet train; at each report of the ranks, take a sample of the service and call `on_report`."""
    plan = {
        "service": service.url,
        "ranks": size.ranks,
        "tensors": size.tensors,
        "step_seconds": size.seconds,
        "steps": size.steps,
        "flapping": size.flapping,
        "report_seconds": FLUSH_SECONDS,
    }
    reports, samples = [], []
    command = [sys.executable, str(HERE / "_fleet_ranks.py"), json.dumps(plan)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ranks:
        assert ranks.stdout is not None
        try:
            for line in ranks.stdout:
                reports.append(json.loads(line))
                samples.append(service.sample())
                on_report()
                _say(reports[-1], samples)
        finally:
            ranks.kill()
    if not reports or "lives" not in reports[-1]:
        raise RuntimeError("the ranks ended before their time")
    return Watched(reports=reports, samples=samples)


def _say(report: dict[str, Any], samples: list[Sample]) -> None:
    if not os.environ.get("RANKSCOPE_FLEET_LOUD"):
        return
    now, before = samples[-1], samples[-2] if len(samples) > 1 else samples[-1]
    seconds = max(now.at - before.at, 1e-9)
    cores, loop = (now.cpu_seconds - before.cpu_seconds) / seconds, (now.loop_seconds - before.loop_seconds) / seconds
    print(
        f"step {report['step']}: lag {report['lag_steps']} steps, {report['lag_seconds']:.1f} s "
        f"(flapping {report['lag_seconds_flapping']:.1f} s), {now.resident_mb:.0f} MB, {now.commits} commits, "
        f"{now.rows_pending:,} rows pending, {cores:.2f} cores, loop {loop:.2f}, ranks {report['cpu_seconds']:.1f} s, "
        f"load {os.getloadavg()[0]:.1f}, stolen {(now.stolen_seconds - before.stolen_seconds) / seconds:.2f}, "
        f"{report['counts']}",
        file=sys.stderr,
    )


def _rows(size: Size, watched: Watched, account: Account, files: tuple[int, int]) -> list[Row]:
    about = f"{size.steps} steps, {STATISTICS} a tensor"
    return [
        Row(f"{size.name}: samples", size.samples_per_second / 1e6, "M/s", about),
        *_lag_rows(watched),
        *_cpu_rows(size, watched, account),
        *_memory_rows(watched),
        Row(
            "commits",
            max(sample.commits for sample in watched.samples),
            "",
            f"{files[0]:,} files, {files[1] / 1e6:,.0f} MB on disk",
        ),
        *_record_rows(account),
    ]


def _lag_rows(watched: Watched) -> list[Row]:
    steady, during = watched.steady, watched.during
    ours = [report for report, sample in zip(steady, during, strict=True) if _is_ours(during, sample)]
    lag, limit = max(report["lag_seconds"] for report in steady), 2 * FLUSH_SECONDS
    told = sorted(watched.reports[-1]["told_seconds"])
    return [
        Row("lag, worst", lag, "s", verdict(lag <= limit, f"at most {limit:g} s: 2 flush intervals")),
        Row(
            "lag, worst without stolen CPU time",
            max((report["lag_seconds"] for report in ours), default=math.nan),
            "s",
            f"{len(ours):,} of {len(steady):,} samples: under {STOLEN_CORES:g} cores stolen in {SETTLE_SECONDS:g} s",
        ),
        Row("lag, median", statistics.median(told), "s", f"until the confirmation, of {len(told):,} times"),
        Row("lag, 99 of 100", told[int(0.99 * len(told))], "s", "at most"),
        Row(
            "lag, worst", max(report["lag_steps"] for report in steady), "steps", "published and not known as committed"
        ),
        Row("lag, worst of flapping ranks", max(r["lag_seconds_flapping"] for r in steady), "s", "absences included"),
    ]


def _cpu_rows(size: Size, watched: Watched, account: Account) -> list[Row]:
    steady, during = watched.steady, watched.during
    seconds = during[-1].at - during[0].at
    cores = (during[-1].cpu_seconds - during[0].cpu_seconds) / seconds
    loop = (during[-1].loop_seconds - during[0].loop_seconds) / seconds
    others = (steady[-1]["cpu_seconds"] - steady[0]["cpu_seconds"]) / seconds
    # Until the end of the drain, so that delayed work is counted too.
    per_million = watched.samples[-1].cpu_seconds / (account.stored * size.tensors * STATISTICS / 1e6)
    needed = per_million * size.samples_per_second / 1e6
    counts, stolen = watched.reports[-1]["counts"], _stolen(during)
    return [
        Row("service", cores, "cores", f"of which the event loop {loop:.2f}"),
        Row(
            "service",
            per_million,
            "CPU s per M samples",
            f"all it does, start and drain too; {needed:.2f} cores at this rate",
        ),
        Row("ranks", others, "cores", f"{counts['polls']:,} polls, {counts['bodies']:,} bodies"),
        Row(
            "stolen",
            max(stolen, default=0.0),
            "cores",
            f"at most, in {FLUSH_SECONDS:g} s, by other machines of the host; {_mean(stolen):.2f} in the mean",
        ),
    ]


def _memory_rows(watched: Watched) -> list[Row]:
    during = watched.during
    slope, interval = memory_slope(during[len(during) // 3 :])
    note = verdict(abs(slope) <= interval, f"± {interval:,.0f} (95 %), without the first third")
    if math.isnan(slope):
        note = f"three means of {BLOCK_LOOKS} looks are needed, without the first third"
    return [
        Row("memory", max(sample.resident_mb for sample in watched.samples), "MB", "greatest, drain included"),
        Row("memory slope", slope, "MB/hour", note),
    ]


def _record_rows(account: Account) -> list[Row]:
    whole = verdict(account.wrong == 0, "each has all its tensors, once, with its own norms")
    return [
        Row("records stored", account.stored, "", f"of {account.published:,}, {account.rolled_up:,} as rollups by now"),
        Row("records doubled or torn", account.wrong, "", whole),
        Row(
            "records lost of steady ranks, or acknowledged",
            account.lost,
            "",
            verdict(account.lost == 0, "none may be"),
        ),
        Row(
            "records lost with processes that died",
            account.died_with,
            "",
            f"{account.processes:,} processes; {account.reported:,} reported as gaps, the others not fetched",
        ),
    ]


def _is_ours(samples: list[Sample], at: Sample) -> bool:
    """Return whether other virtual machines took so little CPU time recently that no delay by them can remain."""
    lately = [sample for sample in samples if at.at - SETTLE_SECONDS - FLUSH_SECONDS <= sample.at <= at.at]
    return max(_stolen(lately), default=0.0) < STOLEN_CORES


def _stolen(samples: list[Sample]) -> list[float]:
    """Return what the host took of the two cores between one sample and the next."""
    pairs = itertools.pairwise(samples)
    return [(after.stolen_seconds - before.stolen_seconds) / (after.at - before.at) for before, after in pairs]


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def memory_slope(samples: list[Sample]) -> tuple[float, float]:
    """Return MB per hour by least squares, and half of the width of its 95 % interval.

    The fit uses means of BLOCK_LOOKS samples. Memory rises and falls with each part of retention, so samples ten
    seconds apart are not independent, and an interval that treats them as independent would be too narrow. An
    incomplete last block is left out, because its mean is less exact and would have the same weight.
    """
    starts = range(0, len(samples) - BLOCK_LOOKS + 1, BLOCK_LOOKS)
    blocks = [samples[start : start + BLOCK_LOOKS] for start in starts]
    count = len(blocks)
    if count < 3:
        return math.nan, math.nan
    hours = [sum(sample.at for sample in block) / len(block) / 3600 for block in blocks]
    sizes_ = [sum(sample.resident_mb for sample in block) / len(block) for block in blocks]
    mean_hour, mean_size = sum(hours) / count, sum(sizes_) / count
    spread = sum((hour - mean_hour) ** 2 for hour in hours)
    slope = sum((hour - mean_hour) * size for hour, size in zip(hours, sizes_, strict=True)) / spread
    rest = [size - mean_size - slope * (hour - mean_hour) for hour, size in zip(hours, sizes_, strict=True)]
    error = math.sqrt(sum(value**2 for value in rest) / (count - 2) / spread)
    return slope, _student(count - 2) * error


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, to 1 % from 2 degrees on (an expansion in 1/degrees)."""
    if degrees < 3:
        return (12.706, 4.303)[degrees - 1]
    normal = 1.959964
    first = (normal**3 + normal) / 4
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    third = (3 * normal**7 + 19 * normal**5 + 17 * normal**3 - 15 * normal) / 384
    return normal + first / degrees + second / degrees**2 + third / degrees**3


def verdict(holds: object, text: str) -> str:
    """Return the note of a figure that has a target."""
    return f"{'holds' if holds else 'MISSED'}: {text}"


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
