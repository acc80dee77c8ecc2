"""Alerts on the GPUs of the ranks: errors that the driver reports, and clocks that are reduced for minutes."""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import hardware
from rankscope_contract.model.events import Severity
from rankscope_dashboards.alerts.alert import Alert

WINDOW: Final = "10m"
"""Time for which the alert is active after an error of a GPU."""

THROTTLED_FOR: Final = "5m"
BAD_REASONS: Final = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")
"""Throttling reasons that do not occur under normal full load at the power limit of a GPU."""

_BY: Final = "sum by (run, rank, gpu)"
_GPU_TEXT: Final = "GPU {{ $labels.gpu }} of run {{ $labels.run }} rank {{ $labels.rank }}"


def hardware_alerts() -> tuple[Alert, ...]:
    """Return the GPU alerts, most urgent first."""
    return (_xid(), _uncorrected(), _throttled())


def _xid() -> Alert:
    return Alert(
        name="GpuXid",
        expression=_new(hardware.GPU_XID_ERRORS.name),
        summary=f"critical driver error (XID) on {_GPU_TEXT}",
        description="The event of type `xid` in the store contains the XID number and its meaning.",
        severity=Severity.CRITICAL,
        runbook="GpuXid",
        panel="GPU errors",
    )


def _uncorrected() -> Alert:
    return Alert(
        name="GpuEccUncorrected",
        expression=_new(f'{hardware.GPU_ECC_ERRORS.name}{{type="uncorrected"}}'),
        summary=f"uncorrectable memory error on {_GPU_TEXT}",
        description="A value that training uses may be wrong, or the driver killed the process that used the memory.",
        severity=Severity.CRITICAL,
        runbook="GpuEccUncorrected",
        panel="GPU errors",
    )


def _throttled() -> Alert:
    series = f'{hardware.GPU_THROTTLED.name}{{reason=~"{"|".join(BAD_REASONS)}"}}'
    return Alert(
        name="GpuThrottled",
        expression=f"max by (run, rank, gpu) ({series}) == 1",
        summary=f"{_GPU_TEXT} is throttled by heat or power supply",
        description=f"The clocks have been reduced for {THROTTLED_FOR}. One slow rank delays all other ranks.",
        severity=Severity.WARNING,
        runbook="GpuThrottled",
        hold_for=THROTTLED_FOR,
        panel="Throttled GPUs",
    )


def _new(counter: str) -> str:
    """Return PromQL that holds while `counter` has increased within WINDOW.

    The first sample does not count as an increase: the driver's counter can be above zero before a run starts.
    """
    return f"{_BY} (increase({counter}[{WINDOW}])) > 0"
