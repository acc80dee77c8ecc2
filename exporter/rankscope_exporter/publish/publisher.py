"""The publisher thread, which finishes the statistics of each step, evaluates the rules, and publishes the record.

Decides which steps with gradients and without an update have skipped their update, and publishes events for them.

A loop may need several backward passes for one update, and delete the gradients between them, as gradient surgery and
SAM do. Each of these passes looks like a step that skips its update. The loop repeats the same number of them before
each update. An event is therefore held back until it is known whether the number is repeated.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.events import WHOLE_MODEL, Event, EventType, Severity
from rankscope_contract.model.kinds import COUNT_OPS, GRADIENT_KINDS, OPS, VALUE_OPS
from rankscope_contract.model.schema import WIRE_VALUE_OPS, PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import CurveRule
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread, no_fork
from rankscope_exporter.publish.anomaly_detector import (
    AnomalyDetector,
    EntryFiring,
    SilentKinds,
    StepVerdict,
    in_causal_order,
)
from rankscope_exporter.publish.exposition import NO_KIND
from rankscope_exporter.publish.score_frames import StepScores
from rankscope_exporter.publish.sinks import Sinks
from rankscope_exporter.records.plan import Finished, Published
from rankscope_exporter.records.record import (
    Deferred,
    Pending,
    Row,
    Scalar,
    Statistics,
    StepBacklog,
    StepEvents,
    StepRecord,
    skipped_event,
)

log = logging.getLogger("rankscope")

MOST_PASSES: Final = 8
"""Largest number of backward passes before an update that is considered. More skipped steps in a row are reported."""

_SEVERAL_PASSES: Final = (
    "every step with an update follows the same number of steps whose gradients were deleted without an update: if an "
    'update needs several passes, as with gradient surgery or SAM, set steps="explicit" and call end_step() after it'
)


class SkippedSteps:
    """The skipped steps that are not reported yet. Used on the publisher thread only.

    `publish` stores a record with the event of a skipped step. `tell` is called once, with a notice, if the loop
    repeats a fixed number of skipped steps before each update.
    """

    def __init__(self, publish: Callable[[StepRecord], object], tell: Callable[[str], None]) -> None:
        self._publish = publish
        self._tell: Callable[[str], None] | None = tell
        self._held: list[StepRecord] = []
        self._count = self._before = 0  # skipped steps since the last update, and before it
        self._passes = 0  # repeated number of skipped steps before each update; 0 if none is known
        self._is_irregular = False  # the latest numbers differed, and no event is held back

    def is_reported(self, step: StepRecord) -> bool:
        """Return whether `step` has certainly skipped its update.

        Otherwise, add its update, or add it to the skipped steps.
        """
        if not step.is_skipped:
            self.updated()
        elif not step.skip_is_certain:
            self.skipped(step)
        return bool(step.is_skipped) and step.skip_is_certain

    def skipped(self, step: StepRecord) -> None:
        """Add `step`, which has ended without an update."""
        events = [skipped_event(is_certain=False)]
        self._held.append(StepRecord(ts=step.ts, monotonic=step.monotonic, step=step.step, events=events))
        self._count += 1
        if self._count > (self._passes or self._before or MOST_PASSES) or self._is_irregular:
            self._report()

    def updated(self) -> None:
        """Add a step with an update."""
        count, before = self._count, self._before
        self._count, self._before = 0, count
        if count and count in (before, self._passes):
            self._passes, self._is_irregular = count, False
            self._held.clear()
            if self._tell is not None:
                self._tell(_SEVERAL_PASSES)
                self._tell = None
        elif self._passes:
            self._passes = 0
        elif before:
            self._report()

    def finish(self) -> None:
        """Report the steps that were held back, because training ends."""
        if not self._passes:
            self._report()

    def _report(self) -> None:
        self._passes, self._is_irregular = 0, True
        held, self._held = self._held, []
        for record in held:
            self._publish(record)


MOST_DELAYED_SECONDS: Final = 0.25
"""Longest time that the record of a step waits for the next backward pass.

