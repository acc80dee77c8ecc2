"""Reactions to anomalies of one rank: the script's function `on_anomaly`, anomaly capture, and the sample ids of steps.

`on_anomaly` is called on a separate thread. A slow function therefore delays neither the training nor the records.

Anomaly capture: after a firing, all ranks measure more quantities for some steps, beginning at the same step. This
module selects the firings that start a capture, and counts the steps of the capture.

The ids help to find a training sample with bad data. The script passes them to `Monitor.batch` on the training thread,
before the forward pass of the batch. Other threads read the ids. Only reading the ids waits for a device.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import torch

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_exporter.config.monitor_config import CaptureConfig
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.changes import PlannedChange
from rankscope_exporter.measure.kernels.statistics_table import copied_to_host
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.records.record import StepObserver, StepRecord, Transfer

_OF_FIRING: Final = ("rule", "kind", "tensor", "op", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """All firings of rules at one step of this rank.

    The attributes from `rule` on describe the first firing in causal order.
    """

    run: str
    rank: int
    step: int | None
    events: tuple[Event, ...]
    """One event for each firing, in causal order: a cause comes before its effects."""
    samples: tuple[Any, ...] = ()
    """The sample ids that the script passed to `Monitor.batch` for this step, one item for each batch."""

    rule: str | None = field(init=False)
    """The name of the rule of the first firing."""
    kind: str | None = field(init=False)
    """The kind of the tensor of the first firing, such as `grad_reduced`; None for a logged number."""
    tensor: str | None = field(init=False)
    """The name of the tensor of the first firing; None for a logged number."""
    op: str | None = field(init=False)
    """The name of the statistic of the first firing; for a firing on a logged number, the name of this number."""
    value: float | None = field(init=False)
    """The value of the statistic, or of the logged number, for which the rule fired."""
    message: str = field(init=False)
    """The message about the first firing, as the console prints it."""

    def __post_init__(self) -> None:
        for name in (*_OF_FIRING, "message"):
            object.__setattr__(self, name, getattr(self.events[0], name))


OnAnomaly = Callable[[Anomaly], object]


class Owner:
    """An object that only a monitor and the hooks of its model hold.

    It also holds `on_anomaly`, because this function may refer to the model. The threads of the monitor must not keep
    the model alive.
    """

    def __init__(self, on_anomaly: OnAnomaly | None) -> None:
        self.on_anomaly = on_anomaly
        self.dropped: Callable[[OnAnomaly | None], None] | None = None
        """Function that is called with `on_anomaly` at the end of this object, on whatever thread frees it."""

    def __del__(self) -> None:
        # A weak reference with a callback is not sufficient: the last anomalies of the run still need `on_anomaly`.
        if self.dropped is not None:
            self.dropped(self.on_anomaly)


class AnomalyCallback(BackgroundWorker, StepObserver):
    """Calls the function `on_anomaly` of an owner for one anomaly after another, on a background thread."""

    def __init__(
        self, owner: weakref.ref[Owner], identity: Identity, batches: SampleIds, boundary: ErrorBoundary
    ) -> None:
        super().__init__("on_anomaly", boundary)
        self.last: OnAnomaly | None = None
        """The function of an owner that was freed, while the last records of the run are published."""
        self._owner = owner
        self._identity = identity
        self._batches = batches

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        owner = self._owner()
        function = self.last if owner is None else owner.on_anomaly
        if function is not None:
            run, rank = self._identity.run, self._identity.rank

            def call() -> None:
                samples = tuple(self._boundary.call("reading sample ids for on_anomaly", self._samples, step) or ())
                function(Anomaly(run=run, rank=rank, step=step, events=tuple(anomalies), samples=samples))

            self.put(call)

    def _samples(self, step: int | None) -> Sequence[Any]:
        """Return the sample ids of a step. Waits for copies from the device."""
        return read(self._batches.of(step))[0].get(str(step), ())


KEPT_STEPS: Final = 64
MOST_IDS: Final = 1024
"""Largest number of ids that are kept per batch. Further ids are only counted."""

MOST_BYTES: Final = 16_384
"""Largest size in bytes of all sample ids in one event, as JSON."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sample ids of one batch that are kept, and the number of ids that are not kept."""

    ids: Any
    left_out: int = 0

    @classmethod
    def of(cls, ids: Any) -> Batch:
        """Return a batch with a copy of `ids`, because the script may change `ids` afterwards.

        A tensor is copied asynchronously: this method does not wait for the device.
        """
        if isinstance(ids, torch.Tensor):
            flat = ids.detach().reshape(-1)
            return cls(copied_to_host(flat[:MOST_IDS]), max(0, flat.numel() - MOST_IDS))
        if isinstance(ids, Mapping):
            return cls(dict(ids))
        if isinstance(ids, Collection) and not isinstance(ids, str | bytes):  # an iterator must not be consumed here
            return cls(list(itertools.islice(ids, MOST_IDS)), max(0, len(ids) - MOST_IDS))
        return cls(ids)

    def read(self) -> Any:
        """Return the ids as JSON values, or a text with the reason why they cannot be read.

        Waits for the copy of a tensor from a device, so it must not be called on the training thread.
        """
        try:
            ids = self.ids.wait().tolist() if isinstance(self.ids, Transfer) else self.ids
        except Exception as error:  # noqa: BLE001 - a copy from a device may fail; the event is recorded without it
            return f"a tensor that cannot be read: {type(error).__name__}"
        try:
            return json.loads(json.dumps(ids, default=_plain, allow_nan=False))
        except Exception as error:  # noqa: BLE001 - objects of the script; the event is recorded without them
            return f"a {type(ids).__name__} that JSON cannot hold: {type(error).__name__}"


