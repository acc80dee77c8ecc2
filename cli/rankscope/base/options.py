"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from rankscope.base.errors import USAGE, CommandError

Store = Annotated[
    Path,
    typer.Option("--store", "-s", envvar="RANKSCOPE_STORE", help="Folder of the store.", show_default=True),
]
Run = Annotated[str | None, typer.Argument(help="Name of the run; the latest one when left out.", show_default=False)]

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
