"""Number of examples of property tests: a few by default, all of them with RANKSCOPE_THOROUGH=1.

A usual run has the same examples each time; a thorough run has random ones, so that repeated runs try further ones.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("RANKSCOPE_THOROUGH", "") not in ("", "0")
USUAL = 100  # the default of hypothesis


def examples(thorough: int, *, at_least: int = 5) -> int:
    """Return the number of examples for a property whose thorough test has `thorough` examples."""
    return thorough if THOROUGH else max(thorough // 4, at_least)