During a forward pass, the training thread would wait for the interpreter lock while the record is published.
"""
IDLE_FLUSH_SECONDS: Final = 2.0
"""Longest time in seconds that a finished step waits for the next step to begin, before it is published.

The next step may begin late, because a checkpoint between two steps can take minutes.
"""

MAX_QUEUE: Final = 10_000
"""Largest number of records that wait for the publisher.

Further records are dropped and counted, so that waiting records do not fill the memory.
"""

STALL_SECONDS: Final = 10.0
"""Time in seconds after which the publisher thread counts as blocked at the end of training, if it publishes nothing.

A record whose statistics wait for the last operations of the device normally takes less.
"""

_OF_CHUNKS: Final = frozenset({"features", "histograms"})
"""Datasets without a column for the model chunk. The tensor name in their rows contains the number of the chunk."""

CUMULATIVE: Final = {"tokens": "tokens_total", "samples": "samples_total"}
"""Names of scalars of which the sum over all steps so far is also published, each with the name of this sum."""


class StepQueue:
    """The queue of records from the training thread to the publisher thread."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[StepRecord | Callable[[], object] | None] = queue.SimpleQueue()
        """The queue of records, of functions and of None.

        The publisher thread calls a function when it has published all records that were queued before the function.
        When it takes None from the queue, it publishes the records that are still queued, and ends. Queuing takes no
        lock, and is allowed in a destructor.
        """
        self.dropped = 0  # records that found the queue full
        self.is_due = threading.Event()
        """Set when the next backward pass has begun: torch computes then without the interpreter lock."""

    def put(self, record: StepRecord) -> None:
        """Add a record, or count it as dropped if the queue is full. Never blocks; any thread may call it."""
        if record.is_skipped is not None:
            self.is_due.clear()
        if self.items.qsize() >= MAX_QUEUE:
            self.dropped += 1
        else:
            self.items.put(record)


