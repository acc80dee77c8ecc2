"""The sources of sampling changes: a file, a call of the script, an HTTP request, and reactions of the monitor.

A background thread polls the switch file and the changes of other ranks. It runs only if there is a switch file, or if
other ranks may request changes. The thread never waits for another rank. The training thread rarely waits for the
background thread: only at a step at which a change may take effect, if it is not yet known whether the ranks have
committed the change.

The switch file: detects edits of the file, and sets `dynamic_on` to false in it when sampling has ended.

A background thread polls the file. An edit is read only when two polls in succession find the same content, because an
editor may still be writing the file at the first poll.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_exporter.base.errors import ConfigError, ErrorBoundary
from rankscope_exporter.config.loader import parse_settings
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.reconfiguration.agreement import Agreement, Proposal
from rankscope_exporter.reconfiguration.change_queue import ChangeQueue, PlannedChange, SamplingChange, StepPace
from rankscope_exporter.records.step_events import StepObserver
from rankscope_exporter.sampling.sampling_config import (
    SWITCH,
    Part,
    SamplingConfig,
    document_text,
    sampling_config_from,
)

_SWITCHED_ON: Final = re.compile(r"""(["']?\bdynamic_on["']?\s*[:=]\s*)[Tt]rue\b""")


@dataclass(frozen=True, slots=True)
class Edit:
    """The content of the switch file, and the time of its last change in nanoseconds, `stamp`."""

    document: Mapping[str, Any]
    stamp: int


class SwitchFile:
    """A switch file at a path. The file need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.stamp = 0
        """Modification time, in nanoseconds, of the file content that `read` or `poll` returned last. Initially 0."""
        self._known: str | None = None  # the text that was returned last
        self._seen: tuple[int, str] | None = None  # the content at the last poll

    def read(self) -> Edit | None:
        """Return the present content of the switch file; None if there is no file.

        Raises ConfigError if this content is not valid.
        """
        found = self._seen = self._content()
        if found is None:
            return None
        return self._edit(*found)

    def poll(self) -> Edit | None:
        """Return a new content of the switch file that is unchanged since the previous poll.

        Return None if there is no new content. Raises ConfigError for an invalid content, once for each such content.
        """
        found, before = self._content(), self._seen
        self._seen = found
        if found is None or found != before or found[1] == self._known:
            return None
        return self._edit(*found)

    def switch_off(self) -> bool:
        """Set `dynamic_on` to false in the switch file.

        Return False if the file was edited or deleted since this object last returned its content, or if the file does
        not set `dynamic_on` to true.
        """
        found = self._content()
        if found is None or found[1] != self._known:
            return False
        text = found[1]
        settings = parse_settings(self.path, text)
        if settings.get(SWITCH) is not True:
            return False
        edits = (f"{text[: on.end(1)]}false{text[on.end() :]}" for on in _SWITCHED_ON.finditer(text))
        # A comment or a string may contain an example of the setting.
        edited = next((e for e in edits if parse_settings(self.path, e) == {**settings, SWITCH: False}), None)
        if edited is None:
            return False
        _replace(self.path.resolve(), edited)
        self._known = edited  # the monitor's own edit is not an edit
        return True

    def _edit(self, stamp: int, text: str) -> Edit:
        self.stamp, self._known = stamp, text
        return Edit(parse_settings(self.path, text), stamp)

    def _content(self) -> tuple[int, str] | None:
        with contextlib.suppress(FileNotFoundError):
            # Read at each poll: an edit within the resolution of the file system's clock does not change the time.
            data = self.path.read_bytes()
            try:
                return self.path.stat().st_mtime_ns, data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.path}: {error}") from error
        return None


class FollowedFile:
    """A switch file that reports errors to the user instead of raising them.

    The function `check` raises ConfigError for a document that is not a valid configuration. The function `tell`
    publishes the text of an error.
    """

    def __init__(
        self, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], object], tell: Callable[[str], None]
    ) -> None:
        self._file = SwitchFile(path)
        self._check = check
        self._tell = tell
        self._reported: str | None = None

    @property
    def stamp(self) -> int:
        """Modification time, in nanoseconds, of the file content that `read` or `poll` returned last. Initially 0."""
        return self._file.stamp

    def read(self) -> Edit | None:
        """Return the present content of the switch file; None if there is no file or after reporting an error."""
        return self._checked(self._file.read)

    def poll(self) -> Edit | None:
        """Return a new content of the file that is unchanged since the previous poll.

        Return None if there is no new content, or after reporting an error.
        """
        return self._checked(self._file.poll)

    def switch_off(self) -> None:
        """Set `dynamic_on` to false in the switch file, or report why this is not possible."""
        try:
            self._file.switch_off()
        except (ConfigError, OSError) as error:
            self._tell(f"sampling has ended, but dynamic_on cannot be set to false in the switch file: {error}")

    def _checked(self, read: Callable[[], Edit | None]) -> Edit | None:
        try:
            edit = read()
            if edit is not None:
                self._check(edit.document)
                self._reported = None
        except (ConfigError, OSError) as error:
            text = f"the switch file cannot be used, sampling does not change: {error}"
            if text != self._reported:
                self._reported = text
                self._tell(text)
            return None
        return edit


def _replace(path: Path, text: str) -> None:
    """Replace the content of the file `path` by `text` atomically: a reader sees either the old or the new content."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


log = logging.getLogger("rankscope")

FILE: Final = "file"
CALL: Final = "call"
REQUEST: Final = "request"
_OFF: Final = '{"dynamic_on": false}'
_BUSY_SHARE: Final = 0.25
"""Factor by which the poll interval is multiplied while a change is pending.

The key-value store is then polled more often.
"""
_ARRIVAL_SECONDS: Final = 2.0
"""Longest time in seconds that training waits for the background thread to finish its access to the key-value store.

After this time the training continues, and the change takes effect at a later step.
"""

MakeChange = Callable[[str, Mapping[str, Any], int | None], PlannedChange | None]
"""Function that returns an automatic change of the sampling, or None if the source is not a reaction of the monitor.

The arguments are the source, the JSON document that describes the change, and the step on which the ranks agreed.
"""


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
    """The sources of sampling changes on one rank.

    If `agreement` is None, changes apply immediately and to this rank only.

    The function `parts` returns the quantities of a sampling configuration, each with the steps at which it is sampled
    and the statistics to publish. The function `reaction` returns the change that a reaction of the monitor has
    requested, such as a capture.
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
        self._tell = tell
        self._agreement = agreement
        self._is_alone = False  # the key-value store has failed
        self._first_step = first_step
        check = lambda document: self._sampling(document_text(document), FILE)  # noqa: E731 - a single expression
        self._file = None if base.switch_file is None else FollowedFile(base.switch_file, check, tell)
        self._requests: deque[_Request] = deque()
        self._tasks: queue.SimpleQueue[Callable[[Agreement], None]] = queue.SimpleQueue()
        self._calls = itertools.count(1)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._agreeing = threading.Lock()  # held from reading the store until the queue has the changes
        self._is_delayed = False  # the training has waited for that lock without success
        self._thread = OwnThread(target=self._run, name="rankscope-switch", on_fault=boundary.report)
        self._is_end_handled = False
        self._requested_on = False  # whether the last request switches sampling on

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that the background thread for sampling changes has used so far."""
        return self._thread.cpu_seconds

    def start(self) -> None:
        """Agree with the other ranks on the first sampling configuration, and start the background thread.

        The thread is started only if there is a switch file, or if other ranks may request changes.
        """
        self._boundary.call("switching", self._begin)
        base = self._base
        has_requests = base.max_overhead is not None or base.capture is not None or base.serve.secret is not None
        if self._file is not None or (self._agreement is not None and has_requests):
            self._thread.start()

    def _begin(self) -> None:
        edit = None if self._file is None else self._file.read()
        text, stamp = (_OFF, 0) if edit is None else (document_text(edit.document), edit.stamp)
        step = self._first_step + 1  # the first step is never measured in dynamic mode
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
        """Stop the background thread that polls the switch file and the changes of other ranks.

        If all quantities were sampled as often as the setting `times` requires, set `dynamic_on` to false in the switch
        file.
        """
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        if self._change_queue.is_over() and self._file is not None:
            self._boundary.call("the switch file", self._file.switch_off)

    # Requests, from any thread.

    def call(self, document: Mapping[str, Any]) -> None:
        """Request the change that a call of `Monitor.switch` describes.

        Raises ConfigError if `document` is invalid.
        """
        self._submit(document_text(document), CALL, next(self._calls))
        if self._agreement is not None and self._thread.ident is None:
            self._thread.start()

    def request(self, document: Mapping[str, Any]) -> None:
        """Request the change that an HTTP request describes. Raises ConfigError if `document` is invalid."""
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
        """Request an automatic change of the sampling on all ranks.

        `is_obsolete` is called before the change is proposed to the other ranks; if it returns True, the request is
        dropped. `stamp` is a number that orders the requests of `source`. All ranks ignore later requests of `source`
        with a stamp of at most `until`.
        """
        text = document_text(document)
        if self._agreement is None:
            self._put(text, source, None)
        else:
            request = _Request(
                text=text, source=source, stamp=stamp, until=until, is_additional=True, is_obsolete=is_obsolete
            )
            self._requests.append(request)
            self._wake.set()

    def run_with_agreement(self, task: Callable[[Agreement], None]) -> bool:
        """Call `task` on the background thread, with the `Agreement` object of this rank as argument.

        Return True without waiting for the call. If there are no other ranks with which this rank agrees, return False
        without calling `task`.
        """
        if self._agreement is None:
            return False
        self._tasks.put(task)
        self._wake.set()
        return True

    def _submit(self, text: str, source: str, stamp: int | None) -> None:
        self._requested_on = self._sampling(text, source).on
        if self._agreement is None:
            self._put_here(text, source, None)
        else:
            self._requests.append(_Request(text=text, source=source, stamp=stamp))
            self._wake.set()

    def _put_here(self, text: str, source: str, step: int | None) -> None:
        if self._is_alone:
            self._tell(f"the change of sampling by {source} applies to this rank only: no key-value store is available")
        self._put(text, source, step)

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
        """Determine whether a pending change takes effect at step number `step`, which is about to begin.

        The training thread waits for this only if the rank has acknowledged the change, and does not know yet whether
        the ranks have committed it.
        """
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
        """Determine whether a pending change takes effect at the next step, so that its hooks can be registered."""
        self.on_before_step(self._pace.now()[0] + 1)

    # The thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            is_busy = self._agreement is not None and (self._agreement.pending or bool(self._requests))
            self._wake.wait(self._base.switch_poll_seconds * (_BUSY_SHARE if is_busy else 1.0))
            self._wake.clear()
            if not self._stopped.is_set():
                if self._file is not None:
                    self._boundary.call("the switch file", self._poll_file, self._file)
                self._boundary.call("agreeing with other ranks on sampling", self._take_part)

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
        """Claim the task of ending a sampling period for this rank, or return whether a rank has claimed this task.

        The rank that claims the task sets `dynamic_on` to false in the switch file. The function `question` is
        `Agreement.claim` or `Agreement.is_claimed`; its result is returned. `stamp` identifies the edit of the switch
        file that started the sampling period. If this rank has no agreement with other ranks, or cannot reach the
        key-value store, return `alone`.
        """
        try:
            return alone if self._agreement is None else question(self._agreement, f"ended/{stamp}")
        except (RuntimeError, ValueError) as error:
            self._continue_alone(error)
            return alone

    def _take_part(self) -> None:
        def look() -> list[Proposal]:
            agreement = self._agreement
            if agreement is None:
                self._apply_requests()  # of a thread that had read `_agreement` before the store failed
                return []
            while not self._tasks.empty():
                self._tasks.get()(agreement)
            proposed = 0
            for item in tuple(self._requests):
                if not item.is_obsolete() and not agreement.propose(
                    item.text, item.source, item.stamp, until=item.until, is_additional=item.is_additional
                ):
                    break  # another change is pending, or other ranks have written at the same time
                proposed += 1
            changes = agreement.look()
            for _ in range(proposed):  # not before the store has answered: if it fails, they apply to this rank
                self._requests.popleft()
            return changes

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
        """From now on, apply sampling changes to this rank only, because the key-value store cannot be reached.

        The process that holds the store has exited, or the process group was destroyed. Changes without a known outcome
        and queued requests apply too.
        """
        agreement, self._agreement = self._agreement, None
        if agreement is None:  # the other thread has found the same
            return
        self._is_alone = True
        log.info("the key-value store is not available, changes of sampling now apply to this rank only: %s", error)
        queued = {item.text for item in self._requests}
        for change in agreement.unresolved:
            if change.document not in queued:
                self._boundary.call("switching", self._put_here, change.document, change.source, change.step)
        self._apply_requests()

    def _apply_requests(self) -> None:
        while self._requests:
            item = self._requests.popleft()
            if not item.is_obsolete():
                self._boundary.call("switching", self._put_here, item.text, item.source, None)
