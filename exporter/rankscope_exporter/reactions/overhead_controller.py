"""Controls the overhead of the monitor: all ranks change the sampling interval together, at the same step.

A rank that exceeds its budget requests a longer interval alone: the longest wins. The interval is shortened when every
rank has had room for long: each counts itself in the store of the process group, and the last one requests it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_exporter.base.validation import percent
from rankscope_exporter.reactions.overhead_window import MOST_STRETCH, Judged, OverheadWindow, Verdict
from rankscope_exporter.reconfiguration.agreement import Agreement
from rankscope_exporter.sampling.active_quantities import ActiveQuantities

BUDGET: Final = "budget"
"""The source that such a change names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecimationRequest:
    """What a rank asks of all: numbers, as they stand in the event of each."""

    stretch: int
    share: float
    max_overhead: float
    rank: int
    changes: int
    """How many changes had taken place where that was measured: behind another one it means nothing any more."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> DecimationRequest:
        """Return what a document says."""
        return cls(**document)

    def document(self) -> dict[str, Any]:
        """Return it as ranks tell each other."""
        return {name: getattr(self, name) for name in ("stretch", "share", "max_overhead", "rank", "changes")}


@dataclass(slots=True, kw_only=True)
class DecimationChange:
    """One change of the stretch. `stretch` takes it over and returns what held before; None where it means nothing."""

    need: DecimationRequest
    step: int | None
    stretch: Callable[[DecimationRequest], int | None]

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        return self.step is None or self.step <= step

    def ready(self, active_quantities: ActiveQuantities) -> None:
        """Need no hooks."""

    def take(self, active_quantities: ActiveQuantities, step: int) -> list[Event]:
        """Stretch from this step on, which is measured or not as all later ones are."""
        before = self.stretch(self.need)
        if before is None or before == self.need.stretch:
            return []
        active_quantities.stretch(self.need.stretch)
        return [self._event(before, step)]

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        return {"stretch": self.need.stretch, "source": BUDGET}

    def _event(self, before: int, step: int) -> Event:
        need = self.need
        details = {
            "step": step,
            "agreed_step": self.step,
            "was": before,
            "now": need.stretch,
            "share": need.share,
            "max_overhead": need.max_overhead,
            "rank": need.rank,
        }
        severity = Severity.WARNING if need.stretch > before else Severity.INFO
        message = f"from step {step} on {sentence(need, before)}"
        return Event(type=EventType.BUDGET, severity=severity, message=message, details=json.dumps(details))


def sentence(need: DecimationRequest, before: int) -> str:
    """Return what is measured from now on, and why."""
    what = f"one in {need.stretch} of the chosen steps is measured" if need.stretch > 1 else "every chosen step is"
    allowed = f"max_overhead is {percent(need.max_overhead)}"
    share = f"measuring one in {before} costs {percent(need.share)} of the time of training" if before > 1 else ""
    share = share or f"measuring costs {percent(need.share)} of the time of training"
    return f"{what}: {share} on rank {need.rank}, {allowed}"


class ChangeRequester(Protocol):
    """How changes beside what is measured are asked for."""

    def aside(
        self, document: Mapping[str, Any], source: str, *, is_obsolete: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask for one."""
        ...

    def run_with_agreement(self, ask: Callable[[Agreement], None]) -> bool:
        """Ask the other ranks something; return whether there are any."""
        ...


class OverheadController:
    """One rank's part; without a `watch` it goes along with what others ask for. Called on the training thread."""

    def __init__(
        self,
        watch: OverheadWindow | None,
        asking: ChangeRequester,
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
        self._watch = watch
        self._asking = asking
        self._cost = cost
        self._period = period
        self._changes = changes
        self._rank = rank
        self._world_size = world_size
        self._say = say
        self._clock = clock
        self._asked_at = -1  # how many changes there were when this rank asked last
        self._counted_at = -1  # and when it counted itself among those that have room
        self._said_floor = False

    def make(self, document: Mapping[str, Any], step: int | None) -> DecimationChange:
        """Return the change that `document` means."""
        return DecimationChange(need=DecimationRequest.of(document), step=step, stretch=self._take)

    # Of every step.

    def step_begins(self, _step: int) -> list[Event]:
        """Look whether a window ends here; next to nothing at all other steps."""
        watch = self._watch
        if watch is not None and watch.may_end(self._period()):
            now = self._clock()
            judged = watch.look(now, self._cost()) if watch.may_judge(now) else None
            if judged is not None:
                self._act(judged)
        return []

    def switched(self, _step: int) -> list[Event]:
        """Begin anew, unstretched: what is measured now was never judged."""
        self._hold(1)
        return []

    def pause(self) -> None:
        """Leave out of judgement what was measured up to now."""
        if self._watch is not None:
            self._watch.restart()

    def shown(self) -> dict[str, Any]:
        """Return where it stands."""
        if self._watch is None:
            return {"stretch": self.stretch}
        return {"stretch": self.stretch, "max_overhead": self._watch.max_overhead, "overhead": self._watch.share}

    def _act(self, judged: Judged) -> None:
        has_room = judged.verdict is Verdict.ROOM
        if self._counted_at == self._changes() and not has_room:
            self._count(-1)
        if judged.verdict is Verdict.OVER and self._asked_at != self._changes():
            self._asked_at = self._changes()
            self._ask(judged)
        elif has_room and self._counted_at != self._changes():
            self._count(+1, judged)
        elif judged.share > self._over and self.stretch == MOST_STRETCH:
            self._say_floor(judged.share)

    def _count(self, amount: int, judged: Judged | None = None) -> None:
        """Count this rank among those that have room, or no more; the last of them asks."""
        changes = self._changes()
        self._counted_at = changes if amount > 0 else -1

        def count(agreement: Agreement) -> None:
            if agreement.count(f"room/{changes}", amount) >= self._world_size and judged is not None:
                self._ask(judged)

        if not self._asking.run_with_agreement(count) and judged is not None:
            self._ask(judged)

    def _ask(self, judged: Judged) -> None:
        changes, allowed = self._changes(), self._over
        need = DecimationRequest(
            stretch=judged.wanted, share=judged.share, max_overhead=allowed, rank=self._rank, changes=changes
        )
        self._asking.aside(need.document(), BUDGET, is_obsolete=lambda: self._changes() != changes)

    @property
    def _over(self) -> float:
        return 1.0 if self._watch is None else self._watch.max_overhead

    def _say_floor(self, share: float) -> None:
        if not self._said_floor:
            self._said_floor = True
            self._say(
                f"at one in {MOST_STRETCH} of the chosen steps the monitor still costs {percent(share)} of the time "
                f"of training, above max_overhead = {percent(self._over)}: what is left does not come from measuring"
            )

    # When a change takes place.

    def _take(self, need: DecimationRequest) -> int | None:
        """Hold the stretch that `need` names, and return the one before; None where something changed meanwhile."""
        if need.changes != self._changes() - 1:  # the change itself is counted already
            return None
        before = self.stretch
        self._hold(need.stretch)
        if need.rank == self._rank and need.stretch != before:
            self._say(sentence(need, before))
        return before

    def _hold(self, stretch: int) -> None:
        self.stretch = stretch
        if self._watch is not None:
            self._watch.restart(stretch)
