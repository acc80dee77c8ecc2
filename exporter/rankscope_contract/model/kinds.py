"""Kinds of tensor quantities, their causal order within a step, and the ops (statistics) of a tensor.

A `kind` names a quantity and the stage of the step at which it is measured. Values of one kind are comparable.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal


class Kind(enum.StrEnum):
    """A quantity of tensors, and the stage of the step at which it is measured."""

    PARAM_BEFORE = "param_before"  # just before the optimizer's update
    PARAM_AFTER = "param_after"  # just after it
    GRAD_UNREDUCED = "grad_unreduced"  # this rank's own gradient, before any communication
    GRAD_REDUCED = "grad_reduced"  # after the reduction over ranks, before clipping
    GRAD_CLIPPED = "grad_clipped"  # the optimizer's input, if it differs from the reduced gradient
    EXP_AVG = "exp_avg"  # Adam's first moment, after the step
    EXP_AVG_SQ = "exp_avg_sq"  # Adam's second moment, after the step
    MOMENTUM = "momentum"  # SGD's momentum buffer, after the step
    ACT_IN = "act_in"
    ACT_OUT = "act_out"
    ACT_GRAD_IN = "act_grad_in"
    ACT_GRAD_OUT = "act_grad_out"
    COMM_IN = "comm_in"
    COMM_OUT = "comm_out"


_STAGES: Final = (
    *((Kind.PARAM_BEFORE,), (Kind.ACT_IN, Kind.ACT_OUT), (Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT)),
    *((Kind.GRAD_UNREDUCED,), (Kind.COMM_IN,), (Kind.COMM_OUT,), (Kind.GRAD_REDUCED,), (Kind.GRAD_CLIPPED,)),
    *((Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MOMENTUM), (Kind.PARAM_AFTER,)),
)
CAUSAL_STAGE: Final[dict[str, int]] = {kind: stage for stage, kinds in enumerate(_STAGES) for kind in kinds}
"""Position of each kind in the causal order of a step. A fault appears first at the kind with the lowest position."""

SCALAR_STAGE: Final = 6.5
"""Position of scalars in the causal order of a step.

Scalars, such as the gradient norm, summarise the tensors of the same step: the reduced gradients before clipping.
"""

LOSS_STAGE: Final = 1.5
"""Position of the loss in the causal order of a step: after the forward pass, before the backward pass."""

EVALUATION_STAGE: Final = 10
"""Position of the results of an evaluation in the causal order of a step: they follow from the updated parameters."""

GRADIENT_KINDS: Final = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One statistic of a tensor.

    The column of the statistic in `tensor_stats`, its rollups, documentation, dashboards and wire format are derived
    from this object. `accumulators` names the sums and counts that one pass over the elements computes. `finish`
    computes the statistic from these sums and counts and uses operators only. Its argument has a numpy array for each
    accumulator and for `finite`, the number of finite elements.
    """

    name: str
    doc: str
    dtype: Literal["float32", "int64"] = "float32"
    accumulators: tuple[str, ...]
    finish: Callable[[Mapping[str, Any]], Any]
    has_baseline: bool = False
    is_default: bool = True

    @property
    def rollup(self) -> Literal["summary", "total"]:
        """Return how rows of this op are rolled up: min, max, mean and counts of a float, or the sum of a count."""
        return "summary" if self.dtype == "float32" else "total"


def _count(name: str, doc: str) -> Op:
    return Op(name=name, doc=doc, dtype="int64", accumulators=(name,), finish=lambda sums: sums[name])


_OPS: Final = (
    Op(
        name="norm",
        doc="Square root of the sum of squares.",
        accumulators=("sum_of_squares",),
        finish=lambda sums: sums["sum_of_squares"] ** 0.5,
        has_baseline=True,
    ),
    Op(name="min", doc="Minimum.", accumulators=("min",), finish=lambda sums: sums["min"]),
    Op(name="max", doc="Maximum.", accumulators=("max",), finish=lambda sums: sums["max"]),
    Op(
        name="mean",
        doc="Arithmetic mean.",
        accumulators=("sum",),
        finish=lambda sums: sums["sum"] / sums["finite"],
        has_baseline=True,
    ),
    Op(
        name="rms",
        doc="Root mean square.",
        accumulators=("sum_of_squares",),
        finish=lambda sums: (sums["sum_of_squares"] / sums["finite"]) ** 0.5,
        is_default=False,
    ),
    Op(
        name="kurtosis",
        doc="Kurtosis about zero, mean(x⁴) / mean(x²)²: 3 for a normal distribution with mean 0, higher with outliers.",
        accumulators=("sum_of_fourth_powers", "sum_of_squares"),
        finish=lambda sums: (
            sums["sum_of_fourth_powers"] / sums["sum_of_squares"] / sums["sum_of_squares"] * sums["finite"]
        ),
        is_default=False,
    ),
    _count("nans", "Number of NaN elements."),
    _count("infs", "Number of infinite elements."),
    _count("zeros", "Number of elements that are 0, or below `zero_below` in magnitude."),
    _count("numel", "Number of elements."),
)
OPS: Final[dict[str, Op]] = {op.name: op for op in _OPS}
"""Every op by name. To add an op, add a value to `_OPS`, and a sum that no other op needs to `SUMMANDS`."""


def _fourth_power(x: float) -> float:  # Triton compiles it, and knows the annotation float only
    return (x * x) * (x * x)


SUMMANDS: Final[dict[str, Callable[[Any], Any]]] = {"sum_of_fourth_powers": _fourth_power}
"""The sums that only some ops need. Each has a function of one finite element, with arithmetic operators only.

Its value for 0 is 0. torch operations and Triton use this function. `kernel.c` has its own one, with the name of the
sum.
"""

VALUE_OPS: Final = tuple(op.name for op in OPS.values() if op.dtype == "float32")
"""Names of the statistics that are float32, computed over *finite* elements; null if a tensor has no finite element."""

COUNT_OPS: Final = tuple(op.name for op in OPS.values() if op.dtype == "int64")
"""Names of the statistics that count elements: int64, over *all* elements."""

DEFAULT_OPS: Final = tuple(op.name for op in OPS.values() if op.is_default)
"""Names of the ops that are published unless the configuration selects others."""

JUDGED_OPS: Final = tuple(op.name for op in OPS.values() if op.has_baseline)
"""Names of the statistics that have a baseline."""

BASELINE_OPS: Final = tuple(f"{name}_baseline" for name in JUDGED_OPS)
"""Columns with the baselines of tensor statistics, with which rules compared the statistics.

The columns are float32 and null before the first finite value.
"""