BatchesByStep = Mapping[int | None, list[Batch]]
"""Batches with sample ids, by the number of the step that has processed them."""


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


class SampleIds(StepObserver):
    """Assigns the sample ids of each batch to the step with the forward pass of the batch.

    If `are_read` is false, no ids are stored.
    """

    def __init__(self, *, are_read: bool) -> None:
        self.are_read = are_read
        self._coming: list[Batch] = []  # batches of the next forward passes
        self._evaluated = 0  # number of them that an evaluation has used meanwhile
        self._has_forward = False  # whether the present step has a training forward pass
        self._now: list[Batch] = []  # batches of the present step
        self._ended: deque[tuple[int | None, list[Batch]]] = deque(maxlen=KEPT_STEPS)
        self._lock = threading.Lock()

    def add(self, ids: Any) -> None:
        """Store the sample ids of the batch that the next forward pass will process."""
        if not self.are_read:
            return
        batch = Batch.of(ids)
        with self._lock:
            del self._coming[: self._evaluated]
            self._evaluated = 0
            self._coming.append(batch)
            del self._coming[:-KEPT_STEPS]  # a limit, if no forward pass is detected

    def on_forward_begin(self) -> None:
        self._has_forward = True
        if self._coming:
            self._take()

    def on_evaluation_begin(self) -> None:
        self._evaluated = len(self._coming)  # a call of `Monitor.batch` before the next training pass drops these

    def on_backward_begin(self) -> None:
        if self._coming and not self._has_forward:  # the model is trained in evaluation mode
            self._take()

    def _take(self) -> None:
        with self._lock:
            self._now += self._coming
            self._coming, self._evaluated = [], 0

    def on_step_end(self, record: StepRecord) -> None:
        with self._lock:
            self._ended.append((record.step, self._now))  # the script may set the number during the step
            self._now, self._has_forward = [], False

    def of(self, step: int | None) -> BatchesByStep:
        """Return the batches of step number `step`; empty if the script has not called `Monitor.batch` for it."""
        with self._lock:
            found = next((batches for number, batches in reversed(self._ended) if number == step), [])
        return {step: found} if found else {}

    def of_last(self, steps: int) -> BatchesByStep:
        """Return the batches of the last `steps` ended steps, without steps that had no call of `Monitor.batch`."""
        with self._lock:
            found = list(self._ended)[-steps:] if steps > 0 else []
        return {step: batches for step, batches in found if batches}


def read(batches: BatchesByStep, most_bytes: int = MOST_BYTES) -> tuple[dict[str, list[Any]], int]:
    """Return the sample ids by step, and the number of ids that are left out. Waits for copies from a device.

    Ids are left out because a batch keeps a limited number of them, or because the returned ids may have at most
    `most_bytes` bytes as JSON.
    """
    limit = most_bytes // max(1, sum(map(len, batches.values())))
    ids: dict[str, list[Any]] = {}
    left_out = 0
    for step, items in batches.items():
        for batch in items:
            whole = batch.read()
            kept = _cut(whole, limit)
            ids.setdefault(str(step), []).append(kept)
            left_out += batch.left_out + (len(whole) - len(kept) if isinstance(whole, list) else 0)
    return ids, left_out


