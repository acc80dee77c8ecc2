"""The sources of changes of sampling: a file, a call of the script, an HTTP request, and reactions of the monitor.

A thread follows the switch file and the other ranks. It runs only if there is a switch file, or if other ranks may
request changes. It never waits for another rank. The training waits for it only at the step of a change that
is being decided at that time.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.reconfiguration.agreement import Agreement, Proposal
from rankscope_exporter.reconfiguration.change_queue import ChangeQueue, PlannedChange, SamplingChange, StepPace
from rankscope_exporter.reconfiguration.watched_file import FollowedFile
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.sampling.sampling_config import Part, SamplingConfig, document_text, sampling_config_from

log = logging.getLogger("rankscope")

FILE: Final = "file"
CALL: Final = "call"
REQUEST: Final = "request"
_OFF: Final = '{"dynamic_on": false}'
_BUSY_SHARE: Final = 0.25
"""Factor of the poll interval while a change is pending among the ranks."""
_ARRIVAL_SECONDS: Final = 2.0
"""Longest time that the training waits for the thread's access to the store. After it, the change applies late."""

MakeChange = Callable[[str, Mapping[str, Any], int | None], PlannedChange | None]
"""Makes an automatic change of (source, document, agreed step); None if the source is not a reaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A change that a source of this rank requests from all ranks."""

    text: str
    source: str
    stamp: int | None = None
    until: int | None = None
    is_additional: bool = False
    is_obsolete: Callable[[], bool] = lambda: False


