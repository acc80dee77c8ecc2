"""Progress bars that tell numbers: `Steps:  5%|▌   | 50/1000 [00:10<03:10, 5.0it/s, lr=1e-05, step_loss=0.21]`.

Each writes over the one before, so that one line of a file holds many. Pure.
"""

from __future__ import annotations

import re
from typing import Final

_BAR: Final = re.compile(
    r"\|\s*(?P<step>\d{1,15})/(?P<planned>\d{1,15}) "
    r"\[[^\[\],]{1,40},\s*[\d.?]{1,20}(?:it/s|s/it)(?:, (?P<told>[^\r\n]*))?\]"
)
_EPOCH: Final = re.compile(r"\bepoch:?[ =]{0,2}(?P<epoch>\d{1,9})\b", re.IGNORECASE)


def written_over(text: str) -> list[str]:
    """Return what a line shows one after the other, as lines with a step; itself when it is no bar with numbers."""
    if "|" not in text or ("it/s" not in text and "s/it" not in text):
        return [text]
    shown = [line for part in text.split("\r") if (line := _as_line(part)) is not None]
    return list(dict.fromkeys(shown)) or [text]


def _as_line(part: str) -> str | None:
    bar = _BAR.search(part)
    if bar is None or not bar["told"]:
        return None
    epoch = _EPOCH.search(part, 0, bar.start())
    before = f"epoch {epoch['epoch']} " if epoch else ""
    planned = "" if epoch else f"/{bar['planned']}"  # of the epoch, not of the run
    return f"{before}step {bar['step']}{planned} {bar['told']}"
