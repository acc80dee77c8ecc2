"""One page of 8 ranks with 15,000 series each: cost for the rank that serves it, and for the other ranks."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
import zlib

from _noise import records
from _rows import Row, cpu_seconds, print_rows
from prometheus_client.parser import text_string_to_metric_families

from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import JUDGED_OPS
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.exposition import ExporterStats, Exposition
from rankscope_exporter.serving.latest_values import LatestValues
from rankscope_exporter.serving.node_exposition import NodePeers, joined, merged

RANKS, SERIES, ROUNDS = 8, 15_000, 15


def run() -> list[Row]:
    pages = [_page(rank) for rank in range(RANKS)]
    size = sum(map(len, pages)) / 1e6
    merging = cpu_seconds(lambda: merged(pages), rounds=21)
    parsing = cpu_seconds(lambda: list(text_string_to_metric_families(pages[0].decode())), rounds=3) * RANKS
    packing = cpu_seconds(lambda: _packed(merged(pages)), rounds=5)
    cpu, wall = _gathering(pages)
    return [
        Row("page", size, "MB", f"{RANKS} ranks x {SERIES:,} series"),
        Row("merging", merging * 1e3, "ms CPU", "family by family, no copy of the samples"),
        Row(
            "parsing the same lines", parsing * 1e3, "ms CPU", "prometheus_client's parser, without writing them again"
        ),
        Row("gathering and merging", cpu * 1e3, "ms CPU", f"of the rank that is asked; {RANKS - 1} live processes"),
        Row("gathering and merging", wall * 1e3, "ms", "wall, median"),
        Row("gzip level 1", packing * 1e3, "ms CPU", "outside the interpreter lock, where Prometheus asks for it"),
    ]


def _page(rank: int) -> bytes:
    live = LatestValues(())
    identity = Identity(run="bench", launch_id="bench", rank=rank, host="bench", incarnation=f"{rank:032}")
    page = Exposition(identity, live, ExporterStats, rules=(), series_budget=100_000)
    live.update(next(iter(records(SERIES // (2 * len(JUDGED_OPS)), 1, seed=rank))))
    return joined(page.pieces())


def _packed(pieces: list[memoryview]) -> int:
    deflate = zlib.compressobj(1, zlib.DEFLATED, 31)
    return sum(len(deflate.compress(piece)) for piece in pieces) + len(deflate.flush())


def _gathering(pages: list[bytes]) -> tuple[float, float]:
    """Return the median CPU and wall seconds of one page; the other ranks are processes of their own."""
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        tempfile.tempdir = folder
        children = [_child(rank, pages[rank]) for rank in range(1, RANKS)]
        asked = _neighbours(0, pages[0])
        try:
            while len(asked.gather().pages) < RANKS - 1:
                time.sleep(0.05)
            spent = []
            for _ in range(ROUNDS):
                began, since = time.process_time(), time.perf_counter()
                found = asked.gather()
                merged([pages[0], *(page for _, page in found.pages)])
                spent.append((time.process_time() - began, time.perf_counter() - since))
        finally:
            tempfile.tempdir = None
            asked.close()
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return statistics.median(cpu for cpu, _ in spent), statistics.median(wall for _, wall in spent)


def _neighbours(rank: int, page: bytes) -> NodePeers:
    identity = Identity(run="bench", launch_id="bench", rank=rank, host="bench", incarnation=f"{rank:032}")
    made = NodePeers(identity, lambda: page, on_fault=print, meter=CpuMeter())
    made.start()
    return made


def _child(rank: int, page: bytes) -> int:
    child = os.fork()
    if not child:
        _neighbours(rank, page)
        signal.pause()
    return child


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
