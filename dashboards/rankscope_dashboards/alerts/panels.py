"""The panels that messages about alerts link to. This is the only table of boards and panel titles for alerts.

The ids of the panels are read from the board files by title, so that a panel that does not exist is an error when the
files are generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel, identified by the uid of its board and by its title."""

    board: str
    title: str


_RUN: Final = "rankscope-run-overview"
_RANKS: Final = "rankscope-ranks"
_INCIDENTS: Final = "rankscope-incidents"
_PIPELINE: Final = "rankscope-pipeline"

STATE: Final = Panel(_RUN, "State")
RANKS_UP: Final = Panel(_RUN, "Ranks up")
LOST_DATA: Final = Panel(_PIPELINE, "Lost data")
ANOMALIES: Final = Panel(_INCIDENTS, "Anomalies")
REPLICAS: Final = Panel(_RANKS, "Replica divergence")
LAST_COMMIT: Final = Panel(_PIPELINE, "Since last commit")
GPU_ERRORS: Final = Panel(_RANKS, "GPU errors")
THROTTLED_GPUS: Final = Panel(_RANKS, "Throttled GPUs")
