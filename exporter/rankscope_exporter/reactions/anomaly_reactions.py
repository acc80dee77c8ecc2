"""All reactions of one session to overhead and to anomalies: overhead controller, anomaly capture and `on_anomaly`.

`on_anomaly` is a function of the script. The reactions change the sampling on the training thread. Work that may wait
runs on background threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.validation import share_of
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.reactions.anomaly_callback import AnomalyCallback, FindCallback
from rankscope_exporter.reactions.anomaly_capture import CAPTURE, CaptureController
from rankscope_exporter.reactions.overhead_controller import BUDGET, OverheadController
from rankscope_exporter.reactions.overhead_window import OverheadWindow
from rankscope_exporter.reactions.sample_ids import SampleIds, read
from rankscope_exporter.reconfiguration.change_queue import ChangeQueue, PlannedChange
from rankscope_exporter.reconfiguration.change_sources import ChangeSources
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sampling.active_quantities import ActiveQuantities
from rankscope_exporter.sampling.sampling_config import Part, selected_parts

FINISH_SECONDS: Final = 1.0
"""Longest time in seconds that the end of training waits for the last events of captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactionDependencies:
    """The objects and functions of the session that the reactions to overhead and to anomalies use."""

    monitored: MonitoredModel
    active_quantities: ActiveQuantities
    change_queue: ChangeQueue
    change_sources: ChangeSources
    record: Callable[[Event], None]
    """Function that publishes an event."""
    take_flight_record: Callable[[str], object]
    """Function that publishes a flight record. Its argument is the name of the trigger, such as "capture"."""
    cost: Callable[[], float]
    """Function that returns the CPU seconds that the monitor has used so far, without costs that occur only once."""
    kinds_changed: Callable[[], None]
    """Function that is called when the set of tensor kinds that are measured changes."""
    say: Callable[[str], None]
    """Function that prints a line on the console."""


class AnomalyReactions(StepObserver):
    """The reactions of one session to overhead and to anomalies.

    The session must register all objects in `observers` as observers of steps and records, in the order of
    `observers`.
    """

    def __init__(
        self,
        config: MonitorConfig,
        identity: Identity,
        boundary: ErrorBoundary,
        parts: ReactionDependencies,
        on_anomaly: FindCallback,
    ) -> None:
        self._config = config
        self._identity = identity
        self._boundary = boundary
        self._dependencies = parts
        self._worker = BackgroundWorker("capture", boundary)
        self.batches = SampleIds()
        self.callbacks = AnomalyCallback(on_anomaly, boundary, self._samples)
        max_overhead = share_of(config.max_overhead)
        self.overhead_controller = OverheadController(
            None if max_overhead is None else OverheadWindow(max_overhead),
            parts.change_sources,
            cost=parts.cost,
            period=lambda: parts.active_quantities.period,
            changes=lambda: parts.change_queue.changes,
            rank=identity.rank,
            world_size=identity.world_size,
            say=parts.say,
        )
        self.captures = CaptureController(
            config.capture,
            parts.change_sources,
            self.batches,
            self._worker,
            rank=identity.rank,
            parts=self._captured_parts,
            release=parts.active_quantities.release,
            record=parts.record,
            take_flight_record=lambda: parts.take_flight_record("capture"),
            changed=self._capture_changed,
        )

    @property
    def observers(self) -> tuple[StepObserver, ...]:
        """The observers of steps and records, in the order in which they must be called."""
        return self.overhead_controller, self.captures, self.batches, self

    def on_record(self, record: StepRecord) -> None:
        """React to the firings in `record`, the record of one step. Called on the publisher thread."""
        anomalies = [event for event in record.events if event.type == EventType.ANOMALY]
        if anomalies:
            run, rank = self._identity.run, self._identity.rank
            self._boundary.call("capture", self.captures.fired, record.step, anomalies)
            self._boundary.call("on_anomaly", self.callbacks.put, run, rank, record.step, anomalies)

    def planned_change(self, source: str, document: Mapping[str, Any], step: int | None) -> PlannedChange | None:
        """Return the change of the sampling that the JSON object `document` describes, for step number `step`.

        Return None if `source` is neither the overhead controller nor anomaly capture.
        """
        if source == BUDGET:
            return self.overhead_controller.make(document, step)
        return self.captures.make(document, step) if source == CAPTURE else None

    def sampling_changed(self, step: int) -> None:
        """Reset the overhead controller and anomaly capture.

        Called when a new sampling configuration takes effect at step number `step`.
        """
        self._boundary.call("switching", self.overhead_controller.sampling_changed)
        self._boundary.call("switching", self.captures.sampling_changed, step)

    def state(self) -> dict[str, Any]:
        """Return the state of the overhead controller and of anomaly capture, for the HTTP path /config."""
        return {**self.overhead_controller.state(), **self.captures.state()}

    def finish(self, catch_up: Callable[[float], bool]) -> None:
        """Publish the last events of captures after the last step. Does nothing if captures are not configured.

        The function `catch_up` is called with a number of seconds. It waits at most this long until the publisher has
        processed the last step.
        """
        if self._config.capture is not None:
            self._boundary.call("capture", catch_up, FINISH_SECONDS)
            self._boundary.call("capture", self.captures.finish)
            self._boundary.call("capture", self._worker.stop, FINISH_SECONDS)

    def stop(self, timeout_seconds: float) -> None:
        """Wait until the queued calls of `on_anomaly` have ended, for at most `timeout_seconds`."""
        self.callbacks.stop(timeout_seconds)

    def dropped(self) -> Mapping[str, int]:
        """Return the numbers of dropped calls of `on_anomaly` and of dropped tasks of anomaly capture.

        The keys are "on_anomaly" and "capture_events".
        """
        return {"on_anomaly": self.callbacks.dropped, "capture_events": self._worker.dropped}

    def _samples(self, step: int | None) -> Sequence[Any]:
        return read(self.batches.of(step))[0].get(str(step), ())

    def _captured_parts(self) -> list[Part]:
        config = self._config
        if config.capture is None:
            return []
        settings = config.capture.settings(config.options)
        captured = replace(config, capture=None, **settings)
        return selected_parts(self._dependencies.monitored, captured, self._identity.rank, ignore_start=True)

    def _capture_changed(self) -> None:
        self.overhead_controller.pause()  # the cost of a capture does not count against max_overhead
        self._dependencies.kinds_changed()
