"""Find the lines of a log that report a failure (errors, signals, cancelled jobs) or the end of the training.

The module performs no I/O. The importer of Megatron logs and all importers of lines use the same patterns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rankscope_contract.model.events import EventType, ExitReason, RunState, Severity
from rankscope_contract.model.redaction import MAX_NAME, redacted_text

_MAX_SEEN: Final = 10_000
_EXAMINED_CHARACTERS: Final = 4096  # a pattern such as `a.*b` needs the square of this number of steps

LABELS: Final = re.compile(
    r"^(?:\[[^\[\]|]{1,120}\](?:<std(?:out|err)>)?:[ \t]*"  # torch prints no space: `[rank3]:[E501 …`
    r"|(?:[\w.-]{1,80}:(?=[ \t]+(?:\(|time|\[|val|sav|succ|load))|\d{1,9}:)[ \t]+)+"
)
"""A regular expression for the labels that a launcher prints before the lines of each rank."""

_HEADING: Final = r"Traceback \(most recent call last\)"
"""A regular expression for the first line of a traceback, which does not name the exception."""

_CHAIN: Final = re.compile(
    r"^(During handling of the above exception, another exception occurred|The above exception was the direct cause of)"
)
"""Line between an exception and the traceback of a further exception that followed from it."""

_NAMELESS: Final = re.compile(f"{_HEADING}|{_CHAIN.pattern[1:]}")

_CERTAIN: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("cancelled", re.compile(r"CANCELLED AT|DUE TO TIME LIMIT|Job step aborted|scancel")),
    ("out_of_memory", re.compile(r"(?:CUDA|NPU|HIP|XPU|MPS backend) out of memory|OutOfMemoryError|oom[-_]kill"
                                 r"|Out of memory(?::| while)")),
    ("rendezvous", re.compile(r"[Rr]endezvous\w*(?:Error|Timeout| failed| timed out)")),
    ("nccl", re.compile(r"NCCL (?:ERROR|error)|DistBackendError|ProcessGroupNCCL.*(?:operation timeout|by watchdog)"
                        r"|[Ww]atchdog caught|NCCL communicator was aborted"
                        r"|ncclSystemError|ncclRemoteError|ncclInternalError")),
    ("hccl", re.compile(r"ProcessGroupHCCL.*(?:operation timeout|by watchdog)|HcclError|\bEI000[26]\b.*time")),
    ("gloo", re.compile(r"gloo.*(?:Timed out waiting|Connection closed by peer)")),
    ("cudnn", re.compile(r"cuDNN error|CUDNN_STATUS_(?!SUCCESS)")),
    ("cuda", re.compile(r"CUDA error|CUBLAS_STATUS_(?!SUCCESS)|device-side assert|Xid \(")),
    ("signal", re.compile(r"(?:[Rr]eceived|[Gg]ot|[Cc]aught|[Cc]losing) (?:\d+ )?(?:death )?signal\b(?!s)"
                          r"|(?:[Rr]eceived|[Gg]ot|[Cc]aught|by) (?:signal )?SIG(?:TERM|INT|KILL|ABRT|SEGV)\b"
                          r"|Killing subprocess|[Kk]illed by signal|task \d+: Killed|^Killed$|^KeyboardInterrupt\b")),
    ("segmentation_fault", re.compile(r"[Ss]egmentation fault|core dumped")),
    ("no_space", re.compile(r"No space left on device")),
    ("exception", re.compile(_HEADING + r"|^[A-Za-z_][\w.]*(?:Error|Exception)(?::|$)")),
)  # fmt: skip
_POSSIBLE: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("nccl", re.compile(r"NCCL WARN|ProcessGroupNCCL.*(?:timeout|Watchdog|abort)")),
    ("signal", re.compile(r"SIGTERM|SIGINT|SIGKILL|SIGABRT|SIGSEGV|got signal")),
    ("permission", re.compile(r"PermissionError|Permission denied")),
    ("file_not_found", re.compile(r"FileNotFoundError|No such file or directory")),
    ("connection", re.compile(r"Connection(?:Refused|Reset)Error|Connection (?:refused|reset)")),
    ("timed_out", re.compile(r"TimeoutError|[Tt]imed out")),
)
"""Names of failures and patterns of lines, which healthy programs of other tools than Megatron print as well."""

_DURATION: Final = r"\d+:[\d:.]+|\d[\d.,]* ?(?:s|sec\w*|m|min\w*|h|hours?)\b"
ENDS: Final = re.compile(
    r"(?i)^(?:(?!\b(?:epoch|fold|stage|phase|round|step|batch|tokenizer)\b).){0,200}?"
    r"(?:^|[\])}>|:*=#-]\s*|\b(?:INFO|NOTICE|WARNING)\s+)"
    r"(?P<end>(?:model )?training(?: run| job| loop)?(?: is| has| was)?(?: been)? "
    r"(?:done|complete|finish|end)(?:ed|d)?\b|(?:finished|completed|done)(?: with)? training\b"
    r"|`?Trainer\.fit`? stopped: .{1,80}? reached)(?: successfully)?"
    rf"(?=\W*$|\. Do not forget|(?:\W+(?:(?:in|after|took)\W+)?(?:{_DURATION}))+\W*$"
    r"|,? (?:at (?:step|iteration) \d[\d,]*|after \d[\d,]* (?:step|iteration|epoch)s?)\W*$)"
)
"""A regular expression for a line or a message that reports the end of the training, not that of a part of it."""

_ERROR: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|(?<!Signal)Exception): ")
_STOPPING: Final = frozenset({"cancelled", "signal"})
"""Names of failures which mean that a user or the scheduler stopped the run, so that the run did not fail."""

_PARTS: Final = (
    b"rror", b"xception", b"Traceback", b"atchdog", b"NCCL", b"HCCL", b"EI000", b"gloo", b"ut of memory", b"oom-kill",
    b"oom_kill", b"CANCELLED", b"TIME LIMIT", b"step aborted", b"scancel", b"endezvous", b"CUDNN_", b"CUBLAS_", b"Xid",
    b"-side assert", b" SIG", b"signal", b"Kill", b"egmentation", b"core dumped", b"No space", b"KeyboardI",
    b"raining", b"RAINING", b"Trainer.fit",
)  # fmt: skip
"""Texts of which every certain failure, and every end of a training, contains at least one.

