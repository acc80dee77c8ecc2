"""What cannot be collected, gathered during a step and said once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

NAMES_SHOWN: Final = 3
MODEL: Final = "the model"


class Gaps:
    """Reasons, each with the modules it holds for; a module is named once for a reason."""

    def __init__(self) -> None:
        self._new: dict[str, list[str]] = {}
        self._told: set[tuple[str, str]] = set()

    def add(self, reason: str, module: str) -> None:
        """Note that something of `module` cannot be collected."""
        if (reason, module) not in self._told:
            self._told.add((reason, module))
            self._new.setdefault(reason, []).append(module or MODEL)

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what is new since the last time: a line for each reason."""
        new, self._new = self._new, {}
        for reason, modules in new.items():
            say(f"{listed(modules)}: {reason}")


def listed(names: Iterable[str]) -> str:
    """Return the first of `names`, and how many more there are."""
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
