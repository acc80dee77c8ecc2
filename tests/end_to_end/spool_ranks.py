"""Start rank processes on request: import their modules once, then fork one process for each line of JSON.

    {"rank": 0, "life": "first", "steps": 50, "pause": 0.01, "end": "linger", "is_held": false, "out": "…", "ring": 9}
A rank writes each published seq to `out`, so that a test knows after a kill which records must exist. `environment` is
optional. With `is_held`, a rank ends when the test has written the file with the suffix "released".
"""

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope_contract.model.events import Event
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Scalar, Statistics, StepRecord


def record(step: int, *events: Event, tensors: int = 1) -> StepRecord:
    entries = tuple(PlanEntry(kind="param_after", tensor=f"t{number}") for number in range(tensors))
    values = pa.array([float(step)] * (6 * tensors), pa.float32())
    counts = pa.array([0] * (3 * tensors) + [1] * tensors, pa.int64())
    return StepRecord(
        ts=time.time_ns() // 1000,
        step=step,
        statistics=Statistics(NamedPlan.of(Plan(entries)), values, counts),
        scalars=(Scalar("loss", 1.0 / (step + 1)),),
        events=events,
    )


def live(order: dict[str, Any]) -> None:
    rank, life, steps = order["rank"], order["life"], order["steps"]
    identity = Identity(
        run="r", launch_id=life, rank=rank, world_size=2, local_rank=rank, host="h", incarnation=f"{life}-{rank}"
    )
    config = MonitorConfig().with_environment({**os.environ, **order["environment"]}).serve
    channel = RankServer(
        identity=identity,
        config=dataclasses.replace(config, ring_records=order["ring"]),
        rules=(),
        settings={},
        planned_steps=None,
        boundary=ErrorBoundary(),
    )
    channel.start()
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for step in range(steps):
        os.write(out, b"%d\n" % channel.publish(record(step)))
        time.sleep(order["pause"])
    if order["end"] == "linger":
        time.sleep(600)
    while order["is_held"] and not Path(order["out"]).with_suffix(".released").exists():
        time.sleep(0.02)
    details = json.dumps({"reason": "completed", "last_step": steps - 1})
    os.write(out, b"%d\n" % channel.publish(record(steps, Event(type="exit", details=details))))
    left = channel.drain(float(order["end"]))
    Path(order["out"]).with_suffix(".left").write_text(str(left))
    channel.close()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the ranks are not waited for
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            live(json.loads(line))
        except BaseException:
            traceback.print_exc()
        os._exit(0)


if __name__ == "__main__":
    main()
