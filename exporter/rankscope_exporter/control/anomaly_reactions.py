"""All reactions of one session to overhead and to anomalies: overhead controller, anomaly capture and `on_anomaly`.

`on_anomaly` is a function of the script. The reactions change the sampling on the training thread. Work that may wait
runs on background threads.

Anomaly capture: after a firing, all ranks measure more quantities for a number of steps, beginning at the same step.

This module does the work of one rank: it selects the firings that start a capture, and counts the steps of the capture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.config.sections import CaptureConfig
from rankscope_exporter.control.anomaly_callback import AnomalyCallback, FindCallback
from rankscope_exporter.control.change_queue import ChangeQueue, PlannedChange, ReactionChange
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.overhead_controller import OverheadController
from rankscope_exporter.control.overhead_window import OverheadWindow
from rankscope_exporter.control.sample_ids import BatchesByStep, SampleIds, read
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.process.validation import share_of
from rankscope_exporter.publish.anomaly_detector import in_causal_order
from rankscope_exporter.records.record import StepObserver
from rankscope_exporter.training.sampling import ActiveQuantities

CAPTURE: Final = "capture"
"""The name under which anomaly capture requests changes of the sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The firing that starts a capture: its rank, its step on that rank, its rule and its statistic."""

    rank: int
    step: int
    rule: str | None
    kind: str | None
    tensor: str | None
    op: str | None
    value: float | None
    message: str

    @classmethod
    def of(cls, event: Event, step: int, rank: int) -> Reason:
        """Return the reason for a capture after the anomaly `event` on this rank."""
        return cls(
            rank=rank,
            step=step,
            rule=event.rule,
            kind=event.kind,
            tensor=event.tensor,
            op=event.op,
            value=None if event.value is None else float(event.value),
            message=event.message,
        )

    def event(self, state: str, message: str, **more: Any) -> Event:
        """Return an event about the capture that was requested because of the firing in this object.

        `state` is `asked` (the capture was requested), `began`, `ended`, or `missed` (it was requested, but did not
        take place).
        """
        details = {"state": state, "rank": self.rank, "fired_step": self.step, "reason": self.message, **more}
        return Event(
            type=EventType.CAPTURE,
            rule=self.rule,
            kind=self.kind,
            tensor=self.tensor,
            op=self.op,
            value=self.value,
            message=message,
            details=json.dumps(details),
        )


class CaptureController(StepObserver):
    """Starts and ends the captures of one rank.

    The publisher thread calls `fired`, which requests captures. The background thread of `ChangeSources` calls `_make`,
    which returns a capture of all ranks. The training thread calls the methods for the events of steps.

    The function `take_flight_record` publishes a flight record, and the function `record` publishes an event. Both may
    wait, so `worker` calls them on its background thread. The function `changed` is called when a capture changes the
    set of tensor kinds that are measured.
    """

    def __init__(
        self,
        config: CaptureConfig | None,
        active_quantities: ActiveQuantities,
        sources: ChangeSources,
        batches: SampleIds,
        worker: BackgroundWorker,
        *,
        rank: int,
        record: Callable[[Event], None],
        take_flight_record: Callable[[], object],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._active_quantities = active_quantities
        self._sources = sources
        self._batches = batches
        self._worker = worker
        self._rank = rank
        self._record = record
        self._take_flight_record = take_flight_record
        self._changed = changed
        self._quiet_until = -1  # firings up to this step do not start a capture
        self._count = 0
        self._requested: list[Reason] = []  # by this rank, for captures that have not begun
        self._reason: Reason | None = None  # of the present capture
        self._first = self._left = self._steps = 0
        sources.reactions[CAPTURE] = self._make

    # Firings of this rank, on the publisher thread.

    def fired(self, step: int | None, events: Sequence[Event]) -> None:
        """Request a capture if one of the `events` is a firing of a configured rule.

        The reason of the capture is the first firing of a configured rule in causal order. No capture is requested
        during the cooldown after the last firing for which a capture was requested, or if the number of captures has
        reached the limit.
        """
        config = self._config
        if config is None or step is None or step <= self._quiet_until or self._count >= config.max_captures:
            return
        chosen = [event for event in in_causal_order(step, events) if config.chooses(event.rule)]
        if not chosen:
            return
        reason, until = Reason.of(chosen[0], step, self._rank), step + config.cooldown_steps
        self._quiet_until = until
        self._requested.append(reason)
        try:
            self._sources.request_reaction(asdict(reason), CAPTURE, stamp=step, until=until)
            self._publish("asked", reason, f"capture requested: {reason.message}", self._batches.of(step))
        finally:
            self._flight_record()

    # Captures of all ranks.

    def _make(self, document: Mapping[str, Any], step: int | None) -> PlannedChange:
        """Return the capture for the firing in the JSON object `document`, which has the fields of `Reason`."""
        reason, config = Reason(**document), self._config
        if config is not None:
            self._quiet_until = max(self._quiet_until, reason.step + config.cooldown_steps)
            if reason.rank != self._rank:
                self._flight_record()
        description = {"capture": [] if config is None else list(config.quantities), "reason": reason.message}
        return ReactionChange(step=step, description=description, apply=partial(self._begin, reason))

    def _begin(self, reason: Reason, change: PlannedChange, step: int) -> list[Event]:
        """Start the capture at step number `step`, on the training thread, and return the event about it."""
        config = self._config
        if config is None:
            return []
        if self._count >= config.max_captures:
            self._miss(reason.step, "the limit max_captures is reached")
            return []
        self._count += 1
        self._take_requested(reason.step + config.cooldown_steps)  # one capture serves all requests
        # A late rank ends the capture together with the others.
        self._steps = self._left = max(1, config.steps - change.late_steps)
        self._reason, self._first = reason, step
        last = step + self._left - 1
        self._quiet_until = max(self._quiet_until, last)
        self._active_quantities.capture()
        self._changed()
        cause = f"{reason.message}, on rank {reason.rank} at step {reason.step}"
        text = f"capture of {', '.join(config.quantities)} in steps {step} to {last}: {cause}"
        steps = {"first_step": step, "last_step": last, "agreed_step": change.step}
        return [reason.event("began", text + change.late_text(), **steps, late_steps=change.late_steps)]

    # Steps, on the training thread.

    def on_before_step(self, step: int) -> None:
        if self._reason is not None:
            self._left -= 1
            if self._left <= 0:
                try:
                    self._active_quantities.release()
                    self._changed()
                finally:
                    self._end(f"capture ended before step {step}", cut_short=False)

    def sampling_changed(self, step: int) -> None:
        """End the capture, because a new sampling configuration takes effect at step number `step`."""
        if self._reason is not None:
            self._end(f"capture ended before step {step}: the sampling configuration changed", cut_short=True)

    def finish(self) -> None:
        """End the capture at the end of training, and record an event for each requested capture that did not begin."""
        if self._reason is not None:
            self._left -= 1  # the last step has ended as well
            self._end("capture ended with the training", cut_short=self._left > 0)
        self._miss(None, "the training ended before the capture began")

    def state(self) -> dict[str, Any]:
        """Return the number of captures and the reason of the present capture, for the HTTP path /config."""
        if self._config is None:
            return {}
        return {"captures": self._count, "capturing": None if self._reason is None else self._reason.message}

    def _end(self, text: str, *, cut_short: bool) -> None:
        reason, self._reason = self._reason, None
        if reason is not None:
            steps = self._steps - max(0, self._left)
            batches = self._batches.of_last(steps)
            self._publish("ended", reason, text, batches, first_step=self._first, steps=steps, cut_short=cut_short)

    def _take_requested(self, up_to_step: int | None) -> list[Reason]:
        """Remove and return this rank's requests made at steps up to `up_to_step`; all of them if it is None."""
        taken = [reason for reason in tuple(self._requested) if up_to_step is None or reason.step <= up_to_step]
        for reason in taken:
            self._requested.remove(reason)  # one by one: the publisher thread may add others meanwhile
        return taken

    def _miss(self, up_to_step: int | None, why: str) -> None:
        for reason in self._take_requested(up_to_step):
            self._publish("missed", reason, f"nothing was captured, because {why}: {reason.message}", {})

    def _publish(self, state: str, reason: Reason, text: str, batches: BatchesByStep, **more: Any) -> None:
        """Publish an event with the sample ids of `batches` on the background thread of the worker.

        Only that thread reads the ids, because reading them may wait for a copy from the device.
        """

        def publish() -> None:
            samples, left_out = read(batches)
            self._record(reason.event(state, text, **more, samples=samples, samples_left_out=left_out))

        self._worker.put(publish)

    def _flight_record(self) -> None:
        if self._config is not None and self._config.flight_record:
            self._worker.put(self._take_flight_record)


