"""Metrics of what the time of a step, and of a whole run, was spent on."""

from __future__ import annotations

from rankscope_contract.metrics.spec import MetricSpec, counter, gauge
from rankscope_contract.model import phases

PHASE_SECONDS = counter(
    "rankscope_phase_seconds_total",
    "Time spent in a phase since the rank attached; over all phases it grows by a second each second of training.",
    phases.LABEL,
    unit="seconds",
    stored_as=f"scalars:{phases.PHASE_SECONDS}",
)
STEP_PHASE_SECONDS = gauge(
    "rankscope_step_phase_seconds",
    "What the latest step whose end is known was made of.",
    phases.LABEL,
    unit="seconds",
    stored_as=f"scalars:{phases.STEP_PHASE_SECONDS}",
)
PRE_COLLECTIVE_SECONDS = gauge(
    "rankscope_pre_collective_seconds",
    "Computing in the latest step until the rank met the others: long on the slow one. Absent where it cannot be told.",
    unit="seconds",
    stored_as=f"scalars:{phases.PRE_COLLECTIVE_SECONDS}",
)
PRE_COLLECTIVE_TOTAL = counter(
    "rankscope_pre_collective_seconds_total",
    "The same since the rank attached, without its first step.",
    unit="seconds",
    stored_as=f"scalars:{phases.PRE_COLLECTIVE_TOTAL}",
)
RUN_GOODPUT = MetricSpec(
    name="rankscope_run_goodput_ratio",
    type="gauge",
    help="Time in steps that count, of the time since the run first began, restarts and lost steps included.",
    labels=("run",),
    page="service",
)
