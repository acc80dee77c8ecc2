"""Find the headings in a text log that begin an evaluation or the training, and mark the rows below them."""

from __future__ import annotations

import re
from typing import Any, Final

from rankscope_ingest.importers.common.log_names import EPOCH, canonical
from rankscope_ingest.importers.common.pairs import Line

_MAX_CHARACTERS: Final = 80
_NAMED: Final = re.compile(r"eval|valid|\btest|train|\bval\b", re.IGNORECASE)
_IN_BRACKETS: Final = re.compile(r"\([^()]*\)")
_WORD: Final = re.compile(r"[A-Za-z]+")
_EVALUATION: Final = frozenset((
    "eval", "evaluation", "evaluate", "evaluating", "validation", "validate", "validating", "valid", "val",
))  # fmt: skip
_TEST: Final = frozenset(("test", "testing"))
_TRAINING: Final = frozenset(("train", "training"))
_OTHERS: Final = frozenset((
    "run", "running", "start", "starting", "started", "begin", "beginning", "phase", "performance", "loop", "epoch",
    "epochs", "set", "results", "result", "metrics", "stage", "model", "the", "on", "mode", "step", "iteration",
    "summary", "statistics", "loss", "losses",
))  # fmt: skip
"""Words that may be next to the name of the part in a heading."""
_OF_TRAINING: Final = frozenset(("learning_rate", "grad_norm", "loss_scale"))
"""Stored names of quantities that an evaluation does not have."""


class Sections:
    """The part of a log, the training or an evaluation, to which its next row belongs.

    A heading of an evaluation, such as `> EVALUATION`, holds until the next heading of training, the next epoch, or a
    row with a quantity that only the training has. In a log without headings of training, it also ends if the counter
    of the first row below it continues that of the training. Evaluations before the first row of training count
    nothing: such a heading may be one of the configuration.
    """

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        """The counters of the last row of training."""
        self._split: str | None = None
        self._has_training_headings = False
        self._is_checked = False

    def context(self) -> tuple[Any, ...]:
        """Return the state on which the meaning of a row depends, apart from the counters of the row before it."""
        return self._split, bool(self.counters), self._has_training_headings, self._is_checked

    def begin(self, text: str) -> bool:
        """Begin the part of which `text` is the heading; return False if `text` is no heading."""
        if len(text) > _MAX_CHARACTERS or not _NAMED.search(text):
            return False
        words = {word.lower() for word in _WORD.findall(_IN_BRACKETS.sub("", text))}
        parts = words - _OTHERS
        if not parts or parts - _EVALUATION - _TEST - _TRAINING or any(map(str.isdigit, _IN_BRACKETS.sub("", text))):
            return False
        self._split = None
        if parts <= _TRAINING:
            self._has_training_headings = True
        elif self.counters:
            self._split = "test" if parts & _TEST else "eval"
            self._is_checked = False
        return True

    def end(self) -> None:
        """End an evaluation: a new epoch begins with training."""
        self._split = None

    def place(self, line: Line, *, has_counters: bool) -> None:
        """Give a row of an evaluation its split and the counters of the training; take those of a row of training.

        With `has_counters`, the counters of the row are on its own line.
        """
        if self._split is not None and self._is_training(line, has_counters=has_counters):
            self._split = None
        if self._split is not None and "split" not in line.prefix:
            line.prefix["split"] = self._split
            line.counters = dict(self.counters)
        elif "split" not in line.prefix and line.counters:
            self.counters = line.counters

    def _is_training(self, line: Line, *, has_counters: bool) -> bool:
        if any(canonical(name).name in _OF_TRAINING for name in line.pairs):
            return True
        if self._is_checked or self._has_training_headings or not has_counters:
            return False
        self._is_checked = True
        return any(
            _count(line.counters[key]) > _count(before)
            for key, before in self.counters.items()
            if key in line.counters and key != EPOCH
        )


def _count(counter: Any) -> int:
    return int(str(counter).partition("/")[0])
