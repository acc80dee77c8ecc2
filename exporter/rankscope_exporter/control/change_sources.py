"""The sources of sampling changes: a file, a call of the script, an HTTP request, and reactions of the monitor.

A background thread writes the changes of this rank to the log of changes, polls those of other ranks, and polls the
switch file. It runs only if there is a switch file, or if other ranks may request changes. The training thread never
waits for it.

The switch file: an edit is read only when two polls in succession find the same content, because an editor may still
be writing the file at the first poll. When sampling has ended, one rank sets `dynamic_on` to false in the file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from rankscope_exporter.config.loader import parse_settings
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.control.changes import Change, ChangeLog, ChangeQueue, PlannedChange
from rankscope_exporter.process.errors import ConfigError, ShareError
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.training.sampling_config import (
    SWITCH,
    Part,
    SamplingConfig,
    document_text,
    sampling_config_from,
)

_SWITCHED_ON: Final = re.compile(r"""(["']?\bdynamic_on["']?\s*[:=]\s*)[Tt]rue\b""")


class SwitchFile:
    """A switch file at a path. The file need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.stamp = 0
        """Modification time, in nanoseconds, of the file content that `poll` returned last. Initially 0."""
        self._known: str | None = None  # the text that was returned last
        self._seen: tuple[int, str] | None = None  # the content at the last poll

    def poll(self, *, is_first: bool = False) -> str | None:
        """Return a new content of the switch file as a sampling document (JSON), once two polls in succession find it.

        The first poll returns the present content. Return None if there is no new content, or no file. Raises
        ConfigError for an invalid content, once for each such content.
        """
        found, before = self._content(), self._seen
        self._seen = found
        if found is None or found[1] == self._known or not (is_first or found == before):
            return None
        self.stamp, self._known = found
        return document_text(parse_settings(self.path, self._known))

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

    def _content(self) -> tuple[int, str] | None:
        with contextlib.suppress(FileNotFoundError):
            # Read at each poll: an edit within the resolution of the file system's clock does not change the time.
            data = self.path.read_bytes()
            try:
                return self.path.stat().st_mtime_ns, data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.path}: {error}") from error
        return None


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

ANSWER_SECONDS: Final = 2.0
"""Longest time in seconds that the answer to an HTTP request waits until the change is in the key-value store."""

_T = TypeVar("_T")

MakeChange = Callable[[Mapping[str, Any], int | None], PlannedChange]
"""Function that returns an automatic change of the sampling.

The arguments are the JSON document of the change, and the step from which it is valid, None for the next step.
"""


@dataclass(eq=False, kw_only=True)
class ChangeSources:
    """The sources of sampling changes on one rank.

    All sources add their changes to the log of changes that the ranks share. If `change_log` is None, changes apply at
    the next step, and to this rank only. The function `parts` returns the quantities of a sampling configuration, each
    with the steps at which it is sampled and the statistics to publish.

    Only the background thread accesses the key-value store, after `start`.
    """

    base: MonitorConfig
    change_queue: ChangeQueue
    parts: Callable[[MonitorConfig], list[Part]]
    tell: Callable[[str], None]
    change_log: ChangeLog | None

    def __post_init__(self) -> None:
        self.boundary = self.change_queue.boundary
        self.reactions: dict[str, MakeChange] = {}
        """By source, the functions for changes that are not made by a user, such as captures."""
        self._is_alone = False  # the key-value store has failed
        self._file = None if self.base.switch_file is None else SwitchFile(self.base.switch_file)
        self._file_error: str | None = None  # that was reported last
        self._tasks: deque[Callable[[], None]] = deque()
        self._calls = itertools.count(1)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self.thread = OwnThread(target=self._run, name="rankscope-switch", on_fault=self.boundary.report)
        self._is_end_handled = False
        self._requested_on = False  # whether the last request switches sampling on

    def start(self) -> None:
        """Read the first sampling configuration, which is that of the first rank, and start the background thread.

        The thread is started only if there is a switch file, or if other ranks may request changes.
        """
        self.boundary.call("switching", self._begin)
        base = self.base
        has_requests = base.max_overhead is not None or base.capture is not None or base.serve.secret is not None
        if self._file is not None or (self.change_log is not None and has_requests):
            self.thread.start()

    def _begin(self) -> None:
        text = None if self._file is None else self._edit_of(self._file, is_first=True)
        step = self.change_queue.first_step + 1  # the first step is never measured in dynamic mode
        stamp = 0 if self._file is None or text is None else self._file.stamp
        mine = Change(document=text or _OFF, source=FILE, step=step, stamp=stamp)
        first = self._ask(lambda log: log.begin(mine), mine)
        if self._file is not None and self._sampling(first.document, FILE).on:
            self._put(first)

    def stop(self) -> None:
        """Stop the background thread that polls the switch file and the changes of other ranks.

        If all quantities were sampled as often as the setting `times` requires, set `dynamic_on` to false in the switch
        file.
        """
        self._stopped.set()
        self._wake.set()
        if self.thread.ident is not None:
            self.thread.join(1.0)
        if self.change_queue.is_over() and self._file is not None:
            self.boundary.call("the switch file", self._switch_off, self._file)

    # Requests, from any thread.

    def call(self, document: Mapping[str, Any]) -> None:
        """Request the change that a call of `Monitor.switch` describes.

        Raises ConfigError if `document` is invalid. Does not wait: if the change cannot be stored, a notice reports it.
        """
        self._submit(Change(document=document_text(document), source=CALL, stamp=next(self._calls)))
        if self.change_log is not None and self.thread.ident is None:
            self.thread.start()

    def request(self, document: Mapping[str, Any]) -> None:
        """Request the change that an HTTP request describes.

        Raises ConfigError if `document` is invalid, and ShareError if the change could not be stored for the other
        ranks. Waits at most `ANSWER_SECONDS` for this.
        """
        self._submit(Change(document=document_text(document), source=REQUEST))
        done = threading.Event()
        self._do(done.set)  # after the change
        done.wait(ANSWER_SECONDS)
        if self._is_alone:
            raise ShareError(_alone_text(REQUEST))

    def request_reaction(
        self, document: Mapping[str, Any], source: str, *, stamp: int | None = None, until: int | None = None
    ) -> None:
        """Request an automatic change of the sampling on all ranks, which `reactions` has for `source`.

        `stamp` is a number that orders the requests of `source`. All ranks ignore later requests of `source` with a
        stamp of at most `until`.
        """
        self._do(partial(self._share, Change(document=document_text(document), source=source, stamp=stamp), until))

    def count(self, name: str, amount: int, then: Callable[[int | None], None]) -> None:
        """Add `amount` to the counter `name` that all ranks share, and call `then` with its new value.

        The value is None if there are no other ranks, or if the key-value store has failed.
        """
        self._do(lambda: then(self._ask(lambda log: log.count(name, amount), None)))

    def _submit(self, change: Change) -> None:
        self._requested_on = self._sampling(change.document, change.source).on
        self._do(partial(self._share, change))

    def _do(self, task: Callable[[], None]) -> None:
        """Call `task` on the background thread if there are other ranks, after all tasks before it; otherwise now."""
        if self.change_log is None and not self._tasks:
            self.boundary.call("switching", task)
        else:
            self._tasks.append(task)
            self._wake.set()

    def _share(self, change: Change, until: int | None = None) -> None:
        """Add `change` to the log of changes. Without one, apply it to this rank."""
        if not self._ask(lambda log: log.write(change, until), alone=False):
            if self._is_alone:
                self.tell(_alone_text(change.source))
            self._put(change)

    def _ask(self, question: Callable[[ChangeLog], _T], alone: _T) -> _T:
        """Return `question` of the log of changes, and put the changes that were read into the queue.

        Return `alone` if there is no log. If the process with the key-value store has exited, or if the process group
        was destroyed, changes apply to this rank only from now on.
        """
        log_of_ranks = self.change_log
        if log_of_ranks is None:
            return alone
        try:
            return question(log_of_ranks)
        except (RuntimeError, ValueError) as error:
            self.change_log, self._is_alone = None, True
            log.info("the key-value store is not available, changes of sampling now apply to this rank only: %s", error)
            return alone
        finally:
            while log_of_ranks.unread:
                self.boundary.call("switching", self._put, log_of_ranks.unread.popleft())

    def _put(self, change: Change) -> None:
        document = json.loads(change.document)
        make = self.reactions.get(change.source)
        if make is not None:
            self.change_queue.put(make(document, change.step))
            return
        sampling = self._sampling(change.document, change.source)
        self._requested_on, self._is_end_handled = sampling.on, False
        parts = self.parts(sampling.config) if sampling.on else []
        self.change_queue.put_sampling(change.step, change.source, sampling, parts)

    def _sampling(self, text: str, source: str) -> SamplingConfig:
        return sampling_config_from(json.loads(text), self.base, on=source != FILE)

    # The thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self.base.switch_poll_seconds)
            self._wake.clear()
            if not self._stopped.is_set():
                if self._file is not None:
                    self.boundary.call("the switch file", self._poll_file, self._file)
                while self._tasks:
                    self.boundary.call("switching", self._tasks[0])
                    self._tasks.popleft()  # not earlier: see `_do`
                self.boundary.call("reading the changes of other ranks", self._ask, ChangeLog.poll, None)

    def _poll_file(self, file: SwitchFile) -> None:
        ended = f"ended/{file.stamp}"  # counts the ranks that have switched this content off
        if self.change_queue.ended.is_set() and not self._is_end_handled:
            self._is_end_handled, self._requested_on = True, False
            if self._ask(lambda log: log.count(ended, 1), alone=1) == 1:
                self._switch_off(file)
        text = self._edit_of(file)
        # "Off" is not a change if sampling is off, or if another rank has written it because sampling has ended.
        if text is not None and (
            self._sampling(text, FILE).on
            or (self._requested_on and not self._ask(lambda log: log.count(ended, 0), alone=0))
        ):
            self._submit(Change(document=text, source=FILE, stamp=file.stamp))

    def _edit_of(self, file: SwitchFile, *, is_first: bool = False) -> str | None:
        """Return the result of `file.poll`; None after reporting that the content of the file is not valid."""
        try:
            text = file.poll(is_first=is_first)
            if text is not None:
                self._sampling(text, FILE)
                self._file_error = None
        except (ConfigError, OSError) as error:
            message = f"the switch file cannot be used, sampling does not change: {error}"
            if message != self._file_error:
                self._file_error = message
                self.tell(message)
            return None
        return text

    def _switch_off(self, file: SwitchFile) -> None:
        try:
            file.switch_off()
        except (ConfigError, OSError) as error:
            self.tell(f"sampling has ended, but dynamic_on cannot be set to false in the switch file: {error}")


def _alone_text(source: str) -> str:
    return f"the change of sampling by {source} applies to this rank only: no key-value store is available"
