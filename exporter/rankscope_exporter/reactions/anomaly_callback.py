"""Calls `on_anomaly` on a thread of its own: a script that takes its time holds up neither training nor records."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope_contract.model.events import Event, causal_key
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.process.threads import BackgroundWorker, limit_this_thread

log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Rules fired at a step of this rank. What is said of one firing is said of the first cause."""

    run: str
    rank: int
    step: int | None
    events: tuple[Event, ...]
    """All of them, the first cause first."""
    samples: tuple[Any, ...] = ()
    """What `monitor.batch` said of this step, one item for each batch."""

    @property
    def rule(self) -> str | None:
        """Return the name of the rule that fired."""
        return self.events[0].rule

    @property
    def kind(self) -> str | None:
        """Return the kind of the tensor; None for a logged number."""
        return self.events[0].kind

    @property
    def tensor(self) -> str | None:
        """Return the name of the tensor; None for a logged number."""
        return self.events[0].tensor

    @property
    def op(self) -> str | None:
        """Return the statistic, or the name of the logged number."""
        return self.events[0].op

    @property
    def value(self) -> float | None:
        """Return its value."""
        return self.events[0].value

    @property
    def message(self) -> str:
        """Return the sentence that the console has."""
        return self.events[0].message


OnAnomaly = Callable[[Anomaly], object]


def in_causal_order(step: int | None, events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of one step, the first cause first."""
    return tuple(
        sorted(
            events,
            key=lambda event: causal_key(
                step=step,
                micro_step=event.micro_step,
                kind=event.kind,
                vpp_stage=event.vpp_stage,
                pp_stage=event.pp_stage,
                call_id=event.call_id,
            ),
        )
    )


class AnomalyCallback:
    """Calls one function, one anomaly after the other, on a thread of its own."""

    def __init__(
        self, function: OnAnomaly | None, boundary: ErrorBoundary, samples: Callable[[int | None], Sequence[Any]]
    ) -> None:
        """`samples` gives the ids of a step; it may wait."""
        self._function = function
        self._boundary = boundary
        self._samples = samples
        self._chores = BackgroundWorker("on_anomaly", boundary)

    @property
    def dropped(self) -> int:
        """Return how many anomalies found too many waiting."""
        return self._chores.dropped

    def put(self, run: str, rank: int, step: int | None, events: Sequence[Event]) -> None:
        """Have the function called of what fired at `step`; never waits."""
        function = self._function
        if function is not None:
            ordered = in_causal_order(step, events)

            def call() -> None:
                _check_thread()
                samples = tuple(self._boundary.call("samples of on_anomaly", self._samples, step) or ())
                function(Anomaly(run=run, rank=rank, step=step, events=ordered, samples=samples))

            self._chores.put(call)

    def stop(self, timeout_seconds: float) -> bool:
        """Let the function see what waits, for so long at most; return whether it did."""
        return self._chores.stop(timeout_seconds)


@functools.cache
def _check_thread() -> None:
    """Log once that the function may slow training, where torch uses several CPU threads on this thread."""
    if not limit_this_thread():
        log.warning(
            "on_anomaly: torch could not be limited to one CPU thread there, since its OpenMP library was not found; "
            "torch operations on CPU tensors in on_anomaly may slow the steps of training"
        )