To find them takes less time than to match patterns.
"""


def failure_event(text: str, *, is_certain: bool = True) -> tuple[dict[str, Any], tuple[str, str]] | None:
    """Return the event of a line that reports a failure or the end, and the state and reason of a run that ends there.

    `text` is the line without labels and colours. With `is_certain`, only patterns apply that no healthy program
    prints. The event of a line between chained exceptions is empty. Return None for any other line. Only the first
    4,096 characters are examined.
    """
    text = text[:_EXAMINED_CHARACTERS]
    if end := ENDS.search(text):
        details = json.dumps({"reason": ExitReason.COMPLETED})
        event = {"type": EventType.EXIT, "severity": Severity.INFO, "message": text, "op": None, "details": details}
        return event, (RunState.COMPLETED, end["end"])
    reason = redacted_text(text, MAX_NAME)
    patterns = _CERTAIN if is_certain else (*_CERTAIN[:-1], *_POSSIBLE, _CERTAIN[-1])
    name = next((name for name, pattern in patterns if pattern.search(text)), None)
    if _CHAIN.search(text):
        return {}, (RunState.FAILED, f"exception: {reason}")
    if name is None:
        return None
    if name in _STOPPING and _ERROR.match(text):  # a worker that a signal ended is the reason of the error
        name = "exception"
    is_stop = name in _STOPPING
    severity = Severity.WARNING if is_stop else Severity.CRITICAL
    event = {"type": EventType.ERROR, "severity": severity, "message": text, "op": name}
    return event, (RunState.STOPPED if is_stop else RunState.FAILED, f"{name.replace('_', ' ')}: {reason}")


def failure_key(event: Mapping[str, Any], rank: int | None) -> tuple[str, int | None]:
    """Return a key of an event of a failure. Only the first event of each key is stored, until training continues."""
    name = str(event["op"])
    if name == "exception" and not re.search(_HEADING, event["message"]):
        name = event["message"].partition(":")[0]  # the type of the exception
    return name, rank


def ending_after(known: tuple[str, str] | None, found: tuple[str, str]) -> tuple[str, str]:
    """Return the end of a run (state and reason) after another failure in its log.

    A failure makes the scheduler cancel other ranks, and cancelled ranks print failures: the first one is the cause.
    The first line of a traceback names no cause, so that the failure below it is taken. Of chained exceptions, the last
    one ends the program; an error such as that of CUDA is more precise than the exceptions that follow from it.
    """
    if known is None or found[0] == RunState.COMPLETED:
        return found
    is_chained = bool(_CHAIN.search(found[1].removeprefix("exception: "))) and known[1].startswith("exception: ")
    is_named = found[0] == RunState.FAILED or "KeyboardInterrupt" in found[1]
    return found if is_chained or (_NAMELESS.search(known[1]) and is_named) else known


class FailureLine(NamedTuple):
    """A line that reports a failure."""

    event: dict[str, Any]
    """The columns of its event."""
    ending: tuple[str, str]
    """State and reason of a run that ends with the line."""
    rank: int | None
    timestamp: str | None

    @property
    def key(self) -> tuple[str, int | None]:
        """The failure and the rank. Only the first of the lines with the same key is stored."""
        return failure_key(self.event, self.rank) if self.event else ("", self.rank)


class FailureLines:
    """Finds failures in the lines of one log, each failure of a rank once until training continues."""

    def __init__(self) -> None:
        self.ending: tuple[str, str] | None = None
        """State and reason of the end of the run, according to the first failure after the last record."""
        self._seen: set[tuple[str, int | None]] = set()

    @staticmethod
    def is_possible(line: bytes) -> bool:
        """Return whether `line` may report a failure; false for most lines."""
        for part in _PARTS:  # noqa: SIM110 - `any` takes twice the time, and this runs for each line
            if part in line:
                return True
        return False

    def record_seen(self) -> None:
        """Discard the end of the run, because a record follows: training continued."""
        self.ending = None
        self._seen.clear()

    @staticmethod
    def found_in(text: str, prefix: Mapping[str, Any]) -> FailureLine | None:
        """Return the failure that `text`, a line without colours, reports; None if it reports none.

        `prefix` contains the rank and the time of the line, if the line has them.
        """
        found = failure_event(LABELS.sub("", _after_bar(text)))
        return FailureLine(*found, prefix.get("rank"), prefix.get("timestamp")) if found else None

    def event(self, failure: FailureLine) -> dict[str, Any] | None:
        """Return the columns of the event of a line; None if it reports no new failure."""
        event, ending, *_ = failure
        self.ending = ending_after(self.ending, ending)
        if not event or failure.key in self._seen or len(self._seen) >= _MAX_SEEN:
            return None
        self._seen.add(failure.key)
        return event


def _after_bar(text: str) -> str:
    """Return the part of `text` behind the last progress bar, where another process printed on the same line."""
    at = max(text.rfind("it/s"), text.rfind("s/it"))
    begin, end = text.rfind("[", 0, max(at, 0)), text.find("]", max(at, 0))
    is_bar = at >= 0 and end >= 0 and begin >= 0 and text.rfind("]", begin, at) < 0 and "|" in text[:begin]
    return text[end + 1 :].lstrip() if is_bar else text
