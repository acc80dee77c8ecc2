"""Parse text pages into columns: by the template of the latest page, a changed page, and the library."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from _rows import Row, cpu_seconds
from prometheus_client.parser import text_string_to_metric_families

from rankscope_ingest.scrape.page_reader import PageReader, PageRows

SAMPLES = 300_000
"""Read for every figure, however large the pages are."""

_PAUSE_SECONDS = 1e-4
"""Shorter pauses are caused by the thread that measures pauses."""


def run() -> list[Row]:
    rows = []
    for series in (300, 2_000, 15_000):
        by_template, timed, library = _figures(series)
        rows += [
            Row(f"{series:,} series, unchanged", by_template, "CPU s/M samples", f"{library / by_template:.0f}x less"),
            Row(f"{series:,} series, one with a timestamp", timed, "CPU s/M samples", f"{library / timed:.1f}x less"),
            Row(f"{series:,} series, prometheus_client", library, "CPU s/M samples", "labels as dictionaries"),
        ]
    held, longest, took = _lock_holds(300_000)
    note = f"of {took:.0f} ms for 300,000 series; {longest:.1f} ms in one piece at most"
    return [*rows, Row("holds the interpreter lock", held, "ms", note)]


def _lock_holds(series: int) -> tuple[float, float, float]:
    """Return total pause of another thread while a page is parsed, its longest pause, and the parse time, in ms.

    The minimum of five runs, because the machine delays threads too. Python releases the interpreter lock every 5 ms,
    and here after each bytecode, so that only single calls into C remain.
    """
    first, second = (_page("host:9100", series, seed) for seed in (1, 2))
    reader = PageReader()
    reader.read(first)
    interval, found = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            reading = threading.Thread(target=reader.read, args=(second,))
            began, pauses = time.perf_counter(), [0.0]
            reading.start()
            seen = time.perf_counter()
            while reading.is_alive():
                now = time.perf_counter()
                if now - seen > _PAUSE_SECONDS:
                    pauses.append(now - seen)
                seen = now
            found.append((1000 * sum(pauses), 1000 * max(pauses), 1000 * (time.perf_counter() - began)))
    finally:
        sys.setswitchinterval(interval)
    return min(found)


def _figures(series: int) -> tuple[float, float, float]:
    """Return CPU seconds per million samples: unchanged pages, pages with a timestamp, and the library."""
    targets = [f"host-{number}:9100" for number in range(32)]
    first, second = ([_page(target, series, seed) for target in targets] for seed in (1, 2))
    readers = [PageReader() for _ in targets]
    _read(readers, first)
    rounds = max(1, SAMPLES // (series * len(second)))
    millions = rounds * series * len(second) / 1e6
    assert not any(rows.exact for rows in _read(readers, second))
    by_template = cpu_seconds(lambda: [_read(readers, second) for _ in range(rounds)])
    surprising = [page + b"seen_seconds 1 1700000000000\n" for page in second[:4]]
    timed = cpu_seconds(lambda: _read(readers[:4], surprising), rounds=3) / (4 * (series + 1) / 1e6)
    text = second[0].decode()
    library = cpu_seconds(lambda: list(text_string_to_metric_families(text)), rounds=3)
    return by_template / millions, timed, library / series * 1e6


def _read(readers: Sequence[PageReader], pages: Sequence[bytes]) -> list[PageRows]:
    return [reader.read(page) for reader, page in zip(readers, pages, strict=True)]


def _page(target: str, series: int, seed: int) -> bytes:
    """Return a page as DCGM's exporter makes them, spaces in labels included."""
    values = np.random.default_rng(seed).normal(100, 30, series)
    lines = ["# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).\n# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n"]
    lines += [
        f'DCGM_FI_DEV_POWER_USAGE{{gpu="{number}",UUID="GPU-{number:08x}",modelName="NVIDIA H100 80GB HBM3",'
        f'Hostname="{target}"}} {value:.6f}\n'
        for number, value in enumerate(values)
    ]
    return "".join(lines).encode()
