"""The monitor opens no OpenMP team, and the OpenMP threads of a training sleep no more often (`openmp_runs.py`)."""

import contextlib
import http.client
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
STEPS = 200
TRIES = 3
"""Attempts. Other processes on the cores make OpenMP threads sleep at barriers, so one undisturbed pair is enough."""

Run = dict[str, Any]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by /proc"),
]


def trained(
    case: str, threads: int, how: str, during: Callable[[subprocess.Popen[str], str], None] | None = None
) -> Run:
    """Return the report of one training. `during` is called with the process and the address of its monitor."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RANKSCOPE_INGEST_URL": "", "RANKSCOPE_SPOOL_DIR": ""}
    command = [sys.executable, "-m", "tests.exporter.process.openmp_runs", case, str(threads), how, str(STEPS)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if during is not None:
                during(process, process.stdout.readline().strip())
            output, _ = process.communicate(timeout=250)
        finally:
            process.kill()
    assert 0 == process.returncode
    found: Run = json.loads(output.splitlines()[-1])
    return found


@cache
def without_monitor(threads: int, how: str) -> Run:
    return trained("unmonitored", threads, how)


def scrape(process: subprocess.Popen[str], address: str) -> None:
    """Read the pages of a rank repeatedly until its process ends, as Prometheus and the service do."""
    answers = 0
    while process.poll() is None:
        for page in PAGES:
            # At its end, the process can close the connection within an answer.
            gone = contextlib.suppress(OSError, http.client.HTTPException)
            with gone, urllib.request.urlopen(address + page, timeout=5) as answer:
                answers += bool(answer.read())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SCRAPE_SECONDS)

    assert answers > 10 * len(PAGES)


CASES = [
    ("default", "environment", scrape),
    ("everything", "call", None),
    ("everything, on_anomaly with torch", "call", None),
]

EVERYTHING = {
    *("features", "histograms", "hashes", "modules", "collectives"),
    *("attention_entropy", "spectral_norm", "router_load", "direction_agreement"),
    *("anomaly", "capture", "hang", "stacks"),
    *("rankscope-collectives", "rankscope-capture", "rankscope-hardware", "rankscope-watchdog"),
}
"""Datasets, features, events and threads which must be present in the cases with all features enabled."""

REQUIRED = {"everything": EVERYTHING, "everything, on_anomaly with torch": EVERYTHING | {"rankscope-on-anomaly"}}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("case", "how", "during"), CASES)
def test_training_has_only_its_own_openmp_threads(case, how, during, threads):
    """The number of threads equals that without a monitor.

    The thread counts of torch and of its OpenMP library are those of the script, on the training thread and on a
    thread that starts later. These threads and the training thread sleep at most twice as often per step plus once.
    """
    for attempt in range(TRIES):
        alone = trained("unmonitored", threads, how) if attempt else without_monitor(threads, how)
        found = trained(case, threads, how, during)

        assert alone["threads"] == found["threads"]
        assert [threads] * 4 == alone["numbers"] == found["numbers"]
        if found["switches"] <= 2 * alone["switches"] + 1:
            break
    assert found["switches"] <= 2 * alone["switches"] + 1
    if case in REQUIRED:
        assert REQUIRED[case] <= {*found["rows"], *found["features"], *found["events"], *found["own"]}
