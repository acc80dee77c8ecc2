"""Run real exporters with random numbers and without a training. `peers` starts this program in a separate process.

Each exporter has a port, a `/metrics` page and a record channel, served by the same code as in a training. The numbers
are random and different for each rank and step. The program receives its configuration as JSON on the command line,
writes one line with its addresses, and makes steps until its standard input is closed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from dataclasses import dataclass

from _noise import six_statistics

from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.serving_config import ServeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Number and size of the exporters, and the service with which they register."""

    targets: int
    tensors: int
    step_seconds: float
    ingest_url: str | None = None


def main(ranks: Ranks) -> None:
    """Step all ranks together, at most as often as asked."""
    channels = [_channel(rank, ranks) for rank in range(ranks.targets)]
    walks = [six_statistics(ranks.tensors, rank, int(ranks.step_seconds * 1e6)) for rank in range(ranks.targets)]
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
    for channel, walk in zip(channels, walks, strict=True):
        channel.publish(next(walk))
    print(json.dumps([channel.start().partition("://")[2] for channel in channels]), flush=True)
    began, step = time.monotonic(), 1
    while not told.wait(max(0.0, began + step * ranks.step_seconds - time.monotonic())):
        for channel, walk in zip(channels, walks, strict=True):
            channel.publish(next(walk))
        step += 1
    for channel in channels:
        channel.close()


def _channel(rank: int, ranks: Ranks) -> RankServer:
    identity = Identity(
        run="peers", launch_id="peers", rank=rank, world_size=ranks.targets, incarnation=uuid.uuid4().hex
    )
    return RankServer(
        identity=identity,
        config=ServeConfig(spool_dir=None, ingest_url=ranks.ingest_url, page_ops="all", series_budget=1_000_000),
        rules=(),
        settings={},
        planned_steps=None,
        boundary=ErrorBoundary(),
    )


if __name__ == "__main__":
    main(Ranks(**json.loads(sys.argv[1])))
