"""Find ranks that make the others wait, from the seconds of each phase of each step of each rank.

A rank waits for the others in collectives. Its own time is all other time: input, computation and pauses. Where waits
cannot be separated from computation, for example with FSDP, only input and pauses are own time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.phases import COMPUTING, Phase

Floats = npt.NDArray[np.float64]

SLOW: Final = 0.15
"""Least share of the time of a step that the others wait for a slow rank. Ranks that share cores often reach 0.1."""

_MOST_STEPS: Final = 0.8
_FEWEST_PAUSES: Final = 3
_FEWEST_STEPS: Final = 40
_LARGER: Final = 4.0
_PAUSE_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that makes the others wait, as means of the steps that were compared. `row` is its place in the array."""

    row: int
    seconds: float
    """Seconds of a step by which its own time exceeds that of the others, which wait for as long."""
    share: float
    """`seconds` divided by the time of a step."""
    phase: str
    """The phase that takes the largest part of the time."""
    steps: int
    """Number of steps that were compared."""
    pauses: int
    """Number of steps with a pause of at least half a step; 0 for a rank that is slow in most steps."""
    since: int | None = None
    """The step since which the rank is slow; None if it pauses, or is slow in all steps that are known."""

    @property
    def words(self) -> str:
        """Return the share of the others' wait and the phase as a text."""
        slow = f"pauses in {self.pauses} of {self.steps} steps, in" if self.pauses else "is slow in"
        wait = f"the others wait {self.seconds:.3g} s a step, {100 * self.share:.0f} % of the time"
        since = "" if self.since is None else f", since step {self.since:,}"
        return f"{slow} {self.phase.replace('_', ' ')}: {wait}{since}"


def own_phases(seconds: Floats, phases: Sequence[str]) -> list[int]:
    """Return the places of the phases in which a rank does not wait for others."""
    waits = [place for place, phase in enumerate(phases) if phase == Phase.COLLECTIVE]
    has_waits = bool(np.nansum(seconds[:, :, waits]) > 0)
    others = {Phase.COLLECTIVE, Phase.FIRST_STEP} | (set() if has_waits else COMPUTING)
    return [place for place, phase in enumerate(phases) if phase not in others]


def own_seconds(seconds: Floats, phases: Sequence[str]) -> Floats:
    """Return the own time [ranks, steps] in `seconds` [ranks, steps, phases]. A missing step is NaN."""
    own: Floats = seconds[:, :, own_phases(seconds, phases)].sum(axis=2)
    return own


def of_others(values: Floats) -> Floats:
    """Return the median of the other ranks along the first axis; the median of all ranks if there are more than two."""
    if len(values) == 2:
        return values[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no rank has
        return np.broadcast_to(np.nanmedian(values, axis=0), values.shape)


def find_slow_ranks(
    seconds: Floats, phases: Sequence[str], numbers: Sequence[int], *, steps: int = 20
) -> list[SlowRank]:
    """Return the slow ranks in `seconds` [ranks, steps, phases], the slowest first. A missing step is NaN.

    A rank is slow if the others wait for it for the share SLOW of the step, in four fifths of the newest `steps` and in
    their sum; or if it alone has pauses of half a step or more that take this share of all steps, and come and go.
    `numbers` are the numbers of the steps.
    """
    if len(seconds) < 2 or not seconds.shape[1]:
        return []
    own, whole = own_seconds(seconds, phases), np.nansum(seconds, axis=2)
    late, places = own - of_others(own), own_phases(seconds, phases)
    # Collectives of a forward pass, such as those of buffers or shards, are not timed apart: others wait in it for a
    # rank that is late with its data, and their longer computation hides its time.
    data = seconds[:, :, [place for place, phase in enumerate(phases) if phase == Phase.DATA_WAIT]].sum(axis=2)
    later = data - of_others(data)
    late = np.where(late - later <= -0.5 * later, np.maximum(late, later), late)
    is_pause = late > _PAUSE_SHARE * np.nanmedian(np.where(np.isfinite(late), whole, np.nan))
    paused, found = np.where(is_pause, late, 0.0).sum(axis=1), []
    for row in range(len(own)):
        known, pauses = (np.flatnonzero(flags) for flags in (np.isfinite(late[row]), is_pause[row]))
        chosen = known[-steps:]
        is_late = late[row, chosen] >= SLOW * whole[row, chosen]
        if len(chosen) == steps and np.mean(is_late) >= _MOST_STEPS:
            pauses = pauses[:0]
        elif (
            len(known) >= max(2 * steps, _FEWEST_STEPS)
            # Pauses come and go: a stretch of slow steps, after which the cause is gone, is none.
            and np.sum(np.diff(pauses, prepend=-2) > 1) >= max(_FEWEST_PAUSES, len(pauses) / 2)
            and not is_late[-_FEWEST_PAUSES:].all()
            and paused[row] > _LARGER * np.delete(paused, row).max()
        ):
            # After a longer time without a pause than between two of them, the cause is gone.
            chosen = known if known[-1] - pauses[-1] <= 2 * np.diff(pauses).max() else known[:0]
        else:
            continue
        waited, spent = late[row, chosen].sum(), whole[row, chosen].sum()
        if not waited >= SLOW * spent > 0:
            continue
        mine, usual = (one[row, chosen].mean(axis=0) for one in (seconds, of_others(seconds)))
        found.append(
            SlowRank(
                row=row,
                seconds=float(waited / len(chosen)),
                share=float(waited / spent),
                phase=phases[places[int(np.argmax((mine - usual)[places]))]],
                steps=len(chosen),
                pauses=len(pauses),
                since=None if len(pauses) else _slow_since(late[row, known], known, numbers, len(chosen)),
            )
        )
    return sorted(found, key=lambda one: -one.share)


def _slow_since(late: Floats, known: npt.NDArray[np.intp], numbers: Sequence[int], newest: int) -> int | None:
    """Return the step since which a rank is late by more than half of its present time; None if in all."""
    is_usual = ~(late > float(np.median(late[-newest:])) / 2)
    usual = np.flatnonzero(is_usual[:-1] & is_usual[1:])  # one step alone may be chance
    return int(numbers[known[min(int(usual[-1]) + 2, len(known) - 1)]]) if len(usual) else None
