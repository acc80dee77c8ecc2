"""The list of runs: which are in trouble, which run, how far they are, and whether the loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_view.data.runs import ENDED, INCIDENTS, PAGE_RUNS, STOPPING, RunList, RunRow
from rankscope_view.pages.format import duration, percent
from rankscope_view.pages.rendering import Place, render

_ORDER: Final = (
    *(RunState.RUNNING, RunState.STALLED, STOPPING, RunState.PENDING, RunState.FAILED, RunState.STOPPED),
    *(RunState.COMPLETED, "unknown"),
)
_COLUMNS: Final = (
    ("run", "Run", ""),
    ("state", "State", ""),
    ("progress", "Progress", ""),
    ("loss", "Loss", "loss"),
    ("", "Learning rate", "n wide"),
    ("", "Speed", "n wide"),
    ("", "Open incident, or reason of the state", ""),
    ("seen", "Seen", "n"),
)
SPEED_UNITS: Final = {
    "tokens_per_second": "tok/s",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
    "step_seconds": "s/step",
}
_MOVING: Final = frozenset({RunState.RUNNING, STOPPING})
"""States in which a run makes steps, so that the time that is left has a meaning."""

_STILL: Final = frozenset({RunState.PENDING, RunState.STALLED, RunState.FAILED, RunState.STOPPED})
"""States of a run without a speed. The speed of a completed run is its last one."""


def page(place: Place, found: RunList, search: str, now: float, alarms: Sequence[str] = ()) -> str:
    """Return the list of runs. `search` is the text of the search field; `alarms` are problems of the service."""
    query = found.query
    return render(
        "runs.html",
        place=place,
        found=found,
        search=search,
        words=" ".join(part for part in search.split() if not part.startswith("state:")) or None,
        now=now,
        alarms=alarms,
        active=sum(number for state, number in found.states.items() if state not in ENDED and state != "unknown"),
        pages=-(-found.selected // PAGE_RUNS),
        sort=("-" if query.is_descending else "") + query.sort,
        address=lambda **changes: place.url(q=search or None, state=query.state, **changes),
        has_speed=_has_speed,
        time_of=_time,
        columns=_COLUMNS,
        incidents=INCIDENTS,
        moving=_MOVING,
        order=_ORDER,
        units=SPEED_UNITS,
    )


def _has_speed(row: RunRow) -> bool:
    return row.speed is not None and row.speed_name is not None and row.state not in _STILL


def _time(row: RunRow) -> str:
    """Return the time that is left or that the run took; of other runs, the share of the steps that are done."""
    if row.eta_seconds is not None and row.state in _MOVING:
        return f"{duration(row.eta_seconds)} left"
    if row.ended_at is not None and row.started_at is not None and row.state == RunState.COMPLETED:
        return f"in {duration(max(0.0, row.ended_at - row.started_at))}"
    return "" if row.share is None else percent(row.share)
