"""Measures more for some steps after a firing: a change that all ranks make at the same step, and that ends by itself.

One rank's part: which firings are captured, and the progress of a capture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from rankscope_contract.model.events import Event, EventType
from rankscope_exporter.config.sections import CaptureConfig
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.reactions.anomaly_callback import in_causal_order
from rankscope_exporter.reactions.sample_ids import Named, SampleIds, read
from rankscope_exporter.sampling.active_quantities import ActiveQuantities, Part, PreparedQuantities

CAPTURE: Final = "capture"
"""The source that such a change names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What fired: on which rank, at which of its steps."""

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
        """Return what an anomaly on this rank says."""
        value = None if event.value is None else float(event.value)
        return cls(
            rank=rank,
            step=step,
            rule=event.rule,
            kind=event.kind,
            tensor=event.tensor,
            op=event.op,
            value=value,
            message=event.message,
        )

    def document(self) -> dict[str, Any]:
        """Return it as ranks tell each other."""
        return asdict(self)

    def event(self, state: str, message: str, **more: Any) -> Event:
        """Return an event that says what became of it."""
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


@dataclass(slots=True, kw_only=True)
class PlannedCapture:
    """One capture, to come. `begins` says whether it may, and what is to be said."""

    reason: Reason
    step: int | None
    parts: list[Part]
    begins: Callable[[Reason, int, int | None], list[Event]]
    began: Callable[[], None]
    prepared: PreparedQuantities | None = None

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        return self.step is None or self.step <= step

    def ready(self, active_quantities: ActiveQuantities) -> None:
        """Register the hooks of what is captured; again where a switch has sent some of it away meanwhile."""
        if self.prepared is None or not active_quantities.is_current(self.prepared):
            self.prepared = active_quantities.prepare(self.parts)

    def take(self, active_quantities: ActiveQuantities, step: int) -> list[Event]:
        """Measure more from this step on, unless enough was captured."""
        events = self.begins(self.reason, step, self.step)
        if events:
            self.ready(active_quantities)
            active_quantities.capture(self.prepared or [])
            self.began()
        else:
            active_quantities.discard(self.prepared or [])
        return events

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        return {"capture": [quantity.name for quantity, _ in self.parts], "reason": self.reason.message}


class ChangeRequester(Protocol):
    """How changes beside what is measured are asked for."""

    def aside(
        self, document: Mapping[str, Any], source: str, *, stamp: int | None = None, until: int | None = None
    ) -> None:
        """Ask for one; nothing that is asked for up to the stamp `until` is heard any more."""
        ...


class CaptureController:
    """Hears of firings on the publisher's thread, of other ranks' on the switch thread, of steps on the training's.

    `take_flight_record` publishes one, and `record` hands an event over; both may wait, on a thread of their own.
    """

    def __init__(
        self,
        config: CaptureConfig | None,
        asking: ChangeRequester,
        batches: SampleIds,
        worker: BackgroundWorker,
        *,
        rank: int,
        parts: Callable[[], list[Part]],
        release: Callable[[], None],
        record: Callable[[Event], None],
        take_flight_record: Callable[[], None],
    ) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called on the training thread when there is another set of kinds."""
        self._config = config
        self._asking = asking
        self._batches = batches
        self._chores = worker
        self._rank = rank
        self._parts = parts
        self._release = release
        self._record = record
        self._take_flight_record = take_flight_record
        self._quiet_until = -1  # no firing up to this step has anything captured
        self._count = 0
        self._asked: list[Reason] = []  # by this rank, and not begun anywhere yet
        self._reason: Reason | None = None  # of the capture under way
        self._first = self._left = self._steps = 0

    # Firings of this rank.

    def fired(self, step: int | None, events: Sequence[Event]) -> None:
        """Have the first cause captured that a chosen rule fired on, unless that was done a while ago."""
        config = self._config
        if config is None or step is None or step <= self._quiet_until or self._count >= config.max_captures:
            return
        chosen = [event for event in in_causal_order(step, events) if config.chooses(event.rule)]
        if not chosen:
            return
        reason, until = Reason.of(chosen[0], step, self._rank), step + config.cooldown_steps
        self._quiet_until = until
        self._asked.append(reason)
        try:
            self._asking.aside(reason.document(), CAPTURE, stamp=step, until=until)
            text = f"more was asked to be measured: {reason.message}"
            self._tell("asked", reason, text, self._batches.of(step))
        finally:
            self._flight_record()

    # Captures that all ranks agreed on.

    def make(self, document: Mapping[str, Any], step: int | None) -> PlannedCapture:
        """Return the capture that `document` means, for `step`."""
        reason, config = Reason(**document), self._config
        if config is not None:
            self._quiet_until = max(self._quiet_until, reason.step + config.cooldown_steps)
            if reason.rank != self._rank:
                self._flight_record()
        parts = self._parts() if config is not None and self._count < config.max_captures else []
        return PlannedCapture(reason=reason, step=step, parts=parts, begins=self._begins, began=self.changed)

    def _begins(self, reason: Reason, step: int, agreed: int | None) -> list[Event]:
        config = self._config
        if config is None:
            return []
        if self._count >= config.max_captures:
            self._miss(reason.step, "there were max_captures of them already")
            return []
        self._count += 1
        self._answered(reason.step + config.cooldown_steps)  # one capture is for all
        late = 0 if agreed is None else step - agreed  # who heard too late ends with the others all the same
        self._steps = self._left = max(1, config.steps - late)
        self._reason, self._first = reason, step
        last = step + self._left - 1
        self._quiet_until = max(self._quiet_until, last)
        names = ", ".join(config.quantities)
        text = f"steps {step} to {last} have {names}: {reason.message}, on rank {reason.rank} at step {reason.step}"
        return [reason.event("began", text, first_step=step, last_step=last, agreed_step=agreed)]

    # Of every step, on the training thread.

    def step_begins(self, step: int) -> list[Event]:
        """End what was measured often enough."""
        if self._reason is not None:
            self._left -= 1
            if self._left <= 0:
                try:
                    self._release()
                    self.changed()
                finally:
                    self._end(f"captured up to the step before {step}", cut_short=False)
        return []

    def switched(self, step: int) -> list[Event]:
        """Note that somebody says anew what is measured: that wins."""
        if self._reason is not None:
            self._end(
                f"captured up to the step before {step}, from which on something else is measured", cut_short=True
            )
        return []

    def finish(self) -> None:
        """Note that training has ended, maybe before the step at which a capture was to begin."""
        if self._reason is not None:
            self._left -= 1  # the last step has ended as well
            self._end("captured up to the end of training", cut_short=self._left > 0)
        self._miss(None, "training has ended before")

    def shown(self) -> dict[str, Any]:
        """Return where it stands."""
        if self._config is None:
            return {}
        return {"captures": self._count, "capturing": None if self._reason is None else self._reason.message}

    def _end(self, text: str, *, cut_short: bool) -> None:
        reason, self._reason = self._reason, None
        if reason is not None:
            done = self._steps - max(0, self._left)
            batches = self._batches.of_last(done)
            self._tell("ended", reason, text, batches, first_step=self._first, steps=done, cut_short=cut_short)

    def _answered(self, up_to_step: int | None) -> list[Reason]:
        """Forget what this rank asked for up to a step, if one is given, and return it."""
        answered = [reason for reason in tuple(self._asked) if up_to_step is None or reason.step <= up_to_step]
        for reason in answered:
            self._asked.remove(reason)  # one by one: the publisher's thread may add some meanwhile
        return answered

    def _miss(self, up_to_step: int | None, why: str) -> None:
        for reason in self._answered(up_to_step):
            self._tell("missed", reason, f"nothing was captured, {why}: {reason.message}", {})

    def _tell(self, state: str, reason: Reason, text: str, batches: Named, **more: Any) -> None:
        """Record an event with the samples of `batches`, which may have to be waited for."""

        def tell() -> None:
            samples, left_out = read(batches)
            self._record(reason.event(state, text, **more, samples=samples, samples_left_out=left_out))

        self._chores.put(tell)

    def _flight_record(self) -> None:
        if self._config is not None and self._config.flight_record:
            self._chores.put(self._take_flight_record)
