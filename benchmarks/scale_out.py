"""One to four services on one store: throughput, lag, requests and queries, on a disk and in a bucket.

    python benchmarks/scale_out.py
    RANKSCOPE_SCALE_OUT="ranks=8 tensors=200 seconds=1 steps=60 services=1,2,4 stores=local,moto" python …
    RANKSCOPE_SPARK_PYTHON=.venv-spark/bin/python python …      # with the column of Spark

Eight runs; each rank registers at the service of its run. Services, ranks and S3 server share one machine, so that
CPU time per sample is the measure of the throughput. A proxy counts the requests of all services between the first and
the last flush. The lag is that of the oldest record of each confirmation, one poll after the commit. `radosgw` needs
RANKSCOPE_RADOSGW, the folder of its programs. Queries: the median of five in one process, after one that fills its
caches. The table is Markdown.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _fleet_service import Service
from _rows import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.object_store.proxy import Proxy
from tests.object_store.radosgw import installed, radosgw
from tests.object_store.servers import S3Server, moto

from rankscope_storage.base.shards import Shard
from rankscope_storage.connection import connect

RUNS = 8
STATISTICS = 6
FLUSH_SECONDS = 10.0
DAY_SECONDS = 86_400
QUERIES = {
    "goodput": "SELECT * FROM goodput",
    "scalar_curve": "SELECT * FROM scalar_curve('{run}', 'loss', points => 500)",
    "norms by step": "SELECT step, max(norm) AS norm FROM tensor_stats WHERE run = '{run}' GROUP BY 1",
}
HERE = Path(__file__).parent
SPARK = """
import json, sys, time, rankscope
spent = {}
with rankscope.connect(sys.argv[1], engine="spark", master="local[2]") as history:
    for name, text in json.loads(sys.argv[2]).items():
        history.sql(text).fetchall()
        began = time.monotonic()
        history.sql(text).fetchall()
        spent[name] = 1e3 * (time.monotonic() - began)
