"""Ranges of steps as people write them."""

from __future__ import annotations

from typing import Final

from rankscope.errors import USAGE, CommandError

_LARGEST: Final = (1 << 63) - 1
"""What a step can be in the store."""


def step_range(steps: str | None) -> tuple[int, int] | None:
    """Return both ends of `first:last`, or of one step; None for nothing given. Raises CommandError."""
    if steps is None:
        return None
    first, colon, last = steps.partition(":")
    try:
        bounds = int(first), int(last if colon else first)
    except ValueError:
        bounds = 1, 0
    if bounds[0] > bounds[1] or max(map(abs, bounds)) > _LARGEST:
        raise CommandError(f"--steps {steps!r}: write first:last, such as 100:200, or one step", code=USAGE)
    return bounds
