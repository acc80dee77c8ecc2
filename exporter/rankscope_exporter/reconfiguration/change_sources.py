"""Who may switch measuring while training runs: a file, a call, a request over HTTP; and the thread that listens.

The thread runs only where there is something to listen to: a switch file, or other ranks that may be asked. It never
waits for another rank, and training waits for it only at the very step of a change that is being settled just then.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_exporter.base.errors import ConfigError, ErrorBoundary
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.reconfiguration.agreement import Agreement, Proposal
from rankscope_exporter.reconfiguration.change_queue import Change, ChangeQueue, PlannedChange
from rankscope_exporter.reconfiguration.watched_file import Edit, SwitchFile
from rankscope_exporter.sampling.sampling_config import Part, SamplingConfig, as_text, sampling_config_from

log = logging.getLogger("rankscope")

FILE: Final = "file"
CALL: Final = "call"
REQUEST: Final = "request"
_OFF: Final = '{"dynamic_on": false}'
_BUSY_SHARE: Final = 0.25
"""Of the time between two looks, while a change is being agreed on."""
_ARRIVAL_SECONDS: Final = 2.0
"""How long training waits at most for the thread's word with the store; without it a change is taken late, and said."""


MakeAside = Callable[[Mapping[str, Any], int | None], PlannedChange]
"""Makes a change beside what is measured of what was said and the step agreed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What somebody on this rank wants of all."""

    text: str
    source: str
    stamp: int | None = None
    until: int | None = None
    stands: bool = False
    is_obsolete: Callable[[], bool] = lambda: False