print(json.dumps(spent))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of each of the RUNS fleets, and the cases."""

    ranks: int = 8
    tensors: int = 200
    seconds: float = 1.0
    steps: int = 60
    services: tuple[int, ...] = (1, 2, 4)
    stores: tuple[str, ...] = ("local", "moto")

    @classmethod
    def asked(cls) -> Size:
        given = dict(item.split("=", 1) for item in os.environ.get("RANKSCOPE_SCALE_OUT", "").split())
        kinds: dict[str, Any] = {"ranks": int, "tensors": int, "seconds": float, "steps": int}
        kinds |= {"services": lambda text: tuple(map(int, text.split(","))), "stores": lambda text: (*text.split(","),)}
        return cls(**{name: kinds[name](value) for name, value in given.items()})


@dataclass(slots=True, kw_only=True)
class Case:
    """One row of the table; times are in seconds, those of queries in milliseconds."""

    store: str
    services: int
    samples_per_second: float = 0.0
    cpu_seconds_per_million: float = 0.0
    lag_median: float = 0.0
    lag_99: float = 0.0
    requests_per_flush: float = 0.0
    requests_per_day: float = 0.0
    queries: dict[str, float] = field(default_factory=dict)
    spark: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def opened(store: str, number: int) -> Iterator[tuple[str | None, Proxy | None]]:
    """Run the S3 server of `store`, and return the address of a new bucket and the proxy before it."""
    if store == "local":
        yield None, None
        return
    with contextlib.ExitStack() as stack:
        if store == "moto":
            server: S3Server = stack.enter_context(moto())
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(radosgw(installed(Path(os.environ["RANKSCOPE_RADOSGW"])), folder))
        proxy = stack.enter_context(Proxy(server=server.endpoint))
        os.environ.update(server.environment(proxy.url))
        server.create_bucket(f"scale-{number}")
        yield f"s3://scale-{number}/history", proxy


def runs() -> list[str]:
    """Return the names of RUNS runs, of which each service of four has the same number."""
    names = [f"run-{number}" for number in range(100)]
    groups = [[name for name in names if Shard(shard, 4).owns(name)][: RUNS // 4] for shard in range(4)]
    return [name for group in groups for name in group]


def measured(size: Size, store: str, services: int, number: int) -> Case:
    """Train all fleets with `services` services, and query their store."""
    case = Case(store=store, services=services)
    with tempfile.TemporaryDirectory(prefix="rankscope-scale-") as name, opened(store, number) as (bucket, proxy):
        folder = Path(name)
        settings = {"ingest": {"flush_after_seconds": FLUSH_SECONDS}, "notify": {"mode": "off"}}
        started = [Service(folder, settings, bucket=bucket, shard=f"{one}/{services}") for one in range(services)]
        try:
            _train(size, case, started, proxy)
        finally:
            for service in started:
                service.stop()
        _query(case, bucket or str(folder / "store"))
    return case


def _train(size: Size, case: Case, services: list[Service], proxy: Proxy | None) -> None:
    plan = {"ranks": size.ranks, "tensors": size.tensors, "step_seconds": size.seconds, "steps": size.steps}
    plan |= {"flapping": 0, "report_seconds": FLUSH_SECONDS}
    with contextlib.ExitStack() as stack:
        fleets = []
        for run in runs():
            url = services[Shard(0, len(services)).of(run).number].url
            command = [sys.executable, str(HERE / "_fleet_ranks.py"), json.dumps(plan | {"run": run, "service": url})]
            fleets.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        reports = [fleet.stdout.readline() for fleet in fleets]  # the first flush: all ranks are registered
        before, first = [service.sample() for service in services], len(proxy.requests) if proxy else 0
        for _ in range(round((size.steps * size.seconds - FLUSH_SECONDS) / FLUSH_SECONDS) - 1):
            reports = [fleet.stdout.readline() for fleet in fleets]
        assert all(reports), "a fleet ended early"
        after, last = [service.sample() for service in services], len(proxy.requests) if proxy else 0
        ends = [[json.loads(line) for line in fleet.stdout][-1] for fleet in fleets]
    seconds = statistics.mean(b.at - a.at for a, b in zip(before, after, strict=True))
    flushes = sum(b.commits - a.commits for a, b in zip(before, after, strict=True))
    records = sum(life["committed"] for end in ends for life in end["lives"])
    assert records == RUNS * size.ranks * size.steps
    assert flushes, "too short: no flush between two reports"
    told = sorted(lag for end in ends for lag in end["told_seconds"])
    case.samples_per_second = RUNS * size.ranks * size.tensors * STATISTICS / size.seconds
    cpu = sum(b.cpu_seconds - a.cpu_seconds for a, b in zip(before, after, strict=True)) / seconds
    case.cpu_seconds_per_million = cpu / (case.samples_per_second / 1e6)
    case.lag_median, case.lag_99 = statistics.median(told), told[int(0.99 * len(told))]
    case.requests_per_flush, case.requests_per_day = (last - first) / flushes, (last - first) / seconds * DAY_SECONDS


def _query(case: Case, store: str) -> None:
    texts = {name: text.format(run=runs()[0]) for name, text in QUERIES.items()}
    with connect(store) as connection:
        for name, text in texts.items():
            spent = []
            for _ in range(6):
                began = time.monotonic()
                assert connection.query(text).num_rows
                spent.append(1e3 * (time.monotonic() - began))
            case.queries[name] = statistics.median(spent[1:])
    if python := os.environ.get("RANKSCOPE_SPARK_PYTHON"):
        command = [python, "-c", SPARK, store, json.dumps(texts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        case.spark = json.loads(done.stdout.splitlines()[-1])


def table(size: Size, cases: list[Case]) -> str:
    """Return the cases as a table in Markdown."""
    heads = ["store", "services", "samples/s", "CPU s per M samples", "lag p50, p99 (s)", "requests per flush, per day"]
    heads += [f"{name} (ms)" for name in QUERIES] + [f"{name}, Spark (ms)" for name in QUERIES]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for case in cases:
        requests = f"{case.requests_per_flush:.0f}, {case.requests_per_day:,.0f}" if case.requests_per_day else "-"
        lines.append([
            case.store, str(case.services), f"{case.samples_per_second:,.0f}", f"{case.cpu_seconds_per_million:.2f}",
            f"{case.lag_median:.1f}, {case.lag_99:.1f}", requests,
            *(f"{case.queries[name]:,.0f}" for name in QUERIES),
            *(f"{case.spark[name]:,.0f}" if case.spark else "-" for name in QUERIES),
        ])  # fmt: skip
    about = (
        f"{RUNS} runs x {size.ranks} ranks x {size.tensors} tensors, a step in {size.seconds:g} s, {size.steps} steps"
    )
    return "\n".join([f"{about}; flush after {FLUSH_SECONDS:g} s. {machine()}", "", *map(_line, lines)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    size, cases = Size.asked(), []
    for number, (store, services) in enumerate(itertools.product(size.stores, size.services)):
        cases.append(measured(size, store, services, number))
        print(cases[-1], file=sys.stderr, flush=True)
    print(table(size, cases))


if __name__ == "__main__":
    main()