def _cut(ids: Any, most_bytes: int) -> Any:
    if not isinstance(ids, list):
        text = json.dumps(ids)
        return ids if len(text) <= most_bytes else text[: most_bytes // 2]
    while ids and len(json.dumps(ids)) > most_bytes:
        ids = ids[: len(ids) // 2]
    return ids


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
        return Event(type=EventType.CAPTURE, message=message, details=details, **self.firing)


@dataclass(eq=False, kw_only=True)
class CaptureController(StepObserver):
    """Starts and ends the captures of one rank.

    The publisher thread calls `on_anomalies`, which requests captures. The background thread of `ChangeSources` calls
    `_make`, which returns a capture of all ranks. The training thread calls the methods for the events of steps.

    The function `take_flight_record` publishes a flight record, and the function `record` publishes an event. Both may
    wait, so `worker` calls them on its background thread. The function `changed` is called when a capture changes the
    set of tensor kinds that are measured.
    """

    config: CaptureConfig | None
    sources: ChangeSources
    batches: SampleIds
    worker: BackgroundWorker
    rank: int
    record: Callable[[Event], None]
    take_flight_record: Callable[[str], object]
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self._active_quantities = self.sources.change_queue.active_quantities
        self._quiet_until = -1  # firings up to this step do not start a capture
        self._count = 0
        self._requested: list[Reason] = []  # by this rank, for captures that have not begun
        self._reason: Reason | None = None  # of the present capture
        self._first = self._left = self._steps = 0
        self.sources.reactions[CAPTURE] = self._make

    # Firings of this rank, on the publisher thread.

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        """Request a capture if one of the `anomalies` is a firing of a configured rule.

        The reason of the capture is the first firing of a configured rule in causal order. No capture is requested
        during the cooldown after the last firing for which a capture was requested, or if the number of captures has
        reached the limit.
        """
        config = self.config
        if config is None or step is None or step <= self._quiet_until or self._count >= config.max_captures:
            return
        chosen = next((event for event in anomalies if config.chooses(event.rule)), None)
        if chosen is None:
            return
        firing = {name: getattr(chosen, name) for name in _OF_FIRING}
        reason = Reason(rank=self.rank, step=step, message=chosen.message, firing=firing)
        until = step + config.cooldown_steps
        self._quiet_until = until
        self._requested.append(reason)
        try:
            self.sources.request_reaction(asdict(reason), CAPTURE, stamp=step, until=until)
            self._publish("asked", reason, f"capture requested: {reason.message}", self.batches.of(step))
        finally:
            self._flight_record()

    # Captures of all ranks.

    def _make(self, document: Mapping[str, Any], step: int | None) -> PlannedChange:
        """Return the capture for the firing in the JSON object `document`, which has the fields of `Reason`."""
        reason, config = Reason(**document), self.config
        if config is not None:
            self._quiet_until = max(self._quiet_until, reason.step + config.cooldown_steps)
            if reason.rank != self.rank:
                self._flight_record()
        description = {"capture": [] if config is None else list(config.quantities), "reason": reason.message}
        return PlannedChange(step=step, description=description, apply=partial(self._begin, reason))

    def _begin(self, reason: Reason, change: PlannedChange, step: int) -> list[Event]:
        """Start the capture at step number `step`, on the training thread, and return the event about it."""
        config = self.config
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
        self.changed()
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
                    self.changed()
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
        if self.config is None:
            return
        catch_up(FINISH_SECONDS)
        if self._reason is not None:
            self._left -= 1  # the last step has ended as well
            self._end("capture ended with the training", cut_short=self._left > 0)
        self._miss(None, "the training ended before the capture began")
        self.worker.stop(FINISH_SECONDS)

    def state(self) -> dict[str, Any]:
        """Return the number of captures and the reason of the present capture, for the HTTP path /config."""
        if self.config is None:
            return {}
        return {"captures": self._count, "capturing": None if self._reason is None else self._reason.message}

    def _end(self, text: str, *, cut_short: bool) -> None:
        reason, self._reason = self._reason, None
        if reason is not None:
            steps = self._steps - max(0, self._left)
            batches = self.batches.of_last(steps)
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
            self.record(reason.event(state, text, **more, samples=samples, samples_left_out=left_out))

        self.worker.put(publish)

    def _flight_record(self) -> None:
        if self.config is not None and self.config.flight_record:
            self.worker.put(partial(self.take_flight_record, CAPTURE))
