"""Controls the overhead of the monitor: all ranks change the sampling interval together, at the same step.

A rank with an overhead above `max_overhead` requests a longer interval. The interval is shortened when the overhead of
every rank has been low for several windows. A rank with low overhead increments a counter in the store of the process
group. The rank that increments the counter last requests the shorter interval.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.identity import Identity
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.changes import PlannedChange
from rankscope_exporter.process.validation import share_of
from rankscope_exporter.records.record import StepObserver

BUDGET: Final = "budget"
"""The name under which the overhead controller requests changes of the sampling."""

MOST_STRETCH: Final = 1024
"""Largest factor of the sampling interval.

Beyond this factor almost nothing is measured, so an overhead above `max_overhead` does not come from sampling.
"""

LEAST_STEPS: Final = 20
LEAST_SECONDS: Final = 10.0
SETTLING_STEPS: Final = 5
"""Number of steps that are not evaluated after the start and after each restart of the overhead measurement.

Memory allocations that happen only once occur in these steps.
"""

LOW_SHARE: Final = 0.8
"""Largest expected overhead after halving the sampling interval, as a share of the limit `max_overhead`.

If the expected overhead is higher, the interval is not halved, because the next window would revert the change.
"""

PATIENCE: Final = 5
"""Number of consecutive windows with low overhead before the sampling interval is halved."""


class OverheadWindow:
    """Divides the training into windows of steps, and measures the overhead of the monitor in each window.

    A window consists of whole sampling cycles, so that consecutive windows are comparable. It is long enough that a few
    scrapes per minute do not change its result. The caller passes the time and the CPU time of the monitor. `stretch`
    is the present factor of the sampling interval.
    """

    def __init__(self, max_overhead: float) -> None:
        self.max_overhead = max_overhead
        self.stretch = 1
        self.share: float | None = None
        """Overhead in the last window, as a share of the elapsed time; None before the end of the first window."""
        self._least_seconds = LEAST_SECONDS
        self._steps = -SETTLING_STEPS
        self._began: tuple[float, float] | None = None  # time and cost
        self._low_windows = 0

    def restart(self, stretch: int | None = None) -> None:
        """Start a new overhead window; `stretch`, if given, becomes the factor of the sampling interval."""
        if stretch is not None and stretch != self.stretch:
            self.stretch, self._low_windows = stretch, 0
        self._steps, self._began = -SETTLING_STEPS, None

    def may_end(self, period: int) -> bool:
        """Count a step. Return whether a window may begin or end before it, once in `period` steps (a cycle)."""
        self._steps += 1
        return self._steps == 0 or (self._steps >= LEAST_STEPS and self._steps % max(1, period) == 0)

    def evaluate(self, now: float, cost: Callable[[], float]) -> int | None:
        """End the overhead window at time `now`, in seconds, and return the required factor of the sampling interval.

        The factor is larger than `stretch` if the overhead is too high, and smaller if it was low for `PATIENCE`
        windows. The next window begins at `now`. Return None if no window has begun, or if it is too short. The
        function `cost` returns the CPU time of the monitor so far, in seconds.
        """
        began = self._began
        if began is not None and now - began[0] < self._least_seconds:
            return None
        self._began, self._steps = (now, cost()), 0
        if began is None:
            return None
        seconds, spent = now - began[0], self._began[1] - began[1]
        self.share = share = max(0.0, spent) / seconds
        if share > self.max_overhead:
            self._low_windows = 0
            required: int = self.stretch * 2 ** math.ceil(math.log2(share / self.max_overhead))
            return min(MOST_STRETCH, max(2 * self.stretch, required))
        is_low = self.stretch > 1 and 2 * share <= LOW_SHARE * self.max_overhead
        self._low_windows = self._low_windows + 1 if is_low else 0
        return self.stretch // 2 if self._low_windows >= PATIENCE else self.stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecimationRequest:
    """The request of one rank to change the sampling interval of all ranks."""

    stretch: int
    """Factor by which the configured sampling interval is to be multiplied."""
    share: float
    """Overhead with the previous sampling interval: CPU time of the monitor divided by the time of training."""
    max_overhead: float
    rank: int
    changes: int
    """Number of sampling changes that had taken effect on this rank when the overhead was measured.

    If another sampling change takes effect later, the request is void.
    """


def _event(request: DecimationRequest, before: int, step: int, agreed_step: int | None) -> Event:
    details: dict[str, Any] = {"step": step, "agreed_step": agreed_step, "was": before, "now": request.stretch}
    details |= {"share": request.share, "max_overhead": request.max_overhead, "rank": request.rank}
    severity = Severity.WARNING if request.stretch > before else Severity.INFO
    message = f"from step {step}: {_reason(request, before)}"
    return Event(type=EventType.BUDGET, severity=severity, message=message, details=details)


def _reason(request: DecimationRequest, before: int) -> str:
    interval = "every configured step is sampled"
    if request.stretch > 1:
        interval = f"one in {request.stretch} of the configured steps is sampled"
    previous = "measuring" if before == 1 else f"measuring one in {before}"
    cost = f"{previous} costs {_percent(request.share)} of the time of training on rank {request.rank}"
    return f"{interval}: {cost}, max_overhead is {_percent(request.max_overhead)}"


@dataclass(eq=False, kw_only=True)
class OverheadController(StepObserver):
    """Keeps the overhead of this rank below `max_overhead` by changing the sampling interval.

    If `max_overhead` is None, this rank requests no change, but applies the changes that other ranks request: no step
    is then counted. The function `cost` returns the CPU seconds that the monitor has used so far, without those that
    occur only once.

    All methods run on the training thread, except `_make`, which the background thread of `ChangeSources` calls.
    """

    max_overhead: float | str | None
    sources: ChangeSources
    identity: Identity
    cost: Callable[[], float]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.window = OverheadWindow(share_of(self.max_overhead) or 1.0)
        self._change_queue = self.sources.change_queue
        self._active_quantities = self._change_queue.active_quantities
        self._requested_at = -1  # the number of changes at the last request of this rank
        self._counted_at = -1  # and when this rank incremented the counter of ranks with low overhead
        self._is_floor_reported = False
        self.sources.reactions[BUDGET] = self._make

    @property
    def stretch(self) -> int:
        """Factor by which the configured sampling interval is multiplied."""
        return self.window.stretch

    def on_before_step(self, step: int) -> None:  # noqa: ARG002 - only the number of steps matters
        window = self.window
        if window.may_end(self._active_quantities.period):
            required = window.evaluate(self.clock(), self.cost)
            if required is not None:
                self._act(required)

    def state(self) -> dict[str, Any]:
        """Return the state for the HTTP path /config: the factor of the sampling interval.

        With a limit, also the limit `max_overhead` and the overhead in the last window.
        """
        state = {"stretch": self.stretch}
        if self.max_overhead is None:
            return state
        return {**state, "max_overhead": self.window.max_overhead, "overhead": self.window.share}

    def _act(self, required: int) -> None:
        changes, share, limit = self._change_queue.changes, self.window.share or 0.0, self.window.max_overhead
        request = DecimationRequest(
            stretch=required, share=share, max_overhead=limit, rank=self.identity.rank, changes=changes
        )
        send = partial(self.sources.request_reaction, asdict(request), BUDGET)
        is_low = required < self.stretch
        if self._counted_at == changes and not is_low:
            self._counted_at = -1
            self.sources.count(f"room/{changes}", -1, lambda _: None)
        if required > self.stretch and self._requested_at != changes:
            self._requested_at = changes
            send()
        elif is_low and self._counted_at != changes:
            self._counted_at = changes

            def counted(ranks: int | None) -> None:
                if ranks is None or ranks >= self.identity.world_size:  # the overhead of all ranks is low
                    send()

            self.sources.count(f"room/{changes}", 1, counted)
        elif share > limit and self.stretch == MOST_STRETCH and not self._is_floor_reported:
            self._is_floor_reported = True
            self.say(
                f"the monitor costs {_percent(share)} of the time of training, above max_overhead = "
                f"{_percent(limit)}, although only one in {MOST_STRETCH} of the configured steps is sampled: sampling "
                "is not the cause"
            )

    def _make(self, document: Mapping[str, Any], step: int | None) -> PlannedChange:
        """Return the change of the sampling interval for the request of a rank with the fields `document`."""
        request = DecimationRequest(**document)
        description = {"stretch": request.stretch, "source": BUDGET}
        return PlannedChange(step=step, description=description, apply=partial(self._apply, request))

    def _apply(self, request: DecimationRequest, change: PlannedChange, step: int) -> list[Event]:
        """Adopt the factor of `request` from step number `step` on, and return an event about it.

        Return no event if the factor is the same as before, or if `request` is void.
        """
        if request.changes != self._change_queue.changes - 1:  # the change itself is already counted
            return []
        before = self.stretch
        self.window.restart(request.stretch)
        if request.stretch == before:
            return []
        if request.rank == self.identity.rank:
            self.say(_reason(request, before))
        self._active_quantities.set_stretch(request.stretch)
        return [_event(request, before, step, change.step)]


def _percent(share: float) -> str:
    """Return a share as a text in percent with three significant digits, such as "1.25 %"."""
    return f"{100 * share:.3g} %"
