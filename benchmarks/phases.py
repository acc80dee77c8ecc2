"""Cost of timing the phases of a step: the events of one step on the training thread, and their evaluation.

The events are sent as the hooks send them, without work between them: forward, backward, update, end of the step.
The figures are minima of 30 repeats of 2,000 steps, which are stable on a busy machine.
"""

from __future__ import annotations

import time

from _rows import Row

from rankscope_exporter.adapters.base import FrameworkTraits
from rankscope_exporter.monitors.step_timing import HostClock, StepTimingObserver
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import StepRecord

STEPS = 2_000
REPEATS = 30


def run() -> list[Row]:
    return [
        *(
            Row(
                f"events of a step of {micro} micro-batch{'es' if micro > 1 else ''}",
                _least(micro),
                "us",
                "on the training thread",
            )
            for micro in (1, 8)
        ),
        Row("durations of a step of 1 micro-batch", _read(), "us", "on the publisher's thread"),
    ]


def _observer() -> StepTimingObserver:
    boundary = ErrorBoundary()
    traits = FrameworkTraits(waits_for_reductions=True)
    return StepTimingObserver(HostClock(), traits, lambda _: None, has_optimizer=True, report=boundary.report)


def _step(observer: StepTimingObserver, pending_steps: list[StepRecord], micro_batches: int) -> None:
    observer.note("step_begins")
    for _ in range(micro_batches):
        for kind in ("forward_begins", "forward_ended", "backward_begins", "backward_ends", "backward_ended"):
            observer.note(kind)
    observer.note("update_begins")
    observer.note("updated")
    record = StepRecord(step=1, ts=0, ended_at=time.monotonic())
    observer.on_step_timed(record, "forward", ())
    pending_steps.append(record)


def _least(micro_batches: int) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        pending_steps: list[StepRecord] = []
        observer = _observer()
        began = time.thread_time()
        for _ in range(STEPS):
            _step(observer, pending_steps, micro_batches)
        best = min(best, time.thread_time() - began)
    return 1e6 * best / STEPS


def _read() -> float:
    best = float("inf")
    for _ in range(REPEATS):
        pending_steps: list[StepRecord] = []
        observer = _observer()
        for _ in range(STEPS):
            _step(observer, pending_steps, 1)
        began = time.thread_time()
        for record in pending_steps:
            for later in record.later:
                later()
        best = min(best, time.thread_time() - began)
    return 1e6 * best / STEPS
