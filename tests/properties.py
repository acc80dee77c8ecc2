"""How often a property is tried: some examples at every change, all of them with RANKSCOPE_THOROUGH=1.

Examples are drawn anew in every run, so what one run leaves out another one tries.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("RANKSCOPE_THOROUGH", "") not in ("", "0")
USUAL = 100  # hypothesis' own default


def examples(thorough: int, *, at_least: int = 5) -> int:
    """Return how many examples to try of a property that deserves so many of them."""
    return thorough if THOROUGH else max(thorough // 4, at_least)
