"""Calls the script's function `on_anomaly` on a separate thread.

A slow function therefore delays neither the training nor the records.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope_contract.model.events import Event
from rankscope_contract.model.identity import Identity
from rankscope_exporter.control.sample_ids import SampleIds, read
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.openmp import limit_this_thread
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.publish.anomaly_detector import in_causal_order
from rankscope_exporter.records.record import StepObserver

log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """All firings of rules at one step of this rank.

    The properties of this object describe the first firing in causal order.
    """

    run: str
    rank: int
    step: int | None
    events: tuple[Event, ...]
    """One event for each firing, in causal order: a cause comes before its effects."""
    samples: tuple[Any, ...] = ()
    """The sample ids that the script passed to `Monitor.batch` for this step, one item for each batch."""

    @property
    def rule(self) -> str | None:
        """The name of the rule of the first firing."""
        return self.events[0].rule

    @property
    def kind(self) -> str | None:
        """The kind of the tensor of the first firing, such as `grad_reduced`; None for a logged number."""
        return self.events[0].kind

    @property
    def tensor(self) -> str | None:
        """The name of the tensor of the first firing; None for a logged number."""
        return self.events[0].tensor

    @property
    def op(self) -> str | None:
        """The name of the statistic of the first firing; for a firing on a logged number, the name of this number."""
        return self.events[0].op

    @property
    def value(self) -> float | None:
        """The value of the statistic, or of the logged number, for which the rule fired."""
        return self.events[0].value

    @property
    def message(self) -> str:
        """The message about the first firing, as the console prints it."""
        return self.events[0].message


OnAnomaly = Callable[[Anomaly], object]
FindCallback = Callable[[], OnAnomaly | None]
"""Function that returns `on_anomaly`, or None without one.

Only the script and its model keep `on_anomaly` alive, because it may refer to the model.
"""


class AnomalyCallback(BackgroundWorker, StepObserver):
    """Calls the function `on_anomaly`, which `find` returns, for one anomaly after another, on a background thread."""

    def __init__(self, find: FindCallback, identity: Identity, batches: SampleIds, boundary: ErrorBoundary) -> None:
        super().__init__("on_anomaly", boundary)
        self._find = find
        self._identity = identity
        self._batches = batches

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        function = self._find()
        if function is not None:
            ordered, run, rank = in_causal_order(step, anomalies), self._identity.run, self._identity.rank

            def call() -> None:
                _check_thread()
                samples = tuple(self._boundary.call("reading sample ids for on_anomaly", self._samples, step) or ())
                function(Anomaly(run=run, rank=rank, step=step, events=ordered, samples=samples))

            self.put(call)

    def _samples(self, step: int | None) -> Sequence[Any]:
        """Return the sample ids of a step. Waits for copies from the device."""
        return read(self._batches.of(step))[0].get(str(step), ())


@functools.cache
def _check_thread() -> None:
    """Let torch use only one CPU thread for operations that the calling thread starts.

    Log once if this fails, because `on_anomaly` may then slow down training.
    """
    if not limit_this_thread():
        log.warning(
            "torch could not be limited to one CPU thread in calls of on_anomaly, because its OpenMP library was not "
            "found; torch operations on CPU tensors in on_anomaly may slow down training"
        )
