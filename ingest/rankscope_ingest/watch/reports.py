"""Incidents of followed logs: their texts, and the reports that are sent about them.

Failures, and logs that cannot be read, are sent as one report for each machine. The module `notify.announcer` stores
each incident before its message is sent, so that a restarted process neither repeats nor forgets a message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import logging
import math
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import RunState, Severity
from rankscope_ingest.base.background import start_task
from rankscope_ingest.base.config import NotifySection, RunsSection, WatchSection
from rankscope_ingest.detect.history import is_unsent
from rankscope_ingest.detect.incidents import IncidentTracker, symptoms
from rankscope_ingest.notify.announcer import Announcer, Deliveries, Notifier, resolved_message
from rankscope_ingest.runs.incident import MUTED, RESOLVED, Incident, LogReport, Symptom
from rankscope_ingest.runs.models import Attempt, Liveness, Rank
from rankscope_ingest.runs.text import NO_PLACE, Place, headline, wrong_values
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_ingest.watch.files import LogAddress, LogUnreadableError
from rankscope_ingest.watch.intake import LogIntake, WatchStore
from rankscope_ingest.watch.judge import ENDS, Condition, LogRow, LogRows, Verdict
from rankscope_ingest.watch.ssh import UntrustedHostError
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.rule_names import (
    LOG_UNREADABLE,
    RUN_FAILED,
    RUN_FINISHED,
    RUN_SLOW,
    RUN_STALLED,
    RUN_STOPPED,
    SLOW_STEPS,
)
from rankscope_storage.runs.silences import Silences
from rankscope_view.data.incidents import is_open

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
        place: Place = NO_PLACE,
    ) -> None:
        """`deliveries` counts the notifications, together with those of the service."""
        self._store = store
        self._keys: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._announcing: dict[str, asyncio.Task[None]] = {}  # by the key of the incident
        self._grouped: dict[tuple[str, str], tuple[float, list[Incident]]] = {}
        self._announcer = Announcer(
            notifiers,
            record=store.record,
            commit=self.commit,
            deliveries=deliveries or Deliveries(),
            place=lambda: place,
            silences=Silences(store.folder),
        )

    async def commit(self) -> None:
        """Store the pending events of incidents. A caller that is cancelled does not cancel the commit."""
        try:
            await asyncio.shield(self._store.run(self._store.flush))
        except StoreError as error:
            log.warning("incidents of followed logs cannot be stored, retrying with the next one: %s", error)

    def remember(self, incident: Incident) -> None:
        """Do not announce `incident`, which an earlier process has stored."""
        self._keys.add(incident.key)

    def announce(self, incident: Incident, machine: str, now: float, *, wait_seconds: float) -> None:
        """Store and send `incident`, unless an incident with the same key is stored.

        Incidents of PER_HOST wait for those of other logs of the same machine, for `wait_seconds` or until their end.
        """
        if incident.key in self._keys:
            return
        self._keys.add(incident.key)
        first = incident.first
        if first.op is not None and not incident.is_muted:  # a condition is displayed as the state of the log
            level = logging.CRITICAL if incident.severity == Severity.CRITICAL else logging.WARNING
            log.log(level, "%s: %s at step %s", first.run, wrong_values(incident) or headline(first), first.step)
        if first.rule in PER_HOST:
            _, listed = self._grouped.setdefault((first.rule or "", machine), (now + wait_seconds, []))
            listed.append(incident)
        else:
            self._start([incident])

    def announce_due(self, now: float, incident: Incident | None = None) -> None:
        """Send the reports of machines whose time to wait for further logs is over, and that with `incident`."""
        for key, (due_at, listed) in list(self._grouped.items()):
            if now >= due_at or incident in listed:
                del self._grouped[key]
                self._start(listed)

    def _start(self, incidents: Sequence[Incident]) -> None:
        task = self._spawn(self._announce(incidents))
        self._announcing |= dict.fromkeys((incident.key for incident in incidents), task)

    async def _announce(self, incidents: Sequence[Incident]) -> None:
        first, *others = sorted(incidents, key=lambda incident: incident.first.run)  # whichever log was read first
        for other in others:
            other.is_muted = True
            self._store.record(other, MUTED)
            first.reports += (f"{other.first.run}, {other.first.ranks_named}: {other.cause}", *other.reports)
        await self._announcer.announce(first)
        if first.first.rule == RUN_FINISHED:
            self._store.record(first, RESOLVED)
        await self.commit()

    def send_again(self, incident: Incident) -> None:
        """Send the message of a stored incident that an earlier process may not have sent."""
        self._spawn(self._announcer.announce(incident, is_repeated=True))

    def resolve(self, incident: Incident, *, has_continued: bool) -> None:
        """Store that `incident` is over. A message is sent if training continues and the incident was sent."""
        self.announce_due(-math.inf, incident)
        self._spawn(self._resolve(incident, has_continued=has_continued))

    async def _resolve(self, incident: Incident, *, has_continued: bool) -> None:
        if (announcing := self._announcing.pop(incident.key, None)) is not None:
            await asyncio.wait([announcing])  # resolved is the last state
        self._store.record(incident, RESOLVED)
        if has_continued and not incident.is_muted:
            notice = resolved_message(incident, has_continued=True, ended_at=time.monotonic())
            await self._announcer.tell_end(incident, notice)
        await self.commit()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = start_task("notifying of an incident of a log", lambda: work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sent(self) -> None:
        """Wait until the messages that are being sent are sent or have failed."""
        while self._tasks:
            self._announcer.send_lists()
            await asyncio.wait(self._tasks, timeout=1.0)

    async def finish(self, timeout_seconds: float) -> None:
        """Wait for the messages that are being sent, and store all pending rows.

        Messages that could not be sent within `timeout_seconds` are sent by the next process.
        """
        self.announce_due(math.inf)
        self._announcer.send_lists()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.commit()


class LogIncidents:
    """The incidents of one followed log: open conditions of its training and of the log, and groups of anomalies.

    The anomalies are grouped as those of ranks.
    """

    def __init__(
        self, intake: LogIntake, address: LogAddress, rows: LogRows, reporter: Reporter, section: WatchSection
    ) -> None:
        self._intake = intake
        self._run = intake.run
        self._address = str(address)
        self._machine = address.machine
        self._rows = rows
        self._reporter = reporter
        self._section = section
        self._runs = RunTracker(RunsSection())
        self._tracker = IncidentTracker(group_wait_seconds=0.0, quiet_steps=NotifySection().quiet_steps)
        self._unreported: list[Incident] = []  # of anomalies
        self._open: dict[str, Incident] = {}  # conditions by rule
        self._unreadable_since: float | None = None

    @property
    def slow_since(self) -> float | None:
        """Return the median step time with which the present slow steps are compared; None if no step is slow."""
        incident = self._open.get(RUN_SLOW)
        return None if incident is None or incident.first.attempt != self._rows.attempt else incident.first.baseline

    def restore(self, stored: Iterable[tuple[Incident, Sequence[str]]], *, sends_again: bool) -> None:
        """Add the incidents that an earlier process has stored, each with its states.

        With `sends_again`, messages that the earlier process may not have sent are sent now.
        """
        for incident, states in stored:
            self._reporter.remember(incident)
            if incident.log is None or incident.log.address != self._address:
                continue
            incident.is_muted = MUTED in states
            if sends_again and is_unsent(states):
                self._reporter.send_again(incident)
            if incident.first.op is not None:  # of anomalies, not of a condition
                (self._tracker.restore if is_open(states) else self._tracker.remember)(incident)
            elif is_open(states):
                self._close({incident.first.rule or ""}, has_continued=False)
                self._open[incident.first.rule or ""] = incident

    def observe(self, events: pa.Table, now: float) -> None:
        """Add the anomalies in events of the log. `now` is in monotonic seconds."""
        self._tracker.quiet_steps = NotifySection().quiet_steps * self._rows.stride
        rows = events.drop_columns("ts").to_pylist()
        for number in sorted({row["attempt"] or 0 for row in rows}):
            for one in symptoms(row for row in rows if row["attempt"] == number):
                self._tracker.observe(dataclasses.replace(one, ranks=self._address), now, stride=self._rows.stride)
                self._unreported += self._tracker.settle(now, {})

    def report(self, verdict: Verdict, now: float) -> Verdict:
        """Report a new condition and new anomalies, and resolve the incidents that are over.

        Return `verdict` with the number and the worst of the open incidents, and the severity of the worst.
        """
        if verdict.condition is not Condition.FINISHED:
            self._report(verdict, now)
        unreported, self._unreported = self._unreported, []
        for incident in unreported:  # slow steps that are reported as RunSlow are only stored
            incident.is_muted |= incident.first.rule == SLOW_STEPS and RUN_SLOW in self._open
            self._announce(incident, now)
        self.resolve(next((state for state, end in ENDS.items() if end is verdict.condition), RunState.RUNNING))
        shown = self._with_open(verdict)
        if verdict.condition is Condition.FINISHED:
            self._report(shown, now)
        return shown

    def _report(self, verdict: Verdict, now: float) -> None:
        """Announce the incident of a new condition, and resolve those of conditions that are over."""
        rule, severity = RULES.get(verdict.condition, ("", ""))
        # A stall does not end slow steps: no further step shows that they are over.
        kept = {rule, RUN_SLOW} if rule == RUN_STALLED else {rule}
        self._close(
            {
                known
                for known, incident in self._open.items()
                if known != LOG_UNREADABLE and (known not in kept or incident.first.attempt != self._rows.attempt)
            },
            has_continued=verdict.condition not in ENDS.values(),
        )
        if rule and rule not in self._open:
            self._begin(rule, verdict.severity or severity, verdict, self._rows.attempt, now)

    def report_restart(self, reason: str, attempt: int, now: float) -> None:
        """Report the failure of an attempt before the present one, unless the log showed it before the restart."""
        if RUN_FAILED in self._open:
            return
        verdict = Verdict(condition=Condition.FAILED, reason=reason)
        self._begin(RUN_FAILED, Severity.CRITICAL, verdict, attempt, now)
        log.critical("%s: failed at step %s: %s", self._run, self._open[RUN_FAILED].first.step, reason)

    def _begin(self, rule: str, severity: str, verdict: Verdict, attempt: int, now: float) -> None:
        step, last = self._rows.last_steps.get(attempt), self._rows.last
        position = step if step is not None else (-1 if last is None else last.seq)
        values = {name: getattr(verdict, name) for name in ("value", "baseline", "threshold")}
        key = f"{rule}:{attempt}:{position}:{self._run}"
        errors: list[str] = []
        if rule in {RUN_FAILED, RUN_STOPPED} and attempt == self._rows.attempt:
            left = len(self._rows.errors) - MAX_ERRORS
            errors = self._rows.errors[:MAX_ERRORS] + [f"and {left} more errors"] * (left > 0)
        place = {"attempt": attempt, "step": step, **values}
        self._open_new(rule, severity, verdict.reason, key, now, reports=tuple(errors), **place)

    def _open_new(
        self, rule: str, severity: str, cause: str, key: str, now: float, *, reports: tuple[str, ...] = (), **place: Any
    ) -> None:
        first = Symptom(rule=rule, severity=severity, causal=(), run=self._run, rank=None, ranks=self._address, **place)
        incident = Incident(first=first, severity=severity, opened_at=time.monotonic(), last_step=first.step, events=1)
        incident.is_settled, incident.cause, incident.reports, incident.fixed_key = True, cause, reports, key
        self._open[rule] = incident
        self._announce(incident, now)

    def report_unreadable(self, error: LogUnreadableError, now: float) -> None:
        """Report that the log cannot be read, once it is due."""
        self._unreadable_since = since = now if self._unreadable_since is None else self._unreadable_since
        is_untrusted = isinstance(error, UntrustedHostError)
        is_due = is_untrusted or now - since >= self._section.unreadable_after_seconds
        if is_due and LOG_UNREADABLE not in self._open:
            severity = Severity.CRITICAL if is_untrusted else Severity.WARNING
            key = f"{LOG_UNREADABLE}:{since:.0f}:{self._address}"
            self._open_new(LOG_UNREADABLE, severity, str(error), key, now, attempt=self._rows.attempt, step=None)

    def report_readable(self) -> None:
        """Report that the log can be read again, if it was reported as unreadable."""
        self._unreadable_since = None
        self._close({LOG_UNREADABLE}, has_continued=True)

    def _close(self, rules: Collection[str], *, has_continued: bool) -> None:
        for rule in rules & self._open.keys():
            incident = self._open.pop(rule)
            if rule != RUN_FINISHED:  # resolved with its message
                self._reporter.resolve(incident, has_continued=has_continued)

    def resolve(self, state: RunState) -> None:
        """Resolve, without a message, the anomalies whose cause is gone. `state` is that of the last attempt.

        While it runs, some steps without a firing must follow, as for a rank.
        """
        last_steps = self._rows.last_steps
        for number, step in last_steps.items():
            attempt = Attempt(run=self._run, number=number, launch_id="", world_size=1, started_at=0, last_step=step)
            attempt.state = state if number == max(last_steps) else attempt.state
            if attempt.state is RunState.RUNNING:
                life = Liveness(last_sign=0.0)
                attempt.ranks[0] = Rank(
                    number=0, incarnation="", host="", liveness=life, known_since=0.0, last_step=step
                )
            self._runs.restore(attempt)
        for incident in self._tracker.resolve(self._runs):
            self._reporter.resolve(incident, has_continued=False)

    def _with_open(self, verdict: Verdict) -> Verdict:
        listed = [one for one in self._tracker.open() if one.first.rule != SLOW_STEPS]  # the condition has them
        if not listed:
            return verdict
        worst = max(listed, key=lambda incident: incident.first.urgency)
        cause = f"{wrong_values(worst) or worst.first.rule} at step {worst.first.step}"
        if worst.first.value is not None and worst.largest > worst.first.value:
            cause = f"{wrong_values(worst, is_largest=True)}, since step {worst.first.step}"
        state = "finished" if verdict.condition is Condition.FINISHED else f"{verdict.reason},"
        reason = f"{state} with {len(listed)} open incident{'s' if len(listed) > 1 else ''}: {cause}"
        return dataclasses.replace(verdict, reason=reason, severity=worst.severity)

    def _announce(self, incident: Incident, now: float) -> None:
        first, most = incident.first, self._section.message_rows
        end = math.inf if first.step is None else first.step
        own = self._rows.rows if first.attempt == self._rows.attempt else ()
        rows = [row for row in own if (row.step or 0) <= end][-most:]
        guide = guide_of(rows, self._intake.planned_steps)
        incident.log = LogReport(address=self._address, rows=row_texts(rows), guide=guide)
        self._reporter.announce(incident, self._machine, now, wait_seconds=self._section.poll_seconds)
