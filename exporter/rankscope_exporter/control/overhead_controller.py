"""Controls the overhead of the monitor: all ranks change the sampling interval together, at the same step.

A rank with an overhead above `max_overhead` requests a longer interval. The interval is shortened when the overhead of
every rank has been low for several windows. A rank with low overhead increments a counter in the store of the process
group. The rank that increments the counter last requests the shorter interval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.identity import Identity
from rankscope_exporter.control.change_queue import ChangeQueue, PlannedChange, ReactionChange
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.overhead_window import MOST_STRETCH, OverheadWindow, Verdict, WindowResult
from rankscope_exporter.records.record import StepObserver
from rankscope_exporter.training.sampling import ActiveQuantities

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


def _event(request: DecimationRequest, before: int, step: int, agreed_step: int | None) -> Event:
    details = {
        "step": step,
        "agreed_step": agreed_step,
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
    `cost` returns the CPU seconds that the monitor has used so far.

    All methods run on the training thread, except `_make` and `_request`, which the background thread of
    `ChangeSources` calls, too.
    """

    def __init__(
        self,
        window: OverheadWindow | None,
        active_quantities: ActiveQuantities,
        change_queue: ChangeQueue,
        sources: ChangeSources,
        identity: Identity,
        *,
        cost: Callable[[], float],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stretch = 1
        """Factor by which the configured sampling interval is multiplied."""
        self._window = window
        self._active_quantities = active_quantities
        self._change_queue = change_queue
        self._sources = sources
        self._rank, self._world_size = identity.rank, identity.world_size
        self._cost = cost
        self._say = say
        self._clock = clock
        self._requested_at = -1  # the number of changes at the last request of this rank
        self._counted_at = -1  # and when this rank incremented the counter of ranks with low overhead
        self._is_floor_reported = False
        sources.reactions[BUDGET] = self._make

    def on_before_step(self, step: int) -> None:  # noqa: ARG002 - only the number of steps matters
        window = self._window
        if window is not None and window.may_end(self._active_quantities.period):
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
        """Return the state for the HTTP path /config: the factor of the sampling interval.

        With a window of steps, also the limit `max_overhead` and the overhead in the last window.
        """
        if self._window is None:
            return {"stretch": self.stretch}
        return {"stretch": self.stretch, "max_overhead": self._window.max_overhead, "overhead": self._window.share}

    def _act(self, result: WindowResult) -> None:
        is_low = result.verdict is Verdict.LOW
        if self._counted_at == self._change_queue.changes and not is_low:
            self._count(-1)
        if result.verdict is Verdict.OVER and self._requested_at != self._change_queue.changes:
            self._requested_at = self._change_queue.changes
            self._request(result)
        elif is_low and self._counted_at != self._change_queue.changes:
            self._count(+1, result)
        elif result.share > self._max_overhead and self.stretch == MOST_STRETCH:
            self._report_floor(result.share)

    def _count(self, amount: int, result: WindowResult | None = None) -> None:
        """Add `amount`, +1 or -1, to the shared counter of ranks with low overhead.

        If all ranks have low overhead after this, request a shorter sampling interval.
        """
        self._counted_at = self._change_queue.changes if amount > 0 else -1

        def counted(ranks: int | None) -> None:
            if result is not None and (ranks is None or ranks >= self._world_size):
                self._request(result)

        self._sources.count(f"room/{self._change_queue.changes}", amount, counted)

    def _request(self, result: WindowResult) -> None:
        request = DecimationRequest(
            stretch=result.stretch,
            share=result.share,
            max_overhead=self._max_overhead,
            rank=self._rank,
            changes=self._change_queue.changes,
        )
        self._sources.request_reaction(asdict(request), BUDGET)

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

    def _make(self, document: Mapping[str, Any], step: int | None) -> PlannedChange:
        """Return the change of the sampling interval for the request of a rank with the fields `document`."""
        request = DecimationRequest(**document)
        description = {"stretch": request.stretch, "source": BUDGET}
        return ReactionChange(step=step, description=description, apply=partial(self._apply, request))

    def _apply(self, request: DecimationRequest, change: PlannedChange, step: int) -> list[Event]:
        """Adopt the factor of `request` from step number `step` on, and return an event about it.

        Return no event if the factor is the same as before, or if `request` is void.
        """
        if request.changes != self._change_queue.changes - 1:  # the change itself is already counted
            return []
        before = self.stretch
        self._hold(request.stretch)
        if request.stretch == before:
            return []
        if request.rank == self._rank:
            self._say(_reason(request, before))
        self._active_quantities.set_stretch(request.stretch)
        return [_event(request, before, step, change.step)]

    def _hold(self, stretch: int) -> None:
        self.stretch = stretch
        if self._window is not None:
            self._window.restart(stretch)


def _percent(share: float) -> str:
    """Return a share as a text in percent with three significant digits, such as "1.25 %"."""
    return f"{100 * share:.3g} %"