class ChangeSources:
    """The sources of changes of one rank. `agree` makes the agreement with the other ranks, None without any."""

    def __init__(
        self,
        base: MonitorConfig,
        change_queue: ChangeQueue,
        parts: Callable[[MonitorConfig], list[Part]],
        *,
        boundary: ErrorBoundary,
        tell: Callable[[str], None],
        agreement: Agreement | None,
        first_step: int,
    ) -> None:
        self._base = base
        self._change_queue = change_queue
        self._parts = parts
        self._boundary = boundary
        self._tell = tell
        self._agreement = agreement
        self._first_step = first_step
        self._file = SwitchFile(base.switch_file) if base.switch_file is not None else None
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._errands: queue.SimpleQueue[Callable[[Agreement], None]] = queue.SimpleQueue()
        self.asides: dict[str, MakeAside] = {}
        """By source: who makes changes beside what is measured. The same on all ranks."""
        self.listens = False
        """Whether other ranks may ask for one of those."""
        self._calls = itertools.count(1)
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._agreeing = threading.Lock()  # held from what the store says until the board has it
        self._is_held_up = False  # training has waited for that lock in vain
        self._thread = OwnThread(target=self._run, name="rankscope-switch")
        self._complaint: str | None = None
        self._written_off = False
        self._wants_on = False  # what was asked for last
        self.cpu_seconds = 0.0
        """CPU time of the thread so far."""

    def start(self) -> None:
        """Agree on what holds at the beginning, and listen where there is something to listen to."""
        self._boundary.call("switching", self._begin)
        is_asked = self.listens or self._base.serve.secret is not None
        if self._file is not None or (self._agreement is not None and is_asked):
            self._thread.start()

    def _begin(self) -> None:
        edit = self._read(self._file.read) if self._file is not None else None
        text, stamp = (_OFF, 0) if edit is None else (as_text(edit.document), edit.stamp)
        step = self._first_step + 1  # as in the existing tool: the first step is never measured in dynamic mode
        if self._agreement is not None:
            try:
                first = self._agreement.begin(step, text, stamp)
            except (RuntimeError, ValueError) as error:
                self._alone(error)
            else:
                text, step = first.document, first.step
        if self._file is not None and self._measuring(text, FILE).on:
            self._put(text, FILE, step)

    def stop(self) -> None:
        """End the thread; say in the file when measuring has ended."""
        self._stopped.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        if self._change_queue.is_over():
            self._boundary.call("the switch file", self._write_off)

    # Sources.

    def call(self, document: Mapping[str, Any]) -> None:
        """Take over what the script says. Raises ConfigError."""
        text = self._checked(document, CALL)
        self._submit(text, CALL, next(self._calls))
        if self._agreement is not None and self._thread.ident is None:
            self._thread.start()

    def request(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take over what a request says, and return what is measured and what is to come. Raises ConfigError."""
        self._submit(self._checked(document, REQUEST), REQUEST, None)
        return self._change_queue.state()

    def aside(
        self,
        document: Mapping[str, Any],
        source: str,
        *,
        stamp: int | None = None,
        until: int | None = None,
        is_obsolete: Callable[[], bool] = lambda: False,
    ) -> None:
        """Ask for a change beside what is measured, unless it `is_obsolete` by the time others can hear of it.

        Of what `source` asks for on all ranks, nothing up to the stamp `until` is heard any more.
        """
        if self._agreement is None:
            self._change_queue.put(self.asides[source](document, None))
        else:
            asked = _Asked(
                text=as_text(document), source=source, stamp=stamp, until=until, stands=True, is_obsolete=is_obsolete
            )
            self._asked.put(asked)
            self._woken.set()

    def run_with_agreement(self, ask: Callable[[Agreement], None]) -> bool:
        """Have the thread ask the other ranks something; return whether there are any that can be asked."""
        if self._agreement is None:
            return False
        self._errands.put(ask)
        self._woken.set()
        return True

    def _checked(self, document: Mapping[str, Any], source: str) -> str:
        text = as_text(document)
        self._measuring(text, source)
        return text

    def _submit(self, text: str, source: str, stamp: int | None) -> None:
        self._wants_on = self._measuring(text, source).on
        if self._agreement is None:
            self._put(text, source, None)
        else:
            self._asked.put(_Asked(text=text, source=source, stamp=stamp))
            self._woken.set()

    def _put(self, text: str, source: str, step: int | None, without: tuple[int, ...] = ()) -> None:
        if source in self.asides:
            self._change_queue.put(self.asides[source](json.loads(text), step))
            return
        measuring = self._measuring(text, source)
        self._wants_on, self._written_off = measuring.on, False
        parts = self._parts(measuring.config) if measuring.on else []
        self._change_queue.put(Change(measuring=measuring, parts=parts, source=source, step=step, without=without))

    def _measuring(self, text: str, source: str) -> SamplingConfig:
        return sampling_config_from(json.loads(text), self._base, on=source != FILE)

    # On the training thread.

    def resolve(self, step: int) -> None:
        """Learn what became of a change for step number `step`, which is about to begin, unless that is known."""
        agreement = self._agreement
        if agreement is None or not agreement.must_resolve(step):
            return
        # Whoever holds it waits for a store that gives no answer: training waits for that once, and not at every step.
        if not self._agreeing.acquire(timeout=0.0 if self._is_held_up else _ARRIVAL_SECONDS):
            if not self._is_held_up:
                self._is_held_up = True
                log.warning("step %d begins without the word of the other ranks on a change of what is measured", step)
            return
        self._is_held_up = False
        try:
            self._take_over(lambda: agreement.resolve(step))
        finally:
            self._agreeing.release()

    # The thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            busy = self._agreement is not None and (self._agreement.pending or not self._asked.empty())
            self._woken.wait(self._base.switch_poll_seconds * (_BUSY_SHARE if busy else 1.0))
            self._woken.clear()
            if not self._stopped.is_set():
                self._boundary.call("the switch file", self._look_at_file)
                if self._agreement is not None:
                    self._boundary.call("agreeing with other ranks", self._take_part, self._agreement)
            self.cpu_seconds = time.thread_time()

    def _look_at_file(self) -> None:
        if self._file is None:
            return
        if self._change_queue.ended.is_set() and not self._written_off:
            self._written_off, self._wants_on = True, False
            if self._of_others(Agreement.claim, self._file.stamp, alone=True):
                self._write_off()
        before = self._file.stamp
        edit = self._read(self._file.poll)
        if edit is None:
            return
        text = as_text(edit.document)
        is_on = self._measuring(text, FILE).on
        # Off where it is off already, or because another rank has written that measuring has ended, is no change.
        if is_on or (self._wants_on and not self._of_others(Agreement.is_claimed, before, alone=False)):
            self._submit(text, FILE, edit.stamp)

    def _of_others(self, ask: Callable[[Agreement, str], bool], stamp: int, *, alone: bool) -> bool:
        """Ask the other ranks about the end of what the file said since `stamp`; `alone` where there are none."""
        try:
            return alone if self._agreement is None else ask(self._agreement, f"ended/{stamp}")
        except (RuntimeError, ValueError) as error:
            self._alone(error)
            return alone

    def _read(self, read: Callable[[], Edit | None]) -> Edit | None:
        try:
            edit = read()
            if edit is not None:
                self._checked(edit.document, FILE)
        except (ConfigError, OSError) as error:
            complaint = f"the switch file is not followed, what is measured stays as it was: {error}"
            if complaint != self._complaint:
                self._complaint = complaint
                self._tell(complaint)
            return None
        self._complaint = self._complaint if edit is None else None
        return edit

    def _write_off(self) -> None:
        if self._file is not None:
            try:
                self._file.switch_off()
            except OSError as error:
                self._tell(f"measuring has ended, but the switch file cannot say so: {error}")

    def _take_part(self, agreement: Agreement) -> None:
        def look() -> list[Proposal]:
            while not self._errands.empty():
                self._errands.get()(agreement)
            while not self._asked.empty():
                asked = self._asked.get()
                if not self._propose(agreement, asked):  # another change is pending, or others did the same just now
                    self._asked.put(asked)
                    break
            return agreement.look()

        with self._agreeing:
            self._take_over(look)

    @staticmethod
    def _propose(agreement: Agreement, asked: _Asked) -> bool:
        return asked.is_obsolete() or agreement.propose(
            asked.text, asked.source, asked.stamp, until=asked.until, stands=asked.stands
        )

    def _take_over(self, ask: Callable[[], list[Proposal]]) -> None:
        try:
            changes = ask()
        except (RuntimeError, ValueError) as error:
            self._alone(error)
            return
        for proposal in changes:
            self._boundary.call("switching", self._agreed, proposal)

    def _agreed(self, proposal: Proposal) -> None:
        self._put(proposal.document, proposal.source, proposal.step, proposal.without)

    def _alone(self, error: Exception) -> None:
        """Go on without the others: the process that held the group's store has ended, or the group was destroyed."""
        self._agreement = None
        log.info("ranks cannot agree any more on a step, each changes for itself: %s", error)
