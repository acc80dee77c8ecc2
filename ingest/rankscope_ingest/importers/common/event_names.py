"""Classes of errors that lines of any training log show: what broke, so that it can be counted and alerted on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import EventType, Severity


@dataclass(frozen=True, slots=True)
class Happening:
    """Type and severity of an event, and whether training came to its end with it."""

    type: str
    severity: str = Severity.INFO
    ends_well: bool = False


_WHOLE_RUN: Final = r"^(?:on_)?(?:(?:train(?:ing|er)?|run|fit|job)[ _.-]?)?"
_KINDS: Final = (
    (re.compile(r"error|exception|crash|fail|abort|oom"), Happening(EventType.ERROR, Severity.CRITICAL)),
    (re.compile(r"checkpoint|ckpt|save"), Happening(EventType.CHECKPOINT)),
    (re.compile(r"eval|valid"), Happening(EventType.EVALUATION)),
    (re.compile(rf"{_WHOLE_RUN}(?:start|begin|init)(?:ed|s)?$"), Happening(EventType.LAUNCH)),
    (
        re.compile(rf"{_WHOLE_RUN}(?:end|ended|finish|finished|complete|completed|done)$"),
        Happening(EventType.EXIT, ends_well=True),
    ),
    (re.compile(r"(?:start|begin|end|finish|complete)(?:ed)?$"), Happening(EventType.PHASE)),
)


def happening(name: str) -> Happening:
    """Return what an event called `name` is; one we do not know is a note."""
    folded = name.strip().lower()[:100]
    for pattern, found in _KINDS:
        if pattern.search(folded):
            return found
    return Happening(EventType.NOTE)


_ERRORS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("cancelled", re.compile(r"CANCELLED AT|DUE TO TIME LIMIT|Job step aborted|scancel")),
    ("out_of_memory", re.compile(r"CUDA out of memory|OutOfMemoryError|oom-kill|Out of memory:")),
    ("rendezvous", re.compile(r"[Rr]endezvous\w*(?:Error|Timeout| failed| timed out)")),
    ("nccl", re.compile(r"NCCL (?:WARN|ERROR|error)|DistBackendError|ProcessGroupNCCL.*(?:timeout|Watchdog|abort)"
                        r"|[Ww]atchdog caught|NCCL communicator was aborted"
                        r"|ncclSystemError|ncclRemoteError|ncclInternalError")),
    ("cudnn", re.compile(r"cuDNN error|CUDNN_STATUS_(?!SUCCESS)")),
    ("cuda", re.compile(r"CUDA error|CUBLAS_STATUS_(?!SUCCESS)|device-side assert|Xid \(")),
    ("signal", re.compile(r"SIGTERM|SIGINT|SIGKILL|SIGABRT|SIGSEGV|Killing subprocess|[Kk]illed by signal|got signal"
                          r"|task \d+: Killed|^Killed$")),
    ("segmentation_fault", re.compile(r"[Ss]egmentation fault|core dumped")),
    ("no_space", re.compile(r"No space left on device")),
    ("permission", re.compile(r"PermissionError|Permission denied")),
    ("file_not_found", re.compile(r"FileNotFoundError|No such file or directory")),
    ("connection", re.compile(r"Connection(?:Refused|Reset)Error|Connection (?:refused|reset)")),
    ("timed_out", re.compile(r"TimeoutError|[Tt]imed out")),
    ("exception", re.compile(r"Traceback \(most recent call last\)|^[A-Za-z_][\w.]*(?:Error|Exception)(?::|$)")),
)  # fmt: skip
STOPPING: Final = frozenset({"cancelled", "signal"})
"""Classes that mean somebody ended the run, rather than that it broke."""


def error_class(line: str) -> str | None:
    """Return the class of the error that a line shows, None where it shows none."""
    return next((name for name, pattern in _ERRORS if pattern.search(line)), None)
