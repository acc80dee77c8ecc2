"""What timing the phases of a step costs: the moments of one step on the training thread, and what becomes of them.

The moments are told as the hooks tell them, with nothing between: forward, backward, update, and the end of the step.
The figures are the least of 30 repeats of 2,000 steps, which holds on a busy machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from _rows import Row

from rankscope_exporter.base.errors import Guard
from rankscope_exporter.observers.step_timing.clock import HostClock
from rankscope_exporter.observers.step_timing.observer import Phases
from rankscope_exporter.observers.step_timing.timeline import Traits
from rankscope_exporter.records.pending_step import Draft
from rankscope_exporter.records.step_events import Moments

STEPS = 2_000
REPEATS = 30


def run() -> list[Row]:
    alone = _least(lambda moments, drafts: _step(moments, drafts, 1), follow=False)
    return [
        Row("moments of a step that nobody follows", alone, "us", "told all the same"),
        *(
            Row(
                f"moments of a step of {micro} micro-batch{'es' if micro > 1 else ''}",
                _least(lambda moments, drafts, micro=micro: _step(moments, drafts, micro), follow=True),
                "us",
                "on the training thread",
            )
            for micro in (1, 8)
        ),
        Row("durations of a step of 1 micro-batch", _read(), "us", "on the publisher's thread"),
    ]


def _step(moments: Moments, drafts: list[Draft], micro_batches: int) -> None:
    moments.tell("step_begins", 1)
    for _ in range(micro_batches):
        for moment in ("forward_begins", "forward_ended", "backward_begins", "backward_ends", "backward_ended"):
            moments.tell(moment)
    moments.tell("update_begins")
    moments.tell("updated")
    draft = Draft(1, 0, ended_at=time.monotonic())
    moments.tell("step_ends", draft)
    moments.tell("step_timed", draft, "forward")
    drafts.append(draft)


def _least(step: Callable[[Moments, list[Draft]], None], *, follow: bool) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        moments, drafts = Moments(Guard()), []
        if follow:
            moments.follow(Phases(HostClock(), Traits(shows_reductions=True), lambda _draft: None))
        began = time.thread_time()
        for _ in range(STEPS):
            step(moments, drafts)
        best = min(best, time.thread_time() - began)
    return 1e6 * best / STEPS


def _read() -> float:
    best = float("inf")
    for _ in range(REPEATS):
        moments, drafts = Moments(Guard()), []
        moments.follow(Phases(HostClock(), Traits(shows_reductions=True), lambda _draft: None))
        for _ in range(STEPS):
            _step(moments, drafts, 1)
        began = time.thread_time()
        for draft in drafts:
            for later in draft.later:
                later()
        best = min(best, time.thread_time() - began)
    return 1e6 * best / STEPS
