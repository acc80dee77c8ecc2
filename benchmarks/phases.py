"""Cost of timing the phases of a step: the events of one step on the training thread, and their evaluation.

The events are sent as the hooks send them, without work between them: forward, backward, update, end of the step.
The figures are minima of 30 repeats of 2,000 steps, which are stable on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from _rows import Row

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.observers.step_timing.clock import HostClock
from rankscope_exporter.observers.step_timing.observer import LoopTraits, StepTimingObserver
from rankscope_exporter.records.step_events import StepEvents
from rankscope_exporter.records.step_record import StepRecord

STEPS = 2_000
REPEATS = 30


def run() -> list[Row]:
    alone = _least(lambda step_events, pending_steps: _step(step_events, pending_steps, 1), follow=False)
    return [
        Row("events of a step without a subscriber", alone, "us", "sent all the same"),
        *(
            Row(
                f"events of a step of {micro} micro-batch{'es' if micro > 1 else ''}",
                _least(
                    lambda step_events, pending_steps, micro=micro: _step(step_events, pending_steps, micro),
                    follow=True,
                ),
                "us",
                "on the training thread",
            )
            for micro in (1, 8)
        ),
        Row("durations of a step of 1 micro-batch", _read(), "us", "on the publisher's thread"),
    ]


def _step(step_events: StepEvents, pending_steps: list[StepRecord], micro_batches: int) -> None:
    step_events.on_step_begin(1)
    for _ in range(micro_batches):
        step_events.on_forward_begin()
        step_events.on_forward_end()
        step_events.on_backward_begin()
        step_events.on_gradients_ready()
        step_events.on_backward_end()
    step_events.on_optimizer_step_begin()
    step_events.on_optimizer_step_end()
    record = StepRecord(step=1, ts=0, ended_at=time.monotonic())
    step_events.on_step_end(record)
    step_events.on_step_timed(record, "forward")
    pending_steps.append(record)


def _least(step: Callable[[StepEvents, list[StepRecord]], None], *, follow: bool) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        pending_steps: list[StepRecord] = []
        observers = (
            [StepTimingObserver(HostClock(), LoopTraits(shows_reductions=True), lambda _: None)] if follow else []
        )
        step_events = StepEvents(ErrorBoundary(), observers)
        began = time.thread_time()
        for _ in range(STEPS):
            step(step_events, pending_steps)
        best = min(best, time.thread_time() - began)
    return 1e6 * best / STEPS


def _read() -> float:
    best = float("inf")
    for _ in range(REPEATS):
        pending_steps: list[StepRecord] = []
        observer = StepTimingObserver(HostClock(), LoopTraits(shows_reductions=True), lambda _: None)
        step_events = StepEvents(ErrorBoundary(), [observer])
        for _ in range(STEPS):
            _step(step_events, pending_steps, 1)
        began = time.thread_time()
        for record in pending_steps:
            for later in record.later:
                later()
        best = min(best, time.thread_time() - began)
    return 1e6 * best / STEPS
