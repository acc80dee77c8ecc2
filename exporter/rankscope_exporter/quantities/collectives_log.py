"""Says which collectives were called where, each once: function, types, shapes, group and call stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rankscope_exporter.quantities.activations_gaps import listed
from rankscope_exporter.quantities.collectives_calls import Part, Sides, group_text
from rankscope_exporter.quantities.collectives_sites import Site

MOST_TOLD: Final = 100
_FRAMES_SHOWN: Final = 8


class CallLog:
    """What was called, by name and stack; told in the order of the first calls."""

    def __init__(self) -> None:
        self._known: set[tuple[str, Site]] = set()
        self._untold: list[str] = []

    def note(self, name: str, site: Site, sides: Sides) -> None:
        """Note a call, if it is the first of its kind."""
        if (name, site) in self._known or len(self._known) > MOST_TOLD:
            return
        self._known.add((name, site))
        if len(self._known) > MOST_TOLD:
            self._untold.append(f"there are more than {MOST_TOLD} calls; targets or call_sites choose among them")
            return
        forms = f"{_forms(sides.given)} -> {_forms(sides.got)}"
        self._untold.append(f"{name}: {forms}, {group_text(sides.group)}, called from {_stack(site)}")

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what is new since the last time."""
        untold, self._untold = self._untold, []
        for text in untold:
            say(text)


def _forms(parts: Sequence[Part]) -> str:
    """Return types and shapes of one side in words."""
    forms = [f"{str(part.tensor.dtype).removeprefix('torch.')}{list(part.tensor.shape)}" for part in parts]
    return listed(forms) or "nothing"


def _stack(site: Site) -> str:
    shown = site.stack[-_FRAMES_SHOWN:]
    return " > ".join(shown if len(shown) == len(site.stack) else ("…", *shown))
