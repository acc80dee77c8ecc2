"""The state of a run as a number, because panels show numbers, and the names and colours of the states."""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_dashboards.boards.elements.panels import value_texts
from rankscope_dashboards.boards.elements.selectors import OF_JOB, at_end
from rankscope_storage.base import service_catalogue

_COLOURS: Final = {
    RunState.PENDING: "yellow",
    RunState.RUNNING: "green",
    RunState.STALLED: "orange",
    RunState.COMPLETED: "blue",
    RunState.STOPPED: "text",
    RunState.FAILED: "red",
}

STATE_TEXTS: Final = value_texts(
    {str(position): (state.value, colour) for position, (state, colour) in enumerate(_COLOURS.items())}
)
"""Value mapping of the numbers that `state_number` returns."""


def state_number(run: str, window: str = "") -> str:
    """Return PromQL for the position of the state of each run that the matcher `run` selects, live or from the store.

    With a `window`, such as `[$__range]`, it is the last state within this time.
    """
    return " or ".join(
        f"max by (run) ({at_end(service_catalogue.RUN_STATE, selected, window)} == 1) * {position}"
        for job in ("", f"{OF_JOB}, ")
        for position, state in enumerate(_COLOURS)
        for selected in (f'{{{job}{run}, state="{state}"}}',)
    )
