"""Run one training and report its OpenMP threads, and how often they and the training thread slept.

    python -m tests.exporter.process.openmp_runs CASE THREADS environment|call STEPS

OMP_NUM_THREADS sets the number of threads; with `call`, torch.set_num_threads() also does. STEPS follow a warm-up.
"""

import ctypes
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exporter.parts import session_of
from torch import nn
from torch.nn import functional

from rankscope_exporter import AnomalyNan, Monitor
from rankscope_exporter.process import openmp

WARM_UP_STEPS = 45
"""Steps before the measurement, in which the rules fire."""

EVERY = 20
NAN_STEPS = (21, 30)
QUIET_SECONDS = 2.5
"""Longer than `hang_after_seconds`, so that the watchdog reads stacks and the flight record."""

DATASETS = ("features", "histograms", "hashes", "modules", "collectives")
TASKS = Path("/proc/self/task")

EVERYTHING: dict[str, Any] = {
    "quantities": [
        *("parameters", "gradients", "optimizer_state", "activations", "direction", "micro_gradients", "structure"),
        *("attention", "linear", "router", "adam_updates", "hashes", "collectives"),
    ],
    "options": {
        "attention": {"targets": ["core"], "order": "b,h,s,d"},
        "router": {"targets": ["gate"], "top_k": 2},
        "hashes": {"of": "all", "state": True, "every": EVERY},
    },
    "rules": [AnomalyNan()],
    "capture": {"quantities": ["activations"], "steps": 2, "cooldown_steps": 5},
    "collectives_share": 0.01,
    "hang_after_seconds": 1.0,
    "hang_in_phase_after_seconds": 1.0,
    "stacks_signal": "SIGUSR2",
    "hardware": {"every_seconds": 0.5},
}


def works_with_torch(*_: object) -> None:
    """Run operations that torch, MKL and LAPACK divide among threads."""
    torch.rand(447, dtype=torch.float64).sqrt().exp()
    ones = torch.ones(512, 512)
    (ones @ ones).add(ones)
    torch.linalg.eigvalsh(torch.eye(200).expand(4, -1, -1))


SETTINGS: dict[str, Mapping[str, Any] | None] = {
    "unmonitored": None,
    "default": {},
    "everything": EVERYTHING,
    "everything, on_anomaly with torch": EVERYTHING,
}
LIMITED = "everything, on_anomaly with torch"
"""The case with the usual limit: without it, any torch operation on a thread of the monitor is detected."""


class Core(nn.Module):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*parts, is_causal=True)


class Net(nn.Module):
    """Attention, a router of four experts, and 150 small parameters, as many as 12 blocks have."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.core, self.gate, self.out = nn.Linear(64, 192), Core(), nn.Linear(64, 4), nn.Linear(64, 8)
        self.perceptron = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.shifts = nn.ParameterList(torch.zeros(64) for _ in range(150))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.core(*parts).transpose(1, 2).flatten(2) + torch.stack(list(self.shifts)).sum(0)
        return self.out(x + self.gate(x).softmax(-1).amax(-1, keepdim=True) * self.perceptron(x))


def native_threads() -> set[int]:
    """Return the training thread and all threads that are not in `threading.enumerate()`."""
    others = {thread.native_id for thread in threading.enumerate()} - {threading.get_native_id()}
    return {int(task.name) for task in TASKS.iterdir()} - others


def lasting_threads(known: set[int]) -> set[int]:
    """Return `native_threads()` without Python threads that are starting or ending at this moment."""
    found = native_threads()
    for _ in range(20):
        if found <= known:
            break
        time.sleep(0.005)
        found &= native_threads()
    return found


def switches(threads: set[int]) -> int:
    """Return the total number of voluntary context switches of `threads`."""
    texts = [(TASKS / str(thread) / "status").read_text() for thread in threads]
    counts = [re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE) for text in texts]
    return sum(int(count) for (count,) in counts)


def numbers_of_threads() -> list[int]:
    """Return the number of threads according to torch and according to its OpenMP library."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return [torch.get_num_threads(), library.omp_get_max_threads()]


def on_a_new_thread(function: Callable[[], list[int]]) -> list[int]:
    """Return the result of `function` on a thread that the script itself starts."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def run(case: str, threads: int, how: str, steps: int) -> dict[str, Any]:
    if how == "call":
        torch.set_num_threads(threads)
    if case != LIMITED:
        openmp.limit_this_thread = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = train(case, Path(folder), steps)
        dist.destroy_process_group()
    return found


def train(case: str, folder: Path, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = None
    if (given := SETTINGS[case]) is not None:
        files = {"sinks": {name: {"folder": str(folder / name)} for name in ("csv", "tensorboard", "anomalies")}}
        own = {**files, "serve": {"spool_dir": str(folder)}} if given else {}
        settings = {"every": EVERY, "console": False, "exit_wait_seconds": 0, **own, **given}
        monitor = Monitor(settings, on_anomaly=works_with_torch if case == LIMITED else None).attach(model, optimizer)
        print(monitor.address, flush=True)
    known: set[int] = set()

    def step(number: int) -> None:
        nonlocal known
        optimizer.zero_grad()
        loss = model(torch.randn(4, 32, 64)).square().mean()
        loss.backward()
        dist.all_reduce(torch.ones(3))
        optimizer.step()
        if monitor is not None:
            monitor.batch([number])
            monitor.log(loss=float("nan") if number in NAN_STEPS else loss.detach())
        known |= lasting_threads(known)

    for number in range(WARM_UP_STEPS):
        step(number)
    time.sleep(QUIET_SECONDS)
    known |= lasting_threads(known)
    by_step = []
    for number in range(WARM_UP_STEPS, WARM_UP_STEPS + steps):
        before = switches(known)
        step(number)
        by_step.append(switches(known) - before)
    found = {
        "threads": len(known),
        # Bursts of other processes also make OpenMP threads sleep, but only at some steps. A second team makes them
        # sleep at every step, so the lower quartile over the steps detects it and ignores the bursts.
        "switches": statistics.quantiles(by_step, n=4)[0],
        "numbers": [*numbers_of_threads(), *on_a_new_thread(numbers_of_threads)],
        "own": sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread()),
    }
    if monitor is not None:
        session = session_of(monitor)
        monitor.detach()
        records = session.channel.ring.after(-1, 1 << 62).records
        found["rows"] = sorted({name for record in records for name in DATASETS if getattr(record, name)})
        found["features"] = sorted({row["kind"] for record in records for row in record.features})
        found["events"] = sorted({str(event.type) for record in records for event in record.events})
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
