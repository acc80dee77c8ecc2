"""Data of a step before its publication, and the scalars that the script logged for it.

A logged tensor is copied without waiting for the device. The publisher thread reads the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.scalar_names import logged_name
from rankscope_exporter.base.tracing import untransformed
from rankscope_exporter.records.host_transfer import Deferred, Row, Transfer
from rankscope_exporter.records.plan_version import PlanVersion
from rankscope_exporter.records.step_record import Scalar
from rankscope_exporter.statistics import HostCopy

_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

UNITS: Final[dict[str, str]] = {
    "tokens": "tokens",
    "samples": "samples",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "step_seconds": "seconds",
}
LABEL_OF_GROUP: Final[dict[str, str]] = {"loss": "loss", "learning_rate": "group"}
"""Name of the label of the numbers in a logged mapping, by the name under which the script logs the mapping.

A logged mapping gives one number per key, and the key is the value of the label. If a name is
not a key of LABEL_OF_GROUP, the label is `key`.
"""


@dataclass(slots=True)
class Pending:
    """One logged number: a float, or a tensor that is being copied to the host."""

    name: str
    value: float | Transfer
    labels: Mapping[str, str] = field(default_factory=dict)

    def scalar(self) -> Scalar:
        """Return the number as a scalar of the record.

        Waits until a tensor is copied; do not call it on the training thread.
        """
        value = self.value.wait() if isinstance(self.value, Transfer) else self.value
        return Scalar(self.name, float(value), UNITS.get(self.name), self.labels)


def take(name: str, value: Any) -> Iterator[Pending]:
    """Yield the numbers of a call `log(name=value)`: one number, or one per key of a mapping.

    Other names of losses, such as `val/loss`, are replaced. Yield nothing if the value is None. Raises TypeError if the
    value is not a number, ValueError for a tensor with several elements.
    """
    if value is None:
        return
    stored, labels = logged_name(name)
    if isinstance(value, Mapping):
        label = LABEL_OF_GROUP.get(stored, "key")
        for key, item in value.items():
            for pending in take(name, item):
                yield Pending(stored, pending.value, {**pending.labels, label: str(key)})
    else:
        number = _copied(name, value) if isinstance(value, torch.Tensor) else float(value)
        yield Pending(stored, number, labels)


def _copied(name: str, value: torch.Tensor) -> Transfer:
    value = _without_mesh(name, untransformed(value).detach())
    if value.numel() != 1:
        raise ValueError(f"log({name}=…) takes one number, not a tensor of shape {tuple(value.shape)}")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"log({name}=…) must be a real number, not a tensor of {value.dtype} on device {value.device}")
    return Transfer.of(value.reshape(()))


def _without_mesh(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor that is replicated on every rank; any other tensor unchanged.

    Raises ValueError for other DTensors.

    Reading a DTensor that is divided among ranks is a collective. On the monitor's thread, it would pair with a
    collective of the training.
    """
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(f"log({name}=…) takes no DTensor that is divided among ranks: log its .full_tensor()")
    local: torch.Tensor = value.to_local()  # type: ignore[attr-defined]  # a DTensor: it has placements
    return local


AMOUNTS = ("tokens", "samples")
"""Names of logged numbers that are amounts per step.

Their rate per second and their running total are published as well.
"""


OF_MICRO_BATCHES: Final = "grad_unreduced of micro-batches"
"""Name of the rows of `grad_unreduced` with a number of a micro-batch, as a kind of expected rows."""


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The kinds of rows of a quantity that a step with an update has, unless something is wrong.

    Kinds that are absent by definition are left out.
    """

    quantity: str
    kinds: frozenset[str] = frozenset()
    remark: str = ""
    """The likely reason if rows are absent, as text."""
    names_unmeasured: bool = False
    """True if the quantity itself names the tensors that it has never measured."""


def now_microseconds() -> int:
    """Return the current UTC time in microseconds since the epoch."""
    return time.time_ns() // 1000


def monotonic_microseconds() -> int:
    """Return the current time in microseconds of a clock that is never set and that also runs while the host sleeps."""
    return time.clock_gettime_ns(_STEADY_CLOCK) // 1000


@dataclass(slots=True)
class PendingStep:
    """Data of one step, or of a point in time between steps, before its publication."""

    step: int | None
    ts: int  # UTC microseconds
    ended_at: float | None = None  # monotonic clock; None if not known yet
    sampled: bool = False
    copy: HostCopy | None = None
    plan: PlanVersion | None = None  # the plan of `copy`
    pending: list[Pending] = field(default_factory=list)
    learning_rates: list[Pending] = field(default_factory=list)
    found_inf: list[Pending] = field(default_factory=list)
    later: list[Callable[[], Iterable[Scalar]]] = field(
        default_factory=list
    )  # scalars computed on the publisher thread
    is_skipped: bool | None = None  # whether the step has gradients and no update; None without the end of a step
    skip_is_certain: bool = False  # the script has ended the step
    events: list[Event] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)  # rows of other datasets, by name
    expected: Sequence[ExpectedRows] = ()  # empty for a step without an update
    call_order: list[int] = field(
        default_factory=list
    )  # by parameter: position of its gradient in the order of arrival, -1 if it did not arrive
    monotonic: int = field(default_factory=monotonic_microseconds)  # at the time `ts`, microseconds


def skipped_event() -> Event:
    """Return the event of a step in which the optimizer did not update the parameters."""
    return Event(
        type=EventType.STEP_SKIPPED,
        severity=Severity.INFO,
        message="gradients were computed, but the optimizer did not run",
    )


def amounts_of(pending: Iterable[Pending]) -> dict[str, float]:
    """Return the sum of each logged amount by name.

    An amount that was logged as a tensor is left out, because its value is not known yet.
    """
    amounts: dict[str, float] = {}
    for item in pending:
        if item.name in AMOUNTS and not isinstance(item.value, Transfer):
            amounts[item.name] = amounts.get(item.name, 0.0) + item.value
    return amounts


def timing(seconds: float, amounts: Mapping[str, float]) -> list[Pending]:
    """Return the duration of a step in seconds, and the rates per second of its logged amounts."""
    rates = [Pending(f"{name}_per_second", amount / seconds) for name, amount in amounts.items() if seconds > 0]
    return [Pending("step_seconds", seconds), *rates]
