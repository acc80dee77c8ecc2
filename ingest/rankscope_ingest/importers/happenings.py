"""What the events that logs name for themselves are in our terms: `train_start` is a launch, `epoch_end` a phase."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rankscope_contract.events import EventType, Severity


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