FINISH_SECONDS: Final = 1.0
"""Longest time in seconds that the end of training waits for the last events of captures."""


class AnomalyReactions(StepObserver):
    """The reactions of one session to overhead and to anomalies.

    The session must register all objects in `observers` as observers of steps and records, in the order of
    `observers`. The functions: `record` publishes an event. `take_flight_record` publishes a flight record for the
    trigger with a name. `cost` returns the CPU seconds that the monitor has used so far, without costs that occur only
    once. `kinds_changed` is called when the set of tensor kinds that are measured changes. `say` prints a line on the
    console.
    """

    def __init__(
        self,
        config: MonitorConfig,
        identity: Identity,
        boundary: ErrorBoundary,
        on_anomaly: FindCallback,
        *,
        active_quantities: ActiveQuantities,
        change_queue: ChangeQueue,
        change_sources: ChangeSources,
        record: Callable[[Event], None],
        take_flight_record: Callable[[str], object],
        cost: Callable[[], float],
        kinds_changed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._boundary = boundary
        self._kinds_changed = kinds_changed
        self._worker = BackgroundWorker("capture", boundary)
        self.batches = SampleIds(are_read=config.capture is not None or on_anomaly() is not None)
        self.callbacks = AnomalyCallback(on_anomaly, boundary, self._samples)
        max_overhead = share_of(config.max_overhead)
        window = None if max_overhead is None else OverheadWindow(max_overhead)
        self.overhead_controller = OverheadController(
            window, active_quantities, change_queue, change_sources, identity, cost=cost, say=say
        )
        self.captures = CaptureController(
            config.capture,
            active_quantities,
            change_sources,
            self.batches,
            self._worker,
            rank=identity.rank,
            record=record,
            take_flight_record=lambda: take_flight_record("capture"),
            changed=self._capture_changed,
        )

    @property
    def observers(self) -> tuple[StepObserver, ...]:
        """The observers that the configuration needs, in the order in which they must be called."""
        needed = (
            (self.overhead_controller, self._config.max_overhead is not None),
            (self.captures, self._config.capture is not None),
            (self.batches, self.batches.are_read),
        )
        return *(observer for observer, is_needed in needed if is_needed), self

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        self._boundary.call("capture", self.captures.fired, step, anomalies)
        self._boundary.call("on_anomaly", self.callbacks.put, self._identity.run, self._identity.rank, step, anomalies)

    def sampling_changed(self, step: int) -> None:
        """Reset the overhead controller and captures: a new sampling configuration takes effect at `step`."""
        self._boundary.call("switching", self.overhead_controller.sampling_changed)
        self._boundary.call("switching", self.captures.sampling_changed, step)

    def state(self) -> dict[str, Any]:
        """Return the state of the overhead controller and of anomaly capture, for the HTTP path /config."""
        return {**self.overhead_controller.state(), **self.captures.state()}

    def finish(self, catch_up: Callable[[float], bool]) -> None:
        """Publish the last events of captures; `catch_up` waits for the publisher for a number of seconds."""
        if self._config.capture is not None:
            self._boundary.call("capture", catch_up, FINISH_SECONDS)
            self._boundary.call("capture", self.captures.finish)
            self._boundary.call("capture", self._worker.stop, FINISH_SECONDS)

    def stop(self, timeout_seconds: float) -> None:
        self.callbacks.stop(timeout_seconds)

    def dropped(self) -> Mapping[str, int]:
        """Return the numbers of dropped calls of `on_anomaly`, and tasks of captures (`capture_events`)."""
        return {"on_anomaly": self.callbacks.dropped, "capture_events": self._worker.dropped}

    def _samples(self, step: int | None) -> Sequence[Any]:
        return read(self.batches.of(step))[0].get(str(step), ())

    def _capture_changed(self) -> None:
        self.overhead_controller.pause()  # the cost of a capture does not count against max_overhead
        self._kinds_changed()
