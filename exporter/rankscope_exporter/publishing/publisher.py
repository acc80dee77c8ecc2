"""Turns drafts into step records on a thread of its own: finishes statistics, judges them, publishes the record."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.monitored_model import with_chunk_number
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.publishing.anomaly_detector import AnomalyDetector, Firing, StepVerdict
from rankscope_exporter.records.host_transfer import Deferred, Row
from rankscope_exporter.records.pending_step import PendingStep, skipped_event
from rankscope_exporter.records.step_record import Scalar, Statistics, StepRecord
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.serving.latest_values import NO_KIND
from rankscope_exporter.statistics import Finished, finish
from rankscope_exporter.statistics.selection import Published, SelectionMasks

IDLE_FLUSH_SECONDS = 2.0
"""A finished step does not wait longer than this for the next one to begin: a checkpoint may take minutes."""

MAX_QUEUE = 10_000
"""Drafts that may wait; more are dropped and counted, since training must not fill the memory."""

_OF_CHUNKS: Final = frozenset({"features", "histograms"})
"""Datasets whose rows say the chunk of a model by their names alone."""

CUMULATIVE = {"tokens": "tokens_total", "samples": "samples_total"}


class Publisher:
    """One daemon thread between the training thread and the channel. Records leave in the order drafts arrived."""

    def __init__(
        self,
        book: PlanRegistry,
        detector: AnomalyDetector,
        publish: Callable[[StepRecord], object],
        *,
        boundary: ErrorBoundary,
        on_firing: Callable[[int | None, Sequence[Event]], None],
    ) -> None:
        self._book = book
        self._judge = detector
        self._choices = SelectionMasks()
        self._publish_record = publish
        self._boundary = boundary
        self._on_firing = on_firing
        self._queue: queue.SimpleQueue[PendingStep | threading.Event | None] = queue.SimpleQueue()
        self._thread = OwnThread(target=self._run, name="rankscope-publisher")
        self._totals: dict[str, float] = {}
        self.pp_stage: int | None = None
        """Stage of the pipeline that anomalies are said to be of."""
        self.has_chunks = False
        """Whether the model is a list of chunks, with whose numbers names begin."""
        self.published: Callable[[], None] = lambda: None
        self.flush_idle: Callable[[float], None] = lambda _seconds: None
        self.finished: Callable[[], None] = lambda: None
        """Called on the thread when nothing follows."""
        self.cpu_seconds = 0.0
        """CPU time of the thread so far."""
        self.events_left_out = 0
        self.dropped = 0  # drafts that found the queue full

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, pending_step: PendingStep) -> None:
        """Take over a draft; never blocks."""
        if self._queue.qsize() >= MAX_QUEUE:
            self.dropped += 1
        else:
            self._queue.put(pending_step)

    def catch_up(self, timeout_seconds: float) -> bool:
        """Wait until everything that is queued now has been published, and return whether that was done in time."""
        if threading.current_thread() is self._thread:
            return False
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Publish what is queued, end the thread, and return whether that was done in time."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        looked_at = time.monotonic()
        while True:
            # Also where much else is published: an evaluation that announces phases must not hold up the step before.
            if time.monotonic() - looked_at >= IDLE_FLUSH_SECONDS / 2:
                self._boundary.call("flush of an idle step", self.flush_idle, IDLE_FLUSH_SECONDS)
                looked_at = time.monotonic()
            try:
                pending_step = self._queue.get(timeout=IDLE_FLUSH_SECONDS / 2)
            except queue.Empty:
                continue
            if pending_step is None:
                self.finished()
                return
            if isinstance(pending_step, threading.Event):
                pending_step.set()
                continue
            self._boundary.call("publishing a step", self._publish, pending_step)
            self.cpu_seconds = time.thread_time()

    def _publish(self, pending_step: PendingStep) -> None:
        statistics, judgement = self._boundary.call("statistics of a step", self._statistics, pending_step) or (None, None)
        read = (self._boundary.call("a logged number", pending.scalar) for pending in pending_step.pending)
        scalars = [scalar for scalar in read if scalar is not None]
        events = list(pending_step.events)
        found_inf = [self._boundary.call("found_inf", pending.scalar) for pending in pending_step.found_inf]
        if any(scalar is not None and scalar.value for scalar in found_inf):
            events.append(skipped_event())
        if judgement is not None:
            events += [self._anomaly(firing, judgement.call_order(firing.entry)) for firing in judgement.firings]
            self.events_left_out += judgement.left_out
        firing = set(judgement.firing) if judgement is not None else set()
        for event in self._judged_scalars(scalars):
            events.append(event)
            firing.add((str(event.rule), NO_KIND))
        scalars += self._running_totals(scalars)
        for later in pending_step.later:  # not judged: bytes and seconds of ours are no numbers of the training
            scalars += self._boundary.call(f"reading {getattr(later, '__qualname__', 'a number')}", later) or ()
        record = StepRecord(
            ts=pending_step.ts,
            step=pending_step.step,
            statistics=statistics,
            scalars=tuple(scalars),
            events=tuple(events),
            firing=frozenset(firing),
            **self._other_rows(pending_step),
        )
        self._boundary.call("publishing a step", self._publish_record, record)
        anomalies = [event for event in events if event.type == EventType.ANOMALY]
        if anomalies:
            self._on_firing(pending_step.step, anomalies)

    def _statistics(self, pending_step: PendingStep) -> tuple[Statistics | None, StepVerdict | None]:
        if pending_step.copy is None:
            return None, None
        try:
            finished = finish(pending_step.copy)
        finally:
            self.published()
        known = len(finished.present)
        published = self._choices.of(pending_step.ops, known)
        finished = published.only(finished) if published is not None else finished
        self._judge.extend(self._book.entries[:known], self._book.owners[:known])
        judgement = self._judge.observe(finished, pending_step.call_order)
        values, counts = arrow_statistics(finished, judgement.baselines, published)
        if published is None:
            return Statistics(self._book.plan(known), values, counts), judgement
        measured = arrow_counts(finished.counts, np.broadcast_to(finished.present, finished.counts.shape))
        return Statistics(self._book.plan(known), values, counts, pending_step.ops, measured), judgement

    def _other_rows(self, pending_step: PendingStep) -> dict[str, Any]:
        rows = {name: list(known) for name, known in pending_step.rows.items()}
        for deferred in pending_step.deferred:
            read = self._boundary.call(f"rows of {deferred.dataset}", self._rows_of, deferred)
            if deferred.dataset is not None:
                rows.setdefault(deferred.dataset, []).extend(read or ())
        return {name: tuple(items) for name, items in rows.items()}

    def _rows_of(self, deferred: Deferred) -> Sequence[Row]:
        read = deferred.read()
        return [with_chunk_number(row) for row in read] if self.has_chunks and deferred.dataset in _OF_CHUNKS else read

    def _anomaly(self, firing: Firing, order: int | None) -> Event:
        entry = self._book.entries[firing.entry]
        return Event(
            type=EventType.ANOMALY,
            severity=firing.rule.severity,
            rule=firing.rule.name,
            kind=entry.kind,
            tensor=entry.tensor,
            op=firing.op,
            value=firing.value,
            baseline=firing.baseline,
            threshold=firing.threshold,
            pp_stage=self.pp_stage,
            vpp_stage=entry.vpp_stage,
            micro_step=entry.micro_step,
            call_id=order,
            message=_sentence(firing, entry),
        )

    def _judged_scalars(self, scalars: Iterable[Scalar]) -> Iterable[Event]:
        for scalar in scalars:
            rule = self._judge.check_scalar(scalar.name, scalar.value)
            if rule is not None:
                yield Event(
                    type=EventType.ANOMALY,
                    severity=rule.severity,
                    rule=rule.name,
                    op=scalar.name,
                    value=scalar.value,
                    threshold=rule.limit(),
                    pp_stage=self.pp_stage,
                    message=f"{rule.name}: {scalar.name} is {scalar.value:g}",
                )

    def _running_totals(self, scalars: Sequence[Scalar]) -> list[Scalar]:
        return [total for scalar in scalars for total in self._total(scalar)]

    def _total(self, item: Scalar) -> Iterable[Scalar]:
        total = CUMULATIVE.get(item.name)
        if total is not None and math.isfinite(item.value):  # one NaN must not spoil the sum for good
            self._totals[total] = self._totals.get(total, 0.0) + item.value
            yield Scalar(total, self._totals[total], item.name)


def _sentence(firing: Firing, entry: PlanEntry) -> str:
    where = f"{firing.rule.name} on {entry.kind} of {entry.label}: {firing.op} is {firing.value:g}"
    if firing.baseline:
        return f"{where}, {firing.value / firing.baseline:.3g} times its average"
    return f"{where} of {math.prod(entry.shape)} elements" if firing.op in ("nans", "infs") else where


def arrow_statistics(
    finished: Finished, baselines: npt.NDArray[np.float32], published: Published | None = None
) -> tuple[pa.FloatArray, pa.Int64Array]:
    """Return a record's `values` and `counts`: statistic-major, null where a number does not exist.

    NaN stands for null up to here, which is safe because no statistic over finite elements is ever NaN.
    """
    numbers = _arrow(np.concatenate((finished.values, baselines)), pa.float32())
    values = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float32()), numbers)
    exists: npt.NDArray[np.bool_] = np.broadcast_to(finished.present, finished.counts.shape)
    return values, arrow_counts(finished.counts, exists & published.counts if published is not None else exists)


def arrow_counts(counts: npt.NDArray[np.int64], exists: npt.NDArray[np.bool_]) -> pa.Int64Array:
    """Return counts statistic-major, null where `exists` is false."""
    numbers = _arrow(counts, pa.int64())
    if exists.all():
        return numbers
    told = _arrow(exists.astype(np.uint8), pa.uint8()).cast(pa.bool_())
    return pc.if_else(told, numbers, pa.scalar(None, pa.int64()))


def _arrow(numbers: npt.NDArray[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return the elements of `numbers` in row-major order as an Arrow array over the same memory."""
    return pa.Array.from_buffers(arrow_type, numbers.size, [None, pa.py_buffer(np.ascontiguousarray(numbers))])
