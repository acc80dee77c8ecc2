"""Alerts on the GPUs under the ranks: what the driver calls an error, and what slows a board down for longer."""

from __future__ import annotations

from typing import Final

from rankscope_contract import hardware_metrics
from rankscope_contract.events import Severity
from rankscope_dashboards.alerts import Alert

WINDOW: Final = "10m"
"""How long an error stays an alert."""

THROTTLED_FOR: Final = "5m"
BAD_REASONS: Final = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")
"""Reasons that full load at the power limit does not have."""

_BY: Final = "sum by (run, rank, gpu)"
_NAMED: Final = "GPU {{ $labels.gpu }} of run {{ $labels.run }} rank {{ $labels.rank }}"


def hardware_alerts() -> tuple[Alert, ...]:
    """Return the alerts, the most urgent first."""
    return (_xid(), _uncorrected(), _throttled())


def _xid() -> Alert:
    return Alert(
        name="GpuXid",
        expression=_new(hardware_metrics.GPU_XID_ERRORS.name),
        summary=f"the driver reports a critical error of {_NAMED}",
        description="An XID: the event `xid` of the run has its number and what it means.",
        severity=Severity.CRITICAL,
        runbook="GpuXid",
        panel="GPU errors",
    )


def _uncorrected() -> Alert:
    return Alert(
        name="GpuEccUncorrected",
        expression=_new(f'{hardware_metrics.GPU_ECC_ERRORS.name}{{type="uncorrected"}}'),
        summary=f"memory of {_NAMED} had an error that could not be corrected",
        description="A number that training uses may be wrong, or the process that had it was killed by the driver.",
        severity=Severity.CRITICAL,
        runbook="GpuEccUncorrected",
        panel="GPU errors",
    )


def _throttled() -> Alert:
    series = f'{hardware_metrics.GPU_THROTTLED.name}{{reason=~"{"|".join(BAD_REASONS)}"}}'
    return Alert(
        name="GpuThrottled",
        expression=f"max by (run, rank, gpu) ({series}) == 1",
        summary=f"{_NAMED} is held below its clocks",
        description="By heat or by its power supply, for minutes; one slow rank slows all of them.",
        severity=Severity.WARNING,
        runbook="GpuThrottled",
        hold_for=THROTTLED_FOR,
        panel="Throttled GPUs",
    )


def _new(counter: str) -> str:
    """Return what is true while a counter has risen; a board's own may be above zero when a run begins with it."""
    return f"{_BY} (increase({counter}[{WINDOW}])) > 0"
