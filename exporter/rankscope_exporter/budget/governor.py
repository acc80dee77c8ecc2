"""Watches what the monitor costs, and has all ranks stretch or tighten sampling together.

A rank that is over its budget asks for it alone: the slowest need wins. Sampling is tightened when every rank has had
room for long: each counts itself in the store of the process group, and whoever is the last to do so asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rankscope_contract.events import Event
from rankscope_exporter.budget.share import percent
from rankscope_exporter.budget.stretching import BUDGET, Need, Stretching, sentence
from rankscope_exporter.budget.watch import MOST_STRETCH, Judged, OverheadWatch, Verdict
from rankscope_exporter.switching.agreement import Agreement


class Asking(Protocol):
    """How changes beside what is measured are asked for."""

    def aside(self, document: Mapping[str, Any], source: str, *, is_moot: Callable[[], bool] = lambda: False) -> None:
        """Ask for one."""
        ...

    def errand(self, ask: Callable[[Agreement], None]) -> bool:
        """Ask the other ranks something; return whether there are any."""
        ...


class Governor:
    """One rank's part; without a `watch` it goes along with what others ask for. Called on the training thread."""

    def __init__(
        self,
        watch: OverheadWatch | None,
        asking: Asking,
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

    def make(self, document: Mapping[str, Any], step: int | None) -> Stretching:
        """Return the change that `document` means."""
        return Stretching(need=Need.of(document), step=step, stretch=self._take)

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

        if not self._asking.errand(count) and judged is not None:
            self._ask(judged)

    def _ask(self, judged: Judged) -> None:
        changes, allowed = self._changes(), self._over
        need = Need(stretch=judged.wanted, share=judged.share, max_overhead=allowed, rank=self._rank, changes=changes)
        self._asking.aside(need.document(), BUDGET, is_moot=lambda: self._changes() != changes)

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

    def _take(self, need: Need) -> int | None:
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
