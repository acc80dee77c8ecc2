"""Read progress bars of tqdm: the states of a bar with numbers, and the step that a bar shows before a dictionary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rankscope_ingest.importers.common.decisions import is_of_training
from rankscope_ingest.importers.common.log_names import BAR, Role, role_of
from rankscope_ingest.importers.common.pairs import EVALUATION_MARK, match_of

_BAR: Final = re.compile(
    r"\d{1,3}%\|[^\r|]{0,400}\|\s{0,20}(?P<step>\d{1,15})/(?P<planned>\d{1,15}) "
    r"\[[^\[\],\r]{1,40}(?:,\s{0,20}[\d.?]{1,20}(?:[A-Za-z]{1,16}/s|s/[A-Za-z]{1,16}))?(?P<mark>\]|, )"
)
"""A regular expression for a bar without its name, which is before it, and its numbers, which are after `mark`.

A name in this expression would be searched from each blank before a bar: tqdm clears a bar with many blanks.
"""
_NAME_CHARACTERS: Final = 80
_EPOCH: Final = re.compile(r"\bepoch:?[ =]{0,2}\[?\s*(?P<epoch>\d{1,9})\b", re.IGNORECASE)
_EVALUATION: Final = re.compile(r"\b(?:eval|valid|val\b|test|predict)", re.IGNORECASE)
_TRAINING: Final = re.compile(r"train", re.IGNORECASE)
_MARKS: Final = ("%|", "it/s", "s/it")
_NUMBERS: Final = re.compile(r"[A-Za-z]\s?[:=]\s*[-+]?\.?\d")


def states(text: str) -> list[str]:
    """Return the states of a line that is drawn again and again; those of a bar as `bar_step 10/100 loss=2.1`.

    Text that is not a progress bar with numbers, or of which all states are empty but the last, is returned unchanged.
    """
    if not has_bar(text):
        parts = [part for part in text.split("\r") if part.strip()] if "\r" in text else []
        return list(dict.fromkeys(parts)) or [text]
    found = [line for part in text.split("\r") if (line := _bar_line(part) or _named_bar(part)) is not None]
    return list(dict.fromkeys(found)) or [text]


def _named_bar(part: str) -> str | None:
    """Return a state of a bar whose name contains numbers, as the pattern of a tool describes it; otherwise None."""
    return part if match_of(part.strip()) else None


def has_bar(text: str) -> bool:
    """Return whether `text` may contain a progress bar."""
    return "|" in text and any(mark in text for mark in _MARKS)


def _bar_line(part: str) -> str | None:
    bar = next(_bars(part), None)
    if bar is None:
        return None
    name = _name(part, 0, bar)
    numbers = part[bar.end() : part.rfind("]")].strip() if bar["mark"] != "]" else ""
    if not numbers and _NUMBERS.search(name):
        numbers = _EPOCH.sub("", name)
    if not numbers:
        return None
    if _EVALUATION.search(name) and not _TRAINING.search(name):
        return f"{EVALUATION_MARK}[{bar['step']}/{bar['planned']}] {numbers}"
    epoch = _EPOCH.search(name)
    before = f"epoch {epoch['epoch']} " if epoch else ""
    planned = "" if epoch else f"/{bar['planned']}"  # with an epoch, the plan is that of the epoch
    return f"{before}{BAR} {bar['step']}{planned} {numbers}"


def _bars(part: str) -> Iterator[re.Match[str]]:
    """Yield the bars in a text without carriage returns. The numbers of a bar are the rest of the text up to a `]`."""
    end = part.rfind("]")
    for bar in _BAR.finditer(part, 0, end + 1):
        if bar.end() > end + (bar["mark"] == "]"):
            return
        yield bar
        if bar["mark"] != "]":
            return


def _name(part: str, begin: int, bar: re.Match[str]) -> str:
    """Return the name before `bar`, which begins at `begin` or later and has at most 80 characters."""
    before = part[max(begin, bar.start() - _NAME_CHARACTERS) : bar.start()].rstrip(" |:")
    return before[max(before.rfind("|"), before.rfind("%")) + 1 :].strip()


class Bars:
    """The positions of the progress bars of one log.

    The bar before the first dictionary of training is the bar of the training. Other bars, such as those of an
    evaluation, give no step.
    """

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], int] = {}
        self._latest: tuple[str, str] | None = None
        self._of_training: tuple[str, str] | None = None
        self._used: int | None = None

    @property
    def has_position(self) -> bool:
        """True if the log has shown a bar."""
        return self._latest is not None

    def see(self, text: str) -> bool:
        """Store the positions of the bars in `text`. Return whether there is a bar."""
        if not has_bar(text):
            return False
        is_bar = False
        for part in text.split("\r"):
            end = 0
            for bar in _bars(part):
                self._latest = _name(part, end, bar), bar["planned"]
                self._shown[self._latest] = int(bar["step"])
                end = bar.end()
                is_bar = True
        return is_bar

    def with_step(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a printed dictionary with the position of the bar of the training, unless it contains a step.

        A position is the step of one dictionary of training only: a bar that has not moved shows no new step.
        """
        if self._latest is None or any(role_of(key) in {Role.STEP, Role.STEP_OF_PLAN} for key in document):
            return document
        is_training = any(is_of_training(key) for key in document)
        if self._of_training is None and is_training:
            self._of_training = self._latest
        step = self._shown.get(self._of_training) if self._of_training else None
        if self._of_training is None or step is None or (is_training and step == self._used):
            return document
        self._used = step if is_training else self._used
        return {**document, BAR: f"{step}/{self._of_training[1]}"}
