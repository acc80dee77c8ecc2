"""The kinds of tensor quantities, the statistics taken of them, and their causal order within a step.

A `kind` names the quantity *and* its stage, so that two numbers with one kind are always comparable.
"""

from __future__ import annotations

import enum
from typing import Final


class Kind(enum.StrEnum):
    """What was measured, and at which moment of the step."""

    PARAM_BEFORE = "param_before"  # just before the optimizer's update
    PARAM_AFTER = "param_after"  # just after it
    GRAD_UNREDUCED = "grad_unreduced"  # this rank's own gradient, before any communication
    GRAD_REDUCED = "grad_reduced"  # after the reduction over ranks, before clipping
    GRAD_CLIPPED = "grad_clipped"  # what the optimizer saw, where that differs from the reduced gradient
    EXP_AVG = "exp_avg"  # Adam's first moment, after the step
    EXP_AVG_SQ = "exp_avg_sq"  # Adam's second moment, after the step
    MOMENTUM = "momentum"  # SGD's momentum buffer, after the step
    ACT_IN = "act_in"
    ACT_OUT = "act_out"
    ACT_GRAD_IN = "act_grad_in"
    ACT_GRAD_OUT = "act_grad_out"
    COMM_IN = "comm_in"
    COMM_OUT = "comm_out"


CAUSAL_STAGE: Final[dict[str, int]] = {
    Kind.PARAM_BEFORE: 0,
    Kind.ACT_IN: 1,
    Kind.ACT_OUT: 1,
    Kind.ACT_GRAD_IN: 2,
    Kind.ACT_GRAD_OUT: 2,
    Kind.GRAD_UNREDUCED: 3,
    Kind.COMM_IN: 4,
    Kind.COMM_OUT: 5,
    Kind.GRAD_REDUCED: 6,
    Kind.GRAD_CLIPPED: 7,
    Kind.EXP_AVG: 8,
    Kind.EXP_AVG_SQ: 8,
    Kind.MOMENTUM: 8,
    Kind.PARAM_AFTER: 9,
}
"""Position of a kind in the flow of one step: a fault shows first where the number is lowest."""

SCALAR_STAGE: Final = 5.5
"""Scalars such as the gradient norm summarise what the tensors of the step already were."""

GRADIENT_KINDS: Final = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED)

VALUE_OPS: Final = ("norm", "min", "max", "mean")
"""Float statistics, float32, over *finite* elements; null when a tensor has none."""

BASELINE_OPS: Final = ("norm_baseline", "mean_baseline")
"""The baseline a rule compared `norm` and `mean` with, float32; null before the first finite observation."""

COUNT_OPS: Final = ("nans", "infs", "zeros", "numel")
"""Element counts, int64, over *all* elements."""

JUDGED_OPS: Final = ("norm", "mean")
"""Statistics that keep a baseline."""
