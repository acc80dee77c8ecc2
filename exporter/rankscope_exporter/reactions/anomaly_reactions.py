"""What goes along with the steps beside measuring them: the budget, captures, and the script's own `on_anomaly`, wired.

All three say something on the training thread only when something changes; whatever may wait has a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.model.events import Event
from rankscope_contract.model.identity import Identity
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.validation import share_of
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.monitors.hangs.diagnosis import Diagnosis
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.reactions.anomaly_callback import AnomalyCallback, OnAnomaly
from rankscope_exporter.reactions.anomaly_capture import CAPTURE, CaptureController
from rankscope_exporter.reactions.overhead_controller import BUDGET, OverheadController
from rankscope_exporter.reactions.overhead_window import OverheadWindow
from rankscope_exporter.reactions.sample_ids import SampleIds, read
from rankscope_exporter.reconfiguration.change_queue import ChangeQueue
from rankscope_exporter.reconfiguration.change_sources import ChangeSources
from rankscope_exporter.sampling.active_quantities import ActiveQuantities, Part
from rankscope_exporter.sampling.sampling_config import chosen
from rankscope_exporter.training.recorder import Recorder

FINISH_SECONDS: Final = 1.0
"""How long the end of training waits at most for what a capture has to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactionDependencies:
    """What it is wired to."""

    monitored: MonitoredModel
    active_quantities: ActiveQuantities
    recorder: Recorder
    change_queue: ChangeQueue
    change_sources: ChangeSources
    diagnosis: Diagnosis
    cost: Callable[[], float]
    """CPU seconds of the monitor so far."""
    changed: Callable[[], None]
    """To be called when there is another set of kinds."""
    say: Callable[[str], None]
    """Prints a line on the console."""


class AnomalyReactions:
    """Built with the session, told of firings by the publisher, stopped when training ends."""

    def __init__(
        self,
        config: MonitorConfig,
        identity: Identity,
        boundary: ErrorBoundary,
        parts: ReactionDependencies,
        on_anomaly: OnAnomaly | None,
    ) -> None:
        self._identity = identity
        self._boundary = boundary
        self._is_wanted = config.capture is not None
        self._chores = BackgroundWorker("capture", boundary)
        self.batches = SampleIds()
        self.callbacks = AnomalyCallback(on_anomaly, boundary, self._samples)
        self.overhead_controller = self._governor(config, parts)
        self.captures = self._captures(config, parts)
        parts.recorder.step_events.follow(self.batches)
        parts.change_queue.companions += [self.overhead_controller, self.captures]
        parts.change_sources.asides |= {BUDGET: self.overhead_controller.make, CAPTURE: self.captures.make}
        parts.change_sources.listens = config.max_overhead is not None or config.capture is not None

    def fired(self, step: int | None, events: Sequence[Event]) -> None:
        """Do what is to be done when rules fired at `step`. On the publisher's thread."""
        self._boundary.call("capture", self.captures.fired, step, events)
        self._boundary.call("on_anomaly", self.callbacks.put, self._identity.run, self._identity.rank, step, events)

    def finish(self, catch_up: Callable[[float], bool]) -> None:
        """Have what is left said of a capture, behind the last step, for which `catch_up` waits some seconds at most.

        Where nothing is captured, and nobody is told, nothing is waited for.
        """
        if self._is_wanted:
            self._boundary.call("capture", catch_up, FINISH_SECONDS)
            self._boundary.call("capture", self.captures.finish)
            self._boundary.call("capture", self._chores.stop, FINISH_SECONDS)

    def stop(self, timeout_seconds: float) -> None:
        """Let `on_anomaly` see the last anomalies, for so long at most."""
        self.callbacks.stop(timeout_seconds)

    def dropped(self) -> Mapping[str, int]:
        """Return what was left out, by reason."""
        return {"on_anomaly": self.callbacks.dropped, "capture_events": self._chores.dropped}

    def _samples(self, step: int | None) -> Sequence[Any]:
        return read(self.batches.of(step))[0].get(str(step), ())

    def _governor(self, config: MonitorConfig, parts: ReactionDependencies) -> OverheadController:
        allowed = share_of(config.max_overhead)
        return OverheadController(
            None if allowed is None else OverheadWindow(allowed),
            parts.change_sources,
            cost=parts.cost,
            period=lambda: parts.active_quantities.period,
            changes=lambda: parts.change_queue.changes,
            rank=self._identity.rank,
            world_size=self._identity.world_size,
            say=parts.say,
        )

    def _captures(self, config: MonitorConfig, parts: ReactionDependencies) -> CaptureController:
        captures = CaptureController(
            config.capture,
            parts.change_sources,
            self.batches,
            self._chores,
            rank=self._identity.rank,
            parts=lambda: captured(parts.monitored, config, self._identity.rank),
            release=parts.active_quantities.release,
            record=parts.recorder.event,
            take_flight_record=lambda: parts.diagnosis.take_flight("capture"),
        )

        def changed() -> None:
            self.overhead_controller.pause()  # what a capture costs was asked for
            parts.changed()

        captures.changed = changed
        return captures


def captured(monitored: MonitoredModel, config: MonitorConfig, rank: int) -> list[Part]:
    """Return what `config` captures on this rank."""
    if config.capture is None:
        return []
    settings = config.capture.settings(config.options)
    return chosen(monitored, replace(config, capture=None, **settings), rank, switched=True)
