"""Phases of training time, and the names under which they are published.

Phases do not overlap, and together they cover the whole time of a run. A script may announce further phases by name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Phase(enum.StrEnum):
    """The phases that Rankscope distinguishes."""

    DATA_WAIT = "data_wait"  # the previous step is complete and the next forward pass has not begun
    FORWARD = "forward"
    BACKWARD = "backward"  # includes a loss that is computed outside of the model
    COLLECTIVE = "collective"  # waiting for reductions, if this can be distinguished from computation
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    FIRST_STEP = "first_step"  # process start to end of the first step: warm-up, compilation
    MONITOR = "monitor"  # Rankscope measures tensors
    OTHER = "other"  # part of a step, but none of these phases


WITHIN_A_STEP: Final = frozenset(
    {Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD, Phase.COLLECTIVE, Phase.OPTIMIZER, Phase.OTHER, Phase.MONITOR}
)
"""Phases that are part of the work on a step.

If a script announces such a phase, the announcement only corrects the phase that the monitor inferred; no event is
written.
"""

COMPUTING: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER})
"""Phases in which a rank computes before it waits for other ranks."""

LABEL: Final = "phase"
_LEAST_PERCENT: Final = 0.05

STEP_PHASE_SECONDS: Final = "step_phase_seconds"
PHASE_SECONDS: Final = "phase_seconds"
PRE_COLLECTIVE_SECONDS: Final = "pre_collective_seconds"
PRE_COLLECTIVE_TOTAL: Final = "pre_collective_seconds_total"
"""Names of the scalars that contain the seconds of phases.

`PHASE_SECONDS` and `PRE_COLLECTIVE_TOTAL` are totals since the monitor was attached. `STEP_PHASE_SECONDS` and
`PRE_COLLECTIVE_SECONDS` are durations in one step.
"""


def shares_text(seconds: Mapping[str, float]) -> str:
    """Return the share of each phase of at least 0.05 %, the largest first: `data wait 33.6 %, forward 30.1 %`."""
    whole = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    shares = [(phase.replace("_", " "), 100 * part / whole) for phase, part in ordered if whole > 0]
    return ", ".join(f"{phase} {share:.1f} %" for phase, share in shares if share >= _LEAST_PERCENT)
