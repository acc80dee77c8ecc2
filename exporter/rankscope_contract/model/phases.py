"""What the time of a step is divided into, and the names under which it is published.

Phases exclude each other: together they are the whole time. A script may announce others by names of its own.
"""

from __future__ import annotations

import enum
from typing import Final


class Phase(enum.StrEnum):
    """The phases that Rankscope itself tells apart."""

    DATA_WAIT = "data_wait"  # nothing of the last step is left to do, and the next forward has not begun
    FORWARD = "forward"
    BACKWARD = "backward"  # with a loss that is computed outside of the model
    COLLECTIVE = "collective"  # waiting for reductions, where that can be told from computing
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    FIRST_STEP = "first_step"  # all of the process up to the end of its first step: warm-up, compilation
    MONITOR = "monitor"  # Rankscope itself, reading what it measures
    OTHER = "other"  # of a step, and none of these


WITHIN_A_STEP: Final = frozenset(
    {Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD, Phase.COLLECTIVE, Phase.OPTIMIZER, Phase.OTHER, Phase.MONITOR}
)
"""Phases of the work on a step. Announcing one of them says what was only concluded, and is no event."""

COMPUTING: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER})
"""What a rank does before it meets the others."""

LABEL: Final = "phase"

STEP_PHASE_SECONDS: Final = "step_phase_seconds"
PHASE_SECONDS: Final = "phase_seconds"
PRE_COLLECTIVE_SECONDS: Final = "pre_collective_seconds"
PRE_COLLECTIVE_TOTAL: Final = "pre_collective_seconds_total"
"""Names of the scalars; the second and the last are totals since the process attached."""