class ChangeSources(StepObserver):
    """The sources of changes of one rank. Without an `agreement`, the rank changes immediately and alone.

    `parts` returns the quantities of a configuration, `reaction` makes the changes of reactions.
    """

    def __init__(
        self,
        base: MonitorConfig,
        change_queue: ChangeQueue,
        pace: StepPace,
        *,
        parts: Callable[[MonitorConfig], list[Part]],
        reaction: MakeChange,
        boundary: ErrorBoundary,
        tell: Callable[[str], None],
        agreement: Agreement | None,
        first_step: int,
    ) -> None:
        self._base = base
        self._change_queue = change_queue
        self._pace = pace
        self._parts = parts
        self._reaction = reaction
        self._boundary = boundary
        self._agreement = agreement
        self._first_step = first_step
        check = lambda document: self._sampling(document_text(document), FILE)  # noqa: E731 - a single expression
        self._file = None if base.switch_file is None else FollowedFile(base.switch_file, check, tell)
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Callable[[Agreement], None]] = queue.SimpleQueue()
        self._calls = itertools.count(1)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._agreeing = threading.Lock()  # held from reading the store until the queue has the changes
        self._is_delayed = False  # the training has waited for that lock without success
        self._thread = OwnThread(target=self._run, name="rankscope-switch")
        self._is_end_handled = False
        self._requested_on = False  # whether the last request switches sampling on

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the thread so far."""
        return self._thread.cpu_seconds

    def start(self) -> None:
        """Agree with the other ranks on the first configuration, and start the thread if it is needed."""
        self._boundary.call("switching", self._begin)
        base = self._base
        has_requests = base.max_overhead is not None or base.capture is not None or base.serve.secret is not None
        if self._file is not None or (self._agreement is not None and has_requests):
            self._thread.start()

    def _begin(self) -> None:
        edit = None if self._file is None else self._file.read()
        text, stamp = (_OFF, 0) if edit is None else (document_text(edit.document), edit.stamp)
        step = self._first_step + 1  # as in msprobe: the first step is never measured in dynamic mode
        if self._agreement is not None:
            try:
                first = self._agreement.begin(step, text, stamp)
            except (RuntimeError, ValueError) as error:
                self._continue_alone(error)
            else:
                text, step = first.document, first.step
        if self._file is not None and self._sampling(text, FILE).on:
            self._put(text, FILE, step)

    def stop(self) -> None:
        """End the thread. If all quantities were sampled `times` times, set `dynamic_on` to false in the file."""
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        if self._change_queue.is_over() and self._file is not None:
            self._boundary.call("the switch file", self._file.switch_off)

    # Requests, from any thread.

    def call(self, document: Mapping[str, Any]) -> None:
        """Apply a document of the script. Raises ConfigError."""
        self._submit(document_text(document), CALL, next(self._calls))
        if self._agreement is not None and self._thread.ident is None:
            self._thread.start()

    def request(self, document: Mapping[str, Any]) -> None:
        """Apply a document of an HTTP request. Raises ConfigError."""
        self._submit(document_text(document), REQUEST, None)

    def request_reaction(
        self,
        document: Mapping[str, Any],
        source: str,
        *,
        stamp: int | None = None,
        until: int | None = None,
        is_obsolete: Callable[[], bool] = lambda: False,
    ) -> None:
        """Request an automatic change of all ranks, unless it `is_obsolete` when it is proposed to them.

        After it, requests of `source` with a stamp of at most `until` are ignored on all ranks.
        """
        text = document_text(document)
        if self._agreement is None:
            self._put(text, source, None)
        else:
            request = _Request(
                text=text, source=source, stamp=stamp, until=until, is_additional=True, is_obsolete=is_obsolete
            )
            self._requests.put(request)
            self._wake.set()

    def run_with_agreement(self, task: Callable[[Agreement], None]) -> bool:
        """Call `task` on the thread with the agreement; return False, without a call, if this rank is alone."""
        if self._agreement is None:
            return False
        self._tasks.put(task)
        self._wake.set()
        return True

    def _submit(self, text: str, source: str, stamp: int | None) -> None:
        self._requested_on = self._sampling(text, source).on
        if self._agreement is None:
            self._put(text, source, None)
        else:
            self._requests.put(_Request(text=text, source=source, stamp=stamp))
            self._wake.set()

    def _put(self, text: str, source: str, step: int | None, without: tuple[int, ...] = ()) -> None:
        change = self._reaction(source, json.loads(text), step)
        if change is not None:
            self._change_queue.put(change)
            return
        sampling = self._sampling(text, source)
        self._requested_on, self._is_end_handled = sampling.on, False
        parts = self._parts(sampling.config) if sampling.on else []
        self._change_queue.put(
            SamplingChange(sampling=sampling, parts=parts, source=source, step=step, without=without)
        )

    def _sampling(self, text: str, source: str) -> SamplingConfig:
        return sampling_config_from(json.loads(text), self._base, on=source != FILE)

    # On the training thread.

    def on_before_step(self, step: int) -> None:
        """Obtain the outcome of a change for step number `step`, which is about to begin, if it is not known yet."""
        agreement = self._agreement
        if agreement is None or not agreement.must_resolve(step):
            return
        # If the store does not respond, the thread holds the lock for long. Wait for that once, not at every step.
        if not self._agreeing.acquire(timeout=0.0 if self._is_delayed else _ARRIVAL_SECONDS):
            if not self._is_delayed:
                self._is_delayed = True
                log.warning(
                    "step %d: timed out after %g s waiting for the key-value store; pending sampling changes apply at "
                    "a later step",
                    step,
                    _ARRIVAL_SECONDS,
                )
            return
        self._is_delayed = False
        try:
            self._take_over(lambda: agreement.resolve(step))
        finally:
            self._agreeing.release()

    def on_update_applied(self) -> None:
        """Obtain the outcome of a change for the next step, so that its hooks can be registered."""
        self.on_before_step(self._pace.now()[0] + 1)

    # The thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            is_busy = self._agreement is not None and (self._agreement.pending or not self._requests.empty())
            self._wake.wait(self._base.switch_poll_seconds * (_BUSY_SHARE if is_busy else 1.0))
            self._wake.clear()
            if not self._stopped.is_set():
                if self._file is not None:
                    self._boundary.call("the switch file", self._poll_file, self._file)
                if self._agreement is not None:
                    self._boundary.call("agreeing with other ranks", self._take_part, self._agreement)

    def _poll_file(self, file: FollowedFile) -> None:
        if self._change_queue.ended.is_set() and not self._is_end_handled:
            self._is_end_handled, self._requested_on = True, False
            if self._ask_ranks(Agreement.claim, file.stamp, alone=True):
                file.switch_off()
        before = file.stamp
        edit = file.poll()
        if edit is None:
            return
        text = document_text(edit.document)
        is_on = self._sampling(text, FILE).on
        # "Off" is not a change if sampling is off, or if another rank has written it because sampling has ended.
        if is_on or (self._requested_on and not self._ask_ranks(Agreement.is_claimed, before, alone=False)):
            self._submit(text, FILE, edit.stamp)

    def _ask_ranks(self, question: Callable[[Agreement, str], bool], stamp: int, *, alone: bool) -> bool:
        """Return the answer about the end of the file's configuration of `stamp`; `alone` if there are no ranks."""
        try:
            return alone if self._agreement is None else question(self._agreement, f"ended/{stamp}")
        except (RuntimeError, ValueError) as error:
            self._continue_alone(error)
            return alone

    def _take_part(self, agreement: Agreement) -> None:
        def look() -> list[Proposal]:
            while not self._tasks.empty():
                self._tasks.get()(agreement)
            while not self._requests.empty():
                item = self._requests.get()
                is_done = item.is_obsolete() or agreement.propose(
                    item.text, item.source, item.stamp, until=item.until, is_additional=item.is_additional
                )
                if not is_done:  # another change is pending, or other ranks have written at the same time
                    self._requests.put(item)
                    break
            return agreement.look()

        with self._agreeing:
            self._take_over(look)

    def _take_over(self, agreed: Callable[[], list[Proposal]]) -> None:
        try:
            proposals = agreed()
        except (RuntimeError, ValueError) as error:
            self._continue_alone(error)
            return
        for item in proposals:
            self._boundary.call("switching", self._put, item.document, item.source, item.step, item.without)

    def _continue_alone(self, error: Exception) -> None:
        """Continue without agreement: the process with the group's store has ended, or the group was destroyed."""
        self._agreement = None
        log.info("the key-value store is not available, changes of sampling now apply to this rank only: %s", error)
