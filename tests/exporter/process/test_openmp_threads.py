"""The monitor opens no OpenMP team: a training has as many OpenMP threads as without it, and they sleep as seldom.

Each training is a process of its own with its own OMP_NUM_THREADS (openmp_runs.py), whatever that of the tests is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
THREADS = [count for count in (2, 4) if count <= len(os.sched_getaffinity(0))] or [2]
PAGES = ("/metrics", "/records?after=-1", "/stacks")
SCRAPE_SECONDS = 0.1
TRIES = 3
"""Where other processes take the cores, OpenMP threads of any training sleep at barriers: one quiet pair is enough."""

Run = dict[str, Any]

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by /proc")


def trained(
    case: str, threads: int, how: str, during: Callable[[subprocess.Popen[str], str], None] | None = None
) -> Run:
    """Return what one training reports; `during` is called with the process and the address of its monitor."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RANKSCOPE_INGEST_URL": ""}
    command = [sys.executable, "-m", "tests.exporter.process.openmp_runs", case, str(threads), how]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if during is not None:
                during(process, process.stdout.readline().strip())
            told, _ = process.communicate(timeout=250)
        finally:
            process.kill()
    assert 0 == process.returncode
    found: Run = json.loads(told.splitlines()[-1])
    return found


@cache
def without_monitor(threads: int, how: str) -> Run:
    return trained("unmonitored", threads, how)


def scrape(process: subprocess.Popen[str], address: str) -> None:
    """Read the pages of a rank, as Prometheus and the service do, until its process ends."""
    answers = 0
    while process.poll() is None:
        for page in PAGES:
            with contextlib.suppress(OSError), urllib.request.urlopen(address + page, timeout=5) as answer:
                answers += bool(answer.read())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SCRAPE_SECONDS)

    assert answers > 10 * len(PAGES)


CASES = [("default", "call", None), ("default", "environment", scrape), ("everything", "call", None)]
CASES += [("everything, on_anomaly with torch", "call", None)]

EVERYTHING = {
    *("features", "histograms", "hashes", "modules", "collectives"),
    *("attention_entropy", "spectral_norm", "router_load", "direction_agreement"),
    *("anomaly", "capture", "hang", "stacks"),
    *("rankscope-collectives", "rankscope-capture", "rankscope-hardware", "rankscope-watchdog"),
}
"""Datasets, features, events and threads that prove that the cases with everything had them at work."""

HELD = {"everything": EVERYTHING, "everything, on_anomaly with torch": EVERYTHING | {"rankscope-on-anomaly"}}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("case", "how", "during"), CASES)
def test_training_has_its_own_openmp_threads_and_no_others(case, how, during, threads):
    """As many as without the monitor, and they and the training thread sleep at most twice as often plus 200 times.

    torch and its OpenMP library also keep the numbers of the script, on its own thread and on one that it starts later.
    """
    for attempt in range(TRIES):
        alone = trained("unmonitored", threads, how) if attempt else without_monitor(threads, how)
        found = trained(case, threads, how, during)

        assert alone["threads"] == found["threads"]
        assert [threads] * 4 == alone["numbers"] == found["numbers"]
        if found["switches"] <= 2 * alone["switches"] + 200:
            break
    assert found["switches"] <= 2 * alone["switches"] + 200
    if case in HELD:
        assert HELD[case] <= {*found["rows"], *found["features"], *found["events"], *found["own"]}


@pytest.mark.parametrize("threads", THREADS)
def test_arithmetic_of_torch_on_a_thread_of_ours_opens_a_team(threads):
    """So the tests above can fail."""
    alone, found = without_monitor(threads, "call"), trained("torch arithmetic", threads, "call")

    assert alone["threads"] < found["threads"]
    assert 10 * 200 < found["switches"]


LIMITED = """
import json, sys, threading
from tests.exporter.process.openmp_runs import lasting_threads, native_threads, numbers_of_threads
from tests.exporter.process.openmp_runs import on_a_new_thread, torch, works_with_torch
from rankscope_exporter.process.threads import OwnThread

if sys.argv[2] == "call":
    torch.set_num_threads(int(sys.argv[1]))
torch.ones(1 << 20).add(1)
before, inside, leave = native_threads(), [], threading.Event()

def work(reached):
    works_with_torch()
    inside.append(numbers_of_threads())
    reached.set()
    leave.wait()

def added(start):
    reached = threading.Event()
    start(lambda: work(reached)).start()
    reached.wait()
    return len(lasting_threads(before) - before)

print(json.dumps([
    added(lambda target: OwnThread(target=target, name="rankscope-test")),
    inside[0],
    on_a_new_thread(numbers_of_threads),
    added(lambda target: threading.Thread(target=target)),
]))
leave.set()
"""


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("how", ["environment", "call"])
def test_a_thread_of_ours_that_computes_with_torch_opens_no_team(how, threads):
    """It has one CPU thread, other threads keep their number, and one of those that does the same opens a team."""
    command = [sys.executable, "-c", LIMITED, str(threads), how]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert 0 == done.returncode, done.stderr
    added, inside, elsewhere, added_by_others = json.loads(done.stdout)
    assert (0, [1, 1], [threads, threads]) == (added, inside, elsewhere)
    assert threads - 1 <= added_by_others
