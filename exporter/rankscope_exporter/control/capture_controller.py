"""Anomaly capture: after a firing, all ranks measure more quantities for some steps, beginning at the same step.

This module does the work of one rank: it selects the firings that start a capture, and counts the steps of the capture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType
from rankscope_exporter.config.sections import CaptureConfig
from rankscope_exporter.control.anomaly_callback import BatchesByStep, SampleIds, read
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.changes import PlannedChange
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.publish.anomaly_detector import in_causal_order
from rankscope_exporter.records.record import StepObserver

CAPTURE: Final = "capture"
"""The name under which anomaly capture requests changes of the sampling."""

FINISH_SECONDS: Final = 1.0
"""Longest time in seconds that the end of training waits for the last events of captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The firing that starts a capture: its rank, and its step on that rank."""

    rank: int
    step: int
    message: str
    firing: dict[str, Any]
    """The rule, kind, tensor, op and value of the firing, which all events about the capture contain."""

    def event(self, state: str, message: str, **more: Any) -> Event:
        """Return an event about the capture that was requested because of the firing in this object.

        `state` is `asked` (the capture was requested), `began`, `ended`, or `missed` (it was requested, but did not
        take place).
        """
        details = {"state": state, "rank": self.rank, "fired_step": self.step, "reason": self.message, **more}
        return Event(type=EventType.CAPTURE, message=message, details=json.dumps(details), **self.firing)


class CaptureController(StepObserver):
    """Starts and ends the captures of one rank.

    The publisher thread calls `on_anomalies`, which requests captures. The background thread of `ChangeSources` calls
    `_make`, which returns a capture of all ranks. The training thread calls the methods for the events of steps.

    The function `take_flight_record` publishes a flight record, and the function `record` publishes an event. Both may
    wait, so `worker` calls them on its background thread. The function `changed` is called when a capture changes the
    set of tensor kinds that are measured.
    """

    def __init__(
        self,
        config: CaptureConfig | None,
        sources: ChangeSources,
        batches: SampleIds,
        boundary: ErrorBoundary,
        *,
        rank: int,
        record: Callable[[Event], None],
        take_flight_record: Callable[[str], object],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._active_quantities = sources.change_queue.active_quantities
        self._sources = sources
        self._batches = batches
        self.worker = BackgroundWorker("capture", boundary)
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

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        """Request a capture if one of the `anomalies` is a firing of a configured rule.

        The reason of the capture is the first firing of a configured rule in causal order. No capture is requested
        during the cooldown after the last firing for which a capture was requested, or if the number of captures has
        reached the limit.
        """
        config = self._config
        if config is None or step is None or step <= self._quiet_until or self._count >= config.max_captures:
            return
        ordered = in_causal_order(step, anomalies)
        chosen = next((event for event in ordered if config.chooses(event.rule)), None)
        if chosen is None:
            return
        firing = {name: getattr(chosen, name) for name in ("rule", "kind", "tensor", "op", "value")}
        reason = Reason(rank=self._rank, step=step, message=chosen.message, firing=firing)
        until = step + config.cooldown_steps
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
        return PlannedChange(step=step, description=description, apply=partial(self._begin, reason))

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

    def finish(self, catch_up: Callable[[float], bool]) -> None:
        """End the capture at the end of training, and record an event for each requested capture that did not begin.

        `catch_up` waits for the publisher for a number of seconds.
        """
        if self._config is None:
            return
        catch_up(FINISH_SECONDS)
        if self._reason is not None:
            self._left -= 1  # the last step has ended as well
            self._end("capture ended with the training", cut_short=self._left > 0)
        self._miss(None, "the training ended before the capture began")
        self.worker.stop(FINISH_SECONDS)

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

        self.worker.put(publish)

    def _flight_record(self) -> None:
        if self._config is not None and self._config.flight_record:
            self.worker.put(partial(self._take_flight_record, CAPTURE))