@dataclass(eq=False, kw_only=True)
class Publisher:
    """One daemon thread that finishes and publishes the queued records of steps, in the order of the queue.

    `publish` stores a record. The `sinks` then receive it. `events` calls observers before a record is published, and
    after a record with anomalies. `flush_idle` publishes the step that has not ended yet, if no hook was called for the
    number of seconds in its argument. `pp_stage` is the pipeline stage of this rank. If `has_chunks` is true, names of
    tensors begin with the number of a model chunk. The thread queries the device within `queries()`.
    """

    steps: StepQueue
    backlog: StepBacklog
    detector: AnomalyDetector
    scores: StepScores
    boundary: ErrorBoundary
    publish: Callable[[StepRecord], object]
    events: StepEvents
    sinks: Sinks
    flush_idle: Callable[[float], None]
    silent_kinds: SilentKinds
    pp_stage: int | None
    has_chunks: bool
    queries: Callable[[], contextlib.AbstractContextManager[object]]

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self._publish_record, self.silent_kinds.tell)
        self._thread = OwnThread(target=self._run, name="rankscope-publisher", on_fault=self.boundary.report)
        self._totals = dict.fromkeys(CUMULATIVE.values(), 0.0)
        self._taken = 0  # items that the thread has taken from the queue
        self._reported_lost = 0  # dropped records for which an event was published
        self._drops = self._is_blocked = self._is_publishing = False
        self.events_left_out = 0

    @property
    def cpu_seconds(self) -> float:
        return self._thread.cpu_seconds

    @property
    def queued(self) -> int:
        """Return the number of records that wait for this thread, plus the dropped ones that no event has reported."""
        dropped = self.steps.dropped - self._reported_lost
        return self.steps.items.qsize() + self._is_publishing + dropped

    def start(self) -> None:
        self._thread.start()

    def catch_up(self, timeout_seconds: float) -> bool:
        """Wait until all records that are queued now are published; return False after `timeout_seconds`."""
        if self.is_current_thread:
            return False
        reached = threading.Event()
        self.steps.items.put(reached.set)
        self.steps.is_due.set()
        return reached.wait(timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Publish the queued records and end the thread; return whether it has ended.

        Wait while the thread publishes at least one record in STALL_SECONDS (10 s), at most `timeout_seconds`.
        """
        self.steps.items.put(None)
        self.steps.is_due.set()
        deadline, taken, taken_at = time.monotonic() + timeout_seconds, -1, 0.0
        while self._thread.is_alive() and (now := time.monotonic()) < deadline:
            if self._taken != taken:
                taken, taken_at = self._taken, now
            elif now - taken_at > STALL_SECONDS:
                break
            self._thread.join(min(0.1, deadline - now))  # polls, to see whether the thread advances
        return not self._thread.is_alive()

    def drop_queue(self, timeout_seconds: float) -> None:
        """Drop and count the queued records, publish the exit event, and end the thread.

        If the thread is blocked for `timeout_seconds`, for example by the device, the calling thread does this. The
        record that blocks the thread then counts as dropped.
        """
        self._drops = True
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._is_blocked = True
            self.steps.dropped += 1
            self._process_queue()

    def publish_exit(self, record: StepRecord) -> None:
        """Publish the number of records that were dropped, and then the exit event. Called after the last record."""
        self._report_lost()
        self._publish(record)

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        checked_at = time.monotonic()
        while True:
            # Also while other records arrive: an evaluation that announces phases must not delay the step before it.
            if time.monotonic() - checked_at >= IDLE_FLUSH_SECONDS / 2:
                self._call("publishing the last step of an idle training loop", self.flush_idle, IDLE_FLUSH_SECONDS)
                self._call("publishing the number of lost records", self._report_lost)
                checked_at = time.monotonic()
            try:
                item = self.steps.items.get(timeout=IDLE_FLUSH_SECONDS / 2)
            except queue.Empty:
                continue
            if item is None:
                break
            self._process(item)
        # The last records can report a fault, whose record is behind the None.
        self._process_queue()
        self._process(self.skipped.finish)
        if not self._is_blocked:
            self.sinks.close()

    def _process_queue(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self.steps.items.get_nowait()
                if item is not None:
                    self._process(item)

    def _process(self, item: StepRecord | Callable[[], object]) -> None:
        self._taken += 1
        if not isinstance(item, StepRecord):
            self._call("a function after the records before it", item)
        elif self._drops:
            self.steps.dropped += 1
        else:
            self._is_publishing = True
            if item.is_skipped is not None and self.steps.items.empty():
                self.steps.is_due.wait(MOST_DELAYED_SECONDS)
            self._call("publishing a step", self._publish, item)
            self._is_publishing = False

    def _report_lost(self) -> None:
        """Publish an event with the number of records that were dropped since the last such event."""
        lost, self._reported_lost = self.steps.dropped - self._reported_lost, self.steps.dropped
        if lost:
            why = "the disk or the machine of the rank was too slow for them"
            if lost == self.steps.dropped:
                log.warning("records of this rank are lost: %s; an event `gap` has the number", why)
            event = Event(
                type=EventType.GAP,
                severity=Severity.WARNING,
                value=float(lost),
                message=f"{lost} record{'' if lost == 1 else 's'} lost: {why}",
                details={"records": lost, "reason": why},
            )
            self._publish_record(StepRecord.now(events=[event]))

    def _call(self, where: str, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)`, which may query the device while the training captures a CUDA graph."""
        try:
            with self.queries(), no_fork():
                function(*args)
        except Exception as error:  # noqa: BLE001 - as the error boundary does, without another call
            self.boundary.report(where, error)

    def _publish(self, record: StepRecord) -> None:
        self.events.on_publish(record)
        call = self.boundary.call
        where = "computing the statistics of a step"
        record.statistics, verdict, finished = call(where, self._statistics, record) or (None, None, None)
        scalars = _scalars_of(record.pending, "a logged number", call)
        if any(map(attrgetter("value"), _scalars_of(record.found_inf, "found_inf", call))):
            record.events.append(skipped_event())
        if record.is_skipped is not None and self.skipped.is_reported(record):
            record.events.append(skipped_event())
        firing: set[tuple[str, str]] = set()
        if verdict is not None:
            for item in verdict.firings:
                record.events.append(self._anomaly(item))
            firing |= verdict.firing
            self.events_left_out += verdict.left_out
        later: list[Scalar] = []
        for function in record.later:
            later += call(f"reading {getattr(function, '__qualname__', 'a number')}", function) or ()
        logged = (record, finished, [*scalars, *later], self.pp_stage)
        events, scores = call("judging a step", self.scores.judge, *logged) or ([], [])
        for event in (*self._scalar_anomalies(scalars), *events):
            record.events.append(event)
            firing.add((str(event.rule), event.kind or NO_KIND))
        scalars += self._changed_totals(scalars) + scores + later
        record.scalars, record.firing = scalars, frozenset(firing)
        for deferred in record.deferred:
            read = call(f"rows of {deferred.dataset}", _rows_of, deferred, self.has_chunks)
            record.rows.setdefault(deferred.dataset, []).extend(read or ())
        if record.expected:
            call("looking for kinds without rows", self.silent_kinds.judge, record.expected, record.rows)
        for dataset, items in record.rows.items():
            setattr(record, dataset, items)
        record.release()
        self._publish_record(record)

    def _publish_record(self, record: StepRecord) -> None:
        if self._is_blocked and self.is_current_thread:
            return  # it was counted as dropped, and the exit event is published
        try:
            self.publish(record)
        finally:
            if self.sinks.by_name and self.is_current_thread:
                self.sinks.put(record)
            self._is_publishing = False  # from here on, the number of the newest record includes it
            if record.events:
                anomalies = in_causal_order(event for event in record.events if event.type == EventType.ANOMALY)
                if anomalies:
                    self.events.on_anomalies(record.step, anomalies)

    def _statistics(self, record: StepRecord) -> tuple[Statistics, StepVerdict, Finished] | None:
        version = record.plan
        if record.copy is None or version is None:
            return None
        plan, published = version.named, version.published
        try:
            finished = record.copy.finish(plan.plan.value_ops)
        finally:
            self.backlog.published += 1
        if record.is_skipped and _is_overflow(finished.counts, version.entries):
            record.skip_is_certain = True
        if record.expected:
            self.silent_kinds.see(plan.plan, finished.present)
        finished = published.only(finished) if published is not None else finished
        self.detector.follow(version.entries, version.owners)
        verdict = self.detector.observe(finished, record.arrived)
        values, counts = arrow_statistics(finished, verdict.baselines, published, plan.plan.value_ops)
        if published is None:
            return Statistics(plan, values, counts), verdict, finished
        measured = arrow_counts(finished.counts, np.broadcast_to(finished.present, finished.counts.shape))
        return Statistics(plan, values, counts, version.ops, measured), verdict, finished

    def _anomaly(self, firing: EntryFiring) -> Event:
        entry = self.detector.entries[firing.entry]
        return _event_of(
            firing.rule,
            self.pp_stage,
            kind=entry.kind,
            tensor=entry.tensor,
            op=firing.op,
            value=firing.value,
            baseline=firing.baseline,
            vpp_stage=entry.vpp_stage,
            micro_step=entry.micro_step,
            call_id=firing.call_id,
            message=_message(firing, entry),
        )

    def _changed_totals(self, scalars: Sequence[Scalar]) -> list[Scalar]:
        totals = []
        for item in scalars:
            total = CUMULATIVE.get(item.name)
            if total is not None and math.isfinite(item.value):  # one NaN would make all later totals NaN
                self._totals[total] += item.value
                totals.append(Scalar(total, self._totals[total], item.name))
        return totals

    def _scalar_anomalies(self, scalars: Sequence[Scalar]) -> Iterator[Event]:
        for scalar in scalars:
            firing = self.detector.check_scalar(scalar.name, scalar.value, scalar.labels_text)
            if firing is not None:
                rule, baseline = firing.rule, None
                text = f"{rule.name}: {scalar.name} is {scalar.value:g}"
                if isinstance(rule, CurveRule):
                    baseline, text = firing.baseline, rule.message(scalar.name, scalar.value, firing.baseline)
                yield _event_of(
                    rule, self.pp_stage, op=scalar.name, value=scalar.value, baseline=baseline, message=text
                )


def _event_of(rule: AnomalyRule, pp_stage: int | None, **fields: Any) -> Event:
    fields |= {"severity": rule.severity, "rule": rule.name, "threshold": rule.limit()}
    return Event(type=EventType.ANOMALY, pp_stage=pp_stage, **fields)


def _scalars_of(numbers: Sequence[Pending], where: str, call: Callable[..., Any]) -> list[Scalar]:
    found = (call(where, pending.scalar) for pending in numbers)
    return [scalar for scalar in found if scalar is not None]


def _rows_of(deferred: Deferred, has_chunks: bool) -> Sequence[Row]:  # noqa: FBT001 - called by the boundary
    read = deferred.read()
    if not has_chunks or deferred.dataset not in _OF_CHUNKS:
        return read
    names = (row["tensor"] if "tensor" in row else row["module"] for row in read)
    return [{**row, "vpp_stage": int(name.partition(".")[0])} for row, name in zip(read, names, strict=True)]


def _is_overflow(counts: npt.NDArray[np.int64], entries: Sequence[PlanEntry]) -> bool:
    """Return whether a gradient of a step has a NaN or an Inf."""
    odd = counts[[COUNT_OPS.index("nans"), COUNT_OPS.index("infs")]]
    return any(entries[position].kind in GRADIENT_KINDS for position in np.flatnonzero((odd > 0).any(axis=0)).tolist())


def _message(firing: EntryFiring, entry: PlanEntry) -> str:
    where = f"{firing.rule.name} on {entry.kind} of {entry.label or WHOLE_MODEL}: {firing.op} is {firing.value:g}"
    if firing.baseline:
        return f"{where}, {firing.value / firing.baseline:.3g} times its average"
    return f"{where} of {firing.numel} elements" if firing.op in ("nans", "infs") else where


def arrow_statistics(
    finished: Finished,
    baselines: npt.NDArray[np.float32],
    published: Published | None = None,
    value_ops: tuple[str, ...] = WIRE_VALUE_OPS,
) -> tuple[pa.FloatArray, pa.Int64Array]:
    """Return the columns `values` (float32) and `counts` (int64) of a record.

    A null means that a plan entry has no value of a statistic at this step. A column begins with the values of the
    first statistic for all plan entries. The values of the second statistic follow, and so on. In the argument
    `finished`, NaN represents null. This is safe because no statistic over finite elements is NaN.
    """
    numbers = np.concatenate((finished.values[_rows_of_ops(value_ops)], baselines))
    exists: npt.NDArray[np.bool_] = np.broadcast_to(finished.present, finished.counts.shape)
    counts = arrow_counts(finished.counts, exists if published is None else exists & published.counts)
    return pa.array(numbers.ravel(), pa.float32(), from_pandas=True), counts  # with it, NaN becomes null


@lru_cache
def _rows_of_ops(value_ops: tuple[str, ...]) -> list[int]:
    return [VALUE_OPS.index(op) for op in value_ops if op in OPS]  # the others are baselines


def arrow_counts(counts: npt.NDArray[np.int64], exists: npt.NDArray[np.bool_]) -> pa.Int64Array:
    """Return `counts` [statistics, entries] in row-major order as an int64 array, null where `exists` is false."""
    return pa.array(counts.ravel(), pa.int64(), mask=~exists.ravel())
