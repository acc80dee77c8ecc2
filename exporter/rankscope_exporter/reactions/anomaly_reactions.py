"""What goes along with the steps beside measuring them: the budget, captures, and the script's own `on_anomaly`, wired.

All three say something on the training thread only when something changes; whatever may wait has a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.events import Event
from rankscope_contract.identity import Identity
from rankscope_exporter.adapters.monitored_model import Subject
from rankscope_exporter.base.errors import Guard
from rankscope_exporter.base.validation import share_of
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.monitors.hangs.diagnosis import Diagnosis
from rankscope_exporter.process.threads import Chores
from rankscope_exporter.reactions.anomaly_callback import Callbacks, OnAnomaly
from rankscope_exporter.reactions.anomaly_capture import CAPTURE, Captures
from rankscope_exporter.reactions.overhead_controller import BUDGET, Governor
from rankscope_exporter.reactions.overhead_window import OverheadWatch
from rankscope_exporter.reactions.sample_ids import Batches, read
from rankscope_exporter.reconfiguration.change_queue import Switchboard
from rankscope_exporter.reconfiguration.change_sources import Switching
from rankscope_exporter.sampling.active_quantities import Collection, Part
from rankscope_exporter.sampling.sampling_config import chosen
from rankscope_exporter.training.recorder import Recorder

FINISH_SECONDS: Final = 1.0
"""How long the end of training waits at most for what a capture has to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What it is wired to."""

    subject: Subject
    collection: Collection
    recorder: Recorder
    board: Switchboard
    switching: Switching
    diagnosis: Diagnosis
    cost: Callable[[], float]
    """CPU seconds of the monitor so far."""
    changed: Callable[[], None]
    """To be called when there is another set of kinds."""
    say: Callable[[str], None]
    """Prints a line on the console."""


class Alongside:
    """Built with the session, told of firings by the publisher, stopped when training ends."""

    def __init__(
        self, config: MonitorConfig, identity: Identity, guard: Guard, parts: Parts, on_anomaly: OnAnomaly | None
    ) -> None:
        self._identity = identity
        self._guard = guard
        self._is_wanted = config.capture is not None
        self._chores = Chores("capture", guard)
        self.batches = Batches()
        self.callbacks = Callbacks(on_anomaly, guard, self._samples)
        self.governor = self._governor(config, parts)
        self.captures = self._captures(config, parts)
        parts.recorder.moments.follow(self.batches)
        parts.board.companions += [self.governor, self.captures]
        parts.switching.asides |= {BUDGET: self.governor.make, CAPTURE: self.captures.make}
        parts.switching.listens = config.max_overhead is not None or config.capture is not None

    def fired(self, step: int | None, events: Sequence[Event]) -> None:
        """Do what is to be done when rules fired at `step`. On the publisher's thread."""
        self._guard.call("capture", self.captures.fired, step, events)
        self._guard.call("on_anomaly", self.callbacks.put, self._identity.run, self._identity.rank, step, events)

    def finish(self, catch_up: Callable[[float], bool]) -> None:
        """Have what is left said of a capture, behind the last step, for which `catch_up` waits some seconds at most.

        Where nothing is captured, and nobody is told, nothing is waited for.
        """
        if self._is_wanted:
            self._guard.call("capture", catch_up, FINISH_SECONDS)
            self._guard.call("capture", self.captures.finish)
            self._guard.call("capture", self._chores.stop, FINISH_SECONDS)

    def stop(self, timeout_seconds: float) -> None:
        """Let `on_anomaly` see the last anomalies, for so long at most."""
        self.callbacks.stop(timeout_seconds)

    def dropped(self) -> Mapping[str, int]:
        """Return what was left out, by reason."""
        return {"on_anomaly": self.callbacks.dropped, "capture_events": self._chores.dropped}

    def _samples(self, step: int | None) -> Sequence[Any]:
        return read(self.batches.of(step))[0].get(str(step), ())

    def _governor(self, config: MonitorConfig, parts: Parts) -> Governor:
        allowed = share_of(config.max_overhead)
        return Governor(
            None if allowed is None else OverheadWatch(allowed),
            parts.switching,
            cost=parts.cost,
            period=lambda: parts.collection.period,
            changes=lambda: parts.board.changes,
            rank=self._identity.rank,
            world_size=self._identity.world_size,
            say=parts.say,
        )

    def _captures(self, config: MonitorConfig, parts: Parts) -> Captures:
        captures = Captures(
            config.capture,
            parts.switching,
            self.batches,
            self._chores,
            rank=self._identity.rank,
            parts=lambda: captured(parts.subject, config, self._identity.rank),
            release=parts.collection.release,
            record=parts.recorder.event,
            take_flight_record=lambda: parts.diagnosis.take_flight("capture"),
        )

        def changed() -> None:
            self.governor.pause()  # what a capture costs was asked for
            parts.changed()

        captures.changed = changed
        return captures


def captured(subject: Subject, config: MonitorConfig, rank: int) -> list[Part]:
    """Return what `config` captures on this rank."""
    if config.capture is None:
        return []
    settings = config.capture.settings(config.options)
    return chosen(subject, replace(config, capture=None, **settings), rank, switched=True)
