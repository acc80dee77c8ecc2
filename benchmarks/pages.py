"""Pages of runs: time to the first chart, heat map and list; a new value on an open page; open pages; redraws.

    python benchmarks/pages.py [live|chart|heat|list|open|redraw …]

The stores of the parts `chart`, `heat` and `list` are built in the folder RANKSCOPE_PAGES, and are used again if they
exist. Each request for them is to a new process of the service, after one request to its health page; the page cache of
the system is warm. Values are medians of 20 requests, from the request to the last byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import aiohttp
from _fleet_service import Service
from _live_exporters import Ranks
from _page_readers import Reader
from _page_redraws import redraws
from _page_requests import measured
from _rows import Row, print_rows

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("RANKSCOPE_PAGES_SECONDS", "60"))
RANKS, TENSORS, PAGES = 8, 148, 50
PROMISED_SECONDS = 3.0
ROUNDS = int(os.environ.get("RANKSCOPE_PAGES_ROUNDS", "20"))


@contextlib.contextmanager
def training(url: str) -> Iterator[dict[int, float]]:
    """Run eight exporters that step once a second. The value gets the time at which each step was published."""
    ranks = Ranks(ranks=RANKS, tensors=TENSORS, step_seconds=1.0, ingest_url=url)
    command = [sys.executable, str(HERE / "_live_exporters.py"), json.dumps(asdict(ranks))]
    published: dict[int, float] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        try:
            yield _Published(process.stdout, published)
        finally:
            process.stdin.close()


class _Published(dict[int, float]):
    """The times of all steps that the exporters have printed so far."""

    def __init__(self, lines: object, known: dict[int, float]) -> None:
        super().__init__(known)
        self._lines = lines

    def update_now(self) -> None:
        """Read the lines that were printed since the last call."""
        for line in self._lines.read().splitlines():  # type: ignore[attr-defined]
            step, at = line.split()
            self[int(step)] = float(at)


def live() -> Iterator[Row]:
    """Measure CPU time of the service without and with one open page, and the time from publication to the page."""
    with tempfile.TemporaryDirectory(prefix="rankscope-pages-") as folder:
        service = Service(Path(folder), {})
        try:
            with training(service.url) as published:
                time.sleep(15)
                idle = _cpu_share(service, lambda: time.sleep(SECONDS))
                yield Row("no page open", 100 * idle, "% of a core", f"{RANKS} ranks, {TENSORS} tensors, 1 step/s")
                status = _cpu_share(service, lambda: _status_page(service.url, SECONDS))
                yield Row("status page open", 100 * status, "% of a core", "the page before there were pages of runs")
                reader = Reader(service.url, "live")
                with following([reader]):
                    time.sleep(10)  # the first answers are those of a new page
                    began = time.time()
                    watched = _cpu_share(service, lambda: time.sleep(SECONDS))
                time.sleep(0.2)
                published.update_now()
                note = f"{watched / status:.2f} times the one with the status page; 1.5 are promised"
                yield Row("page of the run open", 100 * watched, "% of a core", note)
                delays = sorted(at - published[step] for step, at in reader.seen.items() if at > began)
                note = f"{len(delays)} steps, {reader.updates} loads; {PROMISED_SECONDS:g} s are promised"
                yield Row("publication to page, median", statistics.median(delays), "s", note)
                yield Row("publication to page, worst", delays[-1], "s")
        finally:
            service.stop()


def _status_page(url: str, seconds: float) -> None:
    """Load the status page every 5 s, as its script does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with urllib.request.urlopen(f"{url}/service", timeout=10) as answer:
            answer.read()
        time.sleep(5)


@contextlib.contextmanager
def following(readers: list[Reader]) -> Iterator[None]:
    """Let readers follow their pages in the context, in a thread with a separate event loop."""
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_follow(readers, stopping)))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


def _cpu_share(service: Service, work: Callable[[], None]) -> float:
    """Return the CPU time of the service during `work`, as a share of the elapsed time."""
    before = service.sample()
    work()
    after = service.sample()
    return (after.cpu_seconds - before.cpu_seconds) / (after.at - before.at)


async def _follow(readers: list[Reader], stopping: asyncio.Event) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(reader.read(session)) for reader in readers]
        await stopping.wait()
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def open_pages() -> Iterator[Row]:
    """Measure CPU time of the service with 50 pages of one run open, after their first answers."""
    with tempfile.TemporaryDirectory(prefix="rankscope-pages-") as folder:
        service = Service(Path(folder), {})
        try:
            with training(service.url):
                time.sleep(15)
                idle = _cpu_share(service, lambda: time.sleep(SECONDS))
                readers = [Reader(service.url, "live") for _ in range(PAGES)]
                with following(readers):
                    time.sleep(20)
                    watched = _cpu_share(service, lambda: time.sleep(SECONDS))
        finally:
            service.stop()
    updates = statistics.median(len(reader.seen) for reader in readers)
    note = f"{100 * idle:.2f} % without pages; at most 5 above it are promised; {updates:.0f} steps on each page"
    yield Row(f"{PAGES} pages open, above none", 100 * (watched - idle), "% of a core", note)


def requests(part: str) -> Iterator[Row]:
    """Measure the requests of a part on its store, which is built if there is none."""
    with contextlib.ExitStack() as stack:
        known = os.environ.get("RANKSCOPE_PAGES")
        folder = known or stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-pages-"))
        yield from measured(part, Path(folder), ROUNDS)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "live": live,
    "chart": lambda: requests("chart"),
    "heat": lambda: requests("heat"),
    "list": lambda: requests("list"),
    "open": open_pages,
    "redraw": lambda: redraws(min(SECONDS, 30)),
}


def run() -> Iterator[Row]:
    for part in PARTS.values():
        yield from part()


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PARTS)
    print_rows((__doc__ or "").splitlines()[0], (row for name in chosen for row in PARTS[name]()))
