"""Incidents of followed logs: their texts, and the reports that are sent about them.

Failures, and logs that cannot be read, are sent as one report for each machine. The module `notify.announcer` stores
each incident before its message is sent, so that a restarted process neither repeats nor forgets a message.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

from rankscope_contract.model.events import Severity
from rankscope_ingest.base.background import start_task
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.notify.announcer import RETRY_SECONDS, Announcer
from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.notify.messages import resolved_message
from rankscope_ingest.notify.notifiers import Notifier
from rankscope_ingest.pipeline.rows import Stamp, incident_row
from rankscope_ingest.runs.incident import MUTED, RESOLVED, Incident, LogReport, Symptom
from rankscope_ingest.runs.text import NO_PLACE, Place, headline, wrong_values
from rankscope_ingest.watch.intake import Row, WatchStore
from rankscope_ingest.watch.judge import Condition, Verdict
from rankscope_ingest.watch.rows import LogRow, LogRows
from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.rule_names import (
    LOG_UNREADABLE,
    RUN_FAILED,
    RUN_FINISHED,
    RUN_SLOW,
    RUN_STALLED,
    RUN_STOPPED,
)

log = logging.getLogger(__name__)

RULES: Final = {
    Condition.SLOW: (RUN_SLOW, Severity.WARNING),
    Condition.STALLED: (RUN_STALLED, Severity.CRITICAL),
    Condition.FAILED: (RUN_FAILED, Severity.CRITICAL),
    Condition.STOPPED: (RUN_STOPPED, Severity.WARNING),
    Condition.FINISHED: (RUN_FINISHED, Severity.INFO),
}
PER_HOST: Final = frozenset({RUN_FAILED, LOG_UNREADABLE})
"""Rules of which the incidents of all logs of one machine are sent as one report."""

MAX_ERRORS: Final = 12
GUIDE: Final = {
    "loss": "falls; a missing value or NaN means that training diverges",
    "load_balancing_loss": "falls, and then remains steady",
    "eval_loss": "falls; if it rises while the loss falls, the model overfits",
    "learning_rate": "rises during warm-up, then follows its schedule",
    "grad_norm": "falls after the start; a rise is often visible some rows before the loss rises",
    "step_seconds": "falls during warm-up, and then remains steady; a rise: a slow rank, slow input, a throttled GPU",
    "tflops_per_gpu": "rises during warm-up, and then remains steady",
    "samples_per_second": "rises during warm-up, and then remains steady",
    "tokens_per_second": "rises during warm-up, and then remains steady",
    "global_batch_size": "remains constant, or rises in the steps of its schedule",
    "loss_scale": "1 in bf16; in fp16 it falls after an overflow and recovers",
    "skipped_iterations": "0; in fp16, some at the start",
    "nan_iterations": "0",
    "num_zeros": "fluctuates without a trend",
    "params_norm": "changes slowly",
}
"""For each quantity, its course in a normal training. The order is that of the columns in a message."""


def row_texts(rows: Iterable[LogRow]) -> tuple[str, ...]:
    """Return one line for each row: step, time and the known quantities."""
    texts = []
    for row in rows:
        moment = None if row.written is None else dt.datetime.fromtimestamp(row.written, dt.UTC)
        parts = [
            "" if row.step is None else f"step {row.step}",
            "" if row.rank is None else f"rank {row.rank}",
            "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}",
            *(f"{name} {row.values[name]:.6g}" for name in GUIDE if name in row.values),
        ]
        texts.append("  ".join(filter(None, parts)))
    return tuple(texts)


def guide_of(rows: Sequence[LogRow], planned_steps: int | None) -> tuple[str, ...]:
    """Return for each quantity in `rows` its first and last value, and its course in a normal training."""
    lines = [] if planned_steps is None else [f"steps: {planned_steps:,} are planned"]
    for name, hint in GUIDE.items():
        values = [row.values[name] for row in rows if name in row.values]
        finite = [value for value in values if math.isfinite(value)]
        if values:
            course = f"{finite[0]:.6g} to {finite[-1]:.6g}" if finite else ""
            wrong = f"NaN or infinite in {len(values) - len(finite)} of {len(values)} rows"
            course = ", ".join(filter(None, (course, wrong if len(finite) < len(values) else "")))
            lines.append(f"{name}: {course}; in a normal training: {hint}")
    return tuple(lines)


def condition_incident(
    verdict: Verdict, rows: LogRows, *, run: str, address: str, attempt: int | None = None
) -> Incident | None:
    """Return the incident of a condition of an attempt, by default the latest; None if it is not reported."""
    if verdict.condition not in RULES:
        return None
    rule, severity = RULES[verdict.condition]
    attempt = rows.attempt if attempt is None else attempt
    step = rows.last_steps.get(attempt)
    position = step if step is not None else (-1 if rows.last is None else rows.last.seq)
    key = f"{rule}:{attempt}:{position}:{run}"
    values = {name: getattr(verdict, name) for name in ("value", "baseline", "threshold")}
    severe = verdict.severity or severity
    found = _incident(rule, severe, verdict.reason, key, step, run=run, attempt=attempt, ranks=address, **values)
    if verdict.condition in {Condition.FAILED, Condition.STOPPED} and attempt == rows.attempt:
        errors = [f"{name}: {text}" for name, texts in rows.errors.items() for text in texts]
        left = len(errors) - MAX_ERRORS
        found.reports = (*errors[:MAX_ERRORS], *([f"and {left} more errors"] if left > 0 else []))
    return found


def log_report(rows: LogRows, first: Symptom, most: int, planned_steps: int | None) -> LogReport:
    """Return the last rows up to the step of `first`, at most `most`, and hints for reading them."""
    end = math.inf if first.step is None else first.step
    own = [row for row in rows.rows if row.attempt == first.attempt and (row.step or 0) <= end]
    return LogReport(address=first.ranks_named, rows=row_texts(own[-most:]), guide=guide_of(own[-most:], planned_steps))


def unreadable_incident(reason: str, *, run: str, attempt: int, address: str, since: float, severity: str) -> Incident:
    """Return the incident of a log that cannot be read since the time `since` (seconds since 1970)."""
    key = f"{LOG_UNREADABLE}:{since:.0f}:{address}"
    return _incident(LOG_UNREADABLE, severity, reason, key, run=run, attempt=attempt, ranks=address)


def _incident(rule: str, severity: str, cause: str, key: str, step: int | None = None, **columns: Any) -> Incident:
    first = Symptom(rule=rule, rank=None, step=step, severity=severity, causal=(), **columns)
    incident = Incident(first=first, severity=severity, opened_at=time.monotonic(), last_step=step, events=1)
    incident.is_settled, incident.cause, incident.fixed_key = True, cause, key
    return incident


class Reporter:
    """Stores incidents of followed logs and sends messages about them.

    Messages are sent in tasks, so that a slow receiver does not delay the logs.
    """

    def __init__(
        self,
        store: WatchStore,
        notifiers: Sequence[Notifier],
        *,
        deliveries: Deliveries | None = None,
        retry_seconds: Sequence[float] = RETRY_SECONDS,
        place: Place = NO_PLACE,
    ) -> None:
        """`deliveries` counts the notifications, together with those of the service."""
        self._store = store
        self._rows: list[Row] = []
        self._batch: Batch | None = None  # a commit that failed
        self._keys: set[str] = set()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._announcing: dict[str, asyncio.Task[None]] = {}  # by the key of the incident
        self._grouped: dict[tuple[str, str], tuple[float, list[Incident]]] = {}
        self._announcer = Announcer(
            notifiers,
            record=self.record,
            commit=self.commit,
            deliveries=deliveries or Deliveries(),
            retry_seconds=retry_seconds,
            place=lambda: place,
        )

    def record(self, incident: Incident, state: str) -> None:
        """Add an event which reports that `incident` reached `state` to the rows of the next commit."""
        stamp = self._store.stamp()
        self._rows.append(incident_row(incident, state, Stamp(stamp["ts"], stamp["ordinal"])))

    async def commit(self) -> None:
        """Store the pending rows. A caller that is cancelled does not cancel the commit."""
        await asyncio.shield(self._spawn(self._commit()))

    async def _commit(self) -> None:
        async with self._turn:
            if self._batch is None and self._rows:
                self._batch = Batch(tables={"events": rows_table("events", self._rows)}, watermarks={})
                self._rows = []
            batch = self._batch
            if batch is None:
                return
            try:
                # The store recognizes a batch that is appended again only if it is the same object.
                await self._store.run(lambda: self._store.append(batch))
                self._batch = None
            except StoreError as error:
                log.warning("incidents of followed logs cannot be stored, retrying with the next one: %s", error)

    def remember(self, incident: Incident) -> None:
        """Do not announce `incident`, which an earlier process has stored."""
        self._keys.add(incident.key)

    def announce(self, incident: Incident, machine: str, now: float, *, wait_seconds: float) -> None:
        """Store and send `incident`, unless an incident with the same key is stored.

        Incidents of PER_HOST wait for those of other logs of the same machine, for `wait_seconds`.
        """
        if incident.key in self._keys:
            return
        self._keys.add(incident.key)
        first = incident.first
        if first.op is not None and not incident.is_muted:  # a condition is displayed as the state of the log
            level = logging.CRITICAL if incident.severity == Severity.CRITICAL else logging.WARNING
            log.log(level, "%s: %s at step %s", first.run, wrong_values(incident) or headline(first), first.step)
        if incident.first.rule in PER_HOST and wait_seconds:
            _, listed = self._grouped.setdefault((incident.first.rule or "", machine), (now + wait_seconds, []))
            listed.append(incident)
        else:
            self._announcing[incident.key] = self._spawn(self._announce([incident]))

    def announce_due(self, now: float) -> None:
        """Send the reports of machines whose time to wait for further logs is over."""
        for key, (due_at, listed) in list(self._grouped.items()):
            if now >= due_at:
                del self._grouped[key]
                self._spawn(self._announce(listed))

    def _withdraw(self, incident: Incident) -> bool:
        """Discard an incident that waits for those of other logs; return whether it waited."""
        waiting = next((key for key, (_, listed) in self._grouped.items() if incident in listed), None)
        if waiting is None:
            return False
        self._keys.discard(incident.key)
        self._grouped[waiting][1].remove(incident)
        if not self._grouped[waiting][1]:
            del self._grouped[waiting]
        return True

    async def _announce(self, incidents: Sequence[Incident]) -> None:
        first, *others = sorted(incidents, key=lambda incident: incident.first.run)  # whichever log was read first
        for other in others:
            other.is_muted = True
            self.record(other, MUTED)
            first.reports += (f"{other.first.run}, {other.first.ranks_named}: {other.cause}", *other.reports)
        await self._announcer.announce(first)
        if first.first.rule == RUN_FINISHED:
            self.record(first, RESOLVED)
        await self.commit()

    def send_again(self, incident: Incident) -> None:
        """Send the message of a stored incident that an earlier process may not have sent."""
        self._spawn(self._announcer.announce(incident, is_repeated=True))

    def resolve(self, incident: Incident, *, has_continued: bool) -> None:
        """Store that `incident` is over. A message is sent if training continues and the incident was sent."""
        if self._withdraw(incident):
            return
        self._spawn(self._resolve(incident, has_continued=has_continued))

    async def _resolve(self, incident: Incident, *, has_continued: bool) -> None:
        if (announcing := self._announcing.pop(incident.key, None)) is not None:
            await asyncio.wait([announcing])  # resolved is the last state
        if has_continued and not incident.is_muted:
            await self._announcer.resolve(incident, resolved_message(incident, has_continued=True))
        else:
            self.record(incident, RESOLVED)
        await self.commit()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = start_task("notifying of an incident of a log", lambda: work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sent(self) -> None:
        """Wait until the messages that are being sent are sent or have failed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, timeout_seconds: float) -> None:
        """Wait for the messages that are being sent, and store all pending rows.

        Messages that could not be sent within `timeout_seconds` are sent by the next process.
        """
        self.announce_due(math.inf)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._commit()
