"""Run real exporters with a loss and statistics of tensors, and print the time at which each step was published.

`pages` starts this program in a separate process. Each exporter has a port and a record channel, served by the same
code as in a training. The program receives its configuration as JSON on the command line. It writes a line `step time`
with the UTC time in seconds after each step, and makes steps until its standard input is closed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from dataclasses import dataclass, replace

from _noise import six_statistics

from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_exporter.records.record import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Number and size of the exporters, and the service with which they register."""

    ranks: int
    tensors: int
    step_seconds: float
    ingest_url: str
    run: str = "live"


def main(ranks: Ranks) -> None:
    """Step all ranks together."""
    channels = [_channel(rank, ranks) for rank in range(ranks.ranks)]
    walks = [six_statistics(ranks.tensors, rank) for rank in range(ranks.ranks)]
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
    began, step = time.monotonic(), 0
    while not told.wait(max(0.0, began + step * ranks.step_seconds - time.monotonic())):
        step += 1
        for rank, (channel, walk) in enumerate(zip(channels, walks, strict=True)):
            channel.publish(replace(next(walk), ts=time.time_ns() // 1000, step=step, scalars=_scalars(step, rank)))
            if step == 1:
                channel.start()
        print(step, time.time(), flush=True)
    for channel in channels:
        channel.close()


def _scalars(step: int, rank: int) -> tuple[Scalar, ...]:
    values = {
        "loss": 2 + 5 / (1 + step / 50) + 0.01 * ((step * 7 + rank) % 13),
        "grad_norm": 0.5 + 0.01 * (step % 17),
        "learning_rate": 3e-4,
        "step_seconds": 1.0,
        "tokens_per_second": 1e5 + step % 11,
    }
    return tuple(Scalar(name, value) for name, value in values.items())


def _channel(rank: int, ranks: Ranks) -> RankServer:
    identity = Identity(
        run=ranks.run, launch_id=ranks.run, rank=rank, world_size=ranks.ranks, incarnation=uuid.uuid4().hex
    )
    return RankServer(
        identity=identity,
        config=ServeConfig(spool_dir=None, ingest_url=ranks.ingest_url),
        rules=(),
        settings={},
        planned_steps=10_000,
        boundary=ErrorBoundary(),
    )


if __name__ == "__main__":
    main(Ranks(**json.loads(sys.argv[1])))
