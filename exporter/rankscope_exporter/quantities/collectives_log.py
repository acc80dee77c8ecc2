"""Says which collectives were called where: function, types, shapes, group and call stack, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rankscope_exporter.quantities.activations_gaps import listed
from rankscope_exporter.quantities.collectives_calls import Part, Sides, group_text
from rankscope_exporter.quantities.collectives_sites import Site

MOST_TOLD: Final = 200
_FRAMES_SHOWN: Final = 8


class CallLog:
    """What was called, told in the order of the first calls; calls that look alike are one sentence, with their number.

    Every call is in exactly one sentence: what is called again after it was told is told again.
    """

    def __init__(self) -> None:
        self._untold: Counter[str] = Counter()
        self._known: set[str] = set()
        self._left_out = 0
        self.has_told = False

    def note(self, name: str, site: Site, sides: Sides) -> None:
        """Note a call of the script."""
        self.note_text(name, f"{_forms(sides.given)} -> {_forms(sides.got)}, {group_text(sides.group)}", site)

    def note_text(self, name: str, what: str, site: Site) -> None:
        """Note a call, `what` being its types, shapes and group in words."""
        text = f"{name}: {what}, called from {_stack(site)}"
        if text not in self._known and len(self._known) >= MOST_TOLD:
            self._left_out += 1
            return
        self._known.add(text)
        self._untold[text] += 1

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what is new since the last time."""
        untold, self._untold = self._untold, Counter()
        self.has_told = self.has_told or bool(untold)
        for text, count in untold.items():
            say(text if count == 1 else f"{count} times {text}")
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            say(f"{left_out} calls beside these {MOST_TOLD}; targets or call_sites choose among them")


def _forms(parts: Sequence[Part]) -> str:
    """Return types and shapes of one side in words."""
    forms = [f"{str(part.tensor.dtype).removeprefix('torch.')}{list(part.tensor.shape)}" for part in parts]
    return listed(forms) or "nothing"


def _stack(site: Site) -> str:
    shown = site.stack[-_FRAMES_SHOWN:]
    return " > ".join(shown if len(shown) == len(site.stack) else ("…", *shown)) or "no Python code"
