"""Controls the overhead of the monitor: all ranks change the sampling interval together, at the same step.

A rank with an overhead above `max_overhead` requests a longer interval. If several ranks request one, the longest
requested interval applies. The interval is shortened when the overhead of every rank has been low for several windows.
A rank with low overhead increments a counter in the store of the process group. The rank that increments the counter
last requests the shorter interval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.reactions.overhead_window import MOST_STRETCH, OverheadWindow, Verdict, WindowResult
from rankscope_exporter.reconfiguration.agreement import Agreement
from rankscope_exporter.reconfiguration.change_queue import PlannedChange
from rankscope_exporter.reconfiguration.change_sources import ChangeSources
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.sampling.active_quantities import ActiveQuantities

BUDGET: Final = "budget"
"""The name under which the overhead controller requests changes of the sampling."""


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


@dataclass(slots=True, kw_only=True)
class DecimationChange(PlannedChange):
    """A change of the sampling interval of all ranks, at a step on which they agreed.

    The function `accept` adopts the sampling interval factor of `request` and returns the previous factor. It returns
    None if `request` is void, because another sampling change took effect after the overhead was measured.
    """

    request: DecimationRequest
    accept: Callable[[DecimationRequest], int | None]

    def apply(self, active_quantities: ActiveQuantities, step: int) -> list[Event]:
        """Multiply the sampling intervals by the new factor from step number `step` on.

        Return an event about the change. The decision whether this step is sampled already uses the new factor. Return
        no event if `request` is void or if the factor is the same as before.
        """
        before = self.accept(self.request)
        if before is None or before == self.request.stretch:
            return []
        active_quantities.set_stretch(self.request.stretch)
        return [self._event(before, step)]

    def document(self) -> dict[str, Any]:
        """Return the new factor of the sampling interval, for the HTTP path /config."""
        return {"stretch": self.request.stretch, "source": BUDGET}

    def _event(self, before: int, step: int) -> Event:
        request = self.request
        details = {
            "step": step,
            "agreed_step": self.step,
            "was": before,
            "now": request.stretch,
            "share": request.share,
            "max_overhead": request.max_overhead,
            "rank": request.rank,
        }
        severity = Severity.WARNING if request.stretch > before else Severity.INFO
        message = f"from step {step}: {_reason(request, before)}"
        return Event(type=EventType.BUDGET, severity=severity, message=message, details=json.dumps(details))


def _reason(request: DecimationRequest, before: int) -> str:
    interval = "every configured step is sampled"
    if request.stretch > 1:
        interval = f"one in {request.stretch} of the configured steps is sampled"
    previous = "measuring" if before == 1 else f"measuring one in {before}"
    cost = f"{previous} costs {_percent(request.share)} of the time of training on rank {request.rank}"
    return f"{interval}: {cost}, max_overhead is {_percent(request.max_overhead)}"


class OverheadController(StepObserver):
    """Keeps the overhead of this rank below `max_overhead` by changing the sampling interval.

    If `window` is None, this rank requests no change, but applies the changes that other ranks request. The function
    `cost` returns the CPU seconds that the monitor has used so far. The function `period` returns the number of steps
    of one sampling cycle, and `changes` the number of sampling changes that took effect on this rank.

    All methods run on the training thread, except the functions that this object passes to `ChangeSources`: the
    background thread of `ChangeSources` calls them.
    """

    def __init__(
        self,
        window: OverheadWindow | None,
        sources: ChangeSources,
        *,
        cost: Callable[[], float],
        period: Callable[[], int],
        changes: Callable[[], int],
        rank: int,
        world_size: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stretch = 1
        """Factor by which the configured sampling interval is multiplied."""
        self._window = window
        self._sources = sources
        self._cost = cost
        self._period = period
        self._changes = changes
        self._rank = rank
        self._world_size = world_size
        self._say = say
        self._clock = clock
        self._requested_at = -1  # the number of changes at the last request of this rank
        self._counted_at = -1  # and when this rank incremented the counter of ranks with low overhead
        self._is_floor_reported = False

    def make(self, document: Mapping[str, Any], step: int | None) -> DecimationChange:
        """Return the change of the sampling interval for a request of any rank.

        The JSON object `document` has the fields of `DecimationRequest`. The change takes effect at step number `step`,
        or at the next step if `step` is None.
        """
        return DecimationChange(request=DecimationRequest(**document), step=step, accept=self._accept)

    def on_before_step(self, step: int) -> None:  # noqa: ARG002 - only the number of steps matters
        """Evaluate the overhead in the present window of steps if the window ends before step number `step`.

        At all other steps, this method only counts the step.
        """
        window = self._window
        if window is not None and window.may_end(self._period()):
            now = self._clock()
            result = window.evaluate(now, self._cost()) if window.is_long_enough(now) else None
            if result is not None:
                self._act(result)

    def sampling_changed(self) -> None:
        """Reset the factor of the sampling interval to 1, because the cost of the new configuration is unknown."""
        self._hold(1)

    def pause(self) -> None:
        """Discard the present overhead window and start a new one, so that the cost of a capture is not evaluated."""
        if self._window is not None:
            self._window.restart()

    def state(self) -> dict[str, Any]:
        """Return the state of the overhead controller, for the HTTP path /config.

        It contains the factor of the sampling interval, the limit `max_overhead`, and the overhead in the last window
        of steps. Without a window, it contains only the factor.
        """
        if self._window is None:
            return {"stretch": self.stretch}
        return {"stretch": self.stretch, "max_overhead": self._window.max_overhead, "overhead": self._window.share}

    def _act(self, result: WindowResult) -> None:
        is_low = result.verdict is Verdict.LOW
        if self._counted_at == self._changes() and not is_low:
            self._count(-1)
        if result.verdict is Verdict.OVER and self._requested_at != self._changes():
            self._requested_at = self._changes()
            self._request(result)
        elif is_low and self._counted_at != self._changes():
            self._count(+1, result)
        elif result.share > self._max_overhead and self.stretch == MOST_STRETCH:
            self._report_floor(result.share)

    def _count(self, amount: int, result: WindowResult | None = None) -> None:
        """Add `amount`, +1 or -1, to the shared counter of ranks with low overhead.

        If all ranks have low overhead after this, request a shorter sampling interval.
        """
        changes = self._changes()
        self._counted_at = changes if amount > 0 else -1

        def count(agreement: Agreement) -> None:
            if agreement.count(f"room/{changes}", amount) >= self._world_size and result is not None:
                self._request(result)

        if not self._sources.run_with_agreement(count) and result is not None:
            self._request(result)

    def _request(self, result: WindowResult) -> None:
        changes = self._changes()
        request = DecimationRequest(
            stretch=result.stretch,
            share=result.share,
            max_overhead=self._max_overhead,
            rank=self._rank,
            changes=changes,
        )
        self._sources.request_reaction(asdict(request), BUDGET, is_obsolete=lambda: self._changes() != changes)

    @property
    def _max_overhead(self) -> float:
        return 1.0 if self._window is None else self._window.max_overhead

    def _report_floor(self, share: float) -> None:
        if not self._is_floor_reported:
            self._is_floor_reported = True
            self._say(
                f"the monitor costs {_percent(share)} of the time of training, above max_overhead = "
                f"{_percent(self._max_overhead)}, although only one in {MOST_STRETCH} of the configured steps is "
                "sampled: sampling is not the cause"
            )

    def _accept(self, request: DecimationRequest) -> int | None:
        """Adopt the sampling interval factor of `request` and return the previous factor.

        Return None, without an effect, if another sampling change took effect after the overhead was measured.
        """
        if request.changes != self._changes() - 1:  # the change itself is already counted
            return None
        before = self.stretch
        self._hold(request.stretch)
        if request.rank == self._rank and request.stretch != before:
            self._say(_reason(request, before))
        return before

    def _hold(self, stretch: int) -> None:
        self.stretch = stretch
        if self._window is not None:
            self._window.restart(stretch)


def _percent(share: float) -> str:
    """Return a share as a text in percent with three significant digits, such as "1.25 %"."""
    return f"{100 * share:.3g} %"
