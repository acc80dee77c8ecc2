"""A jump of a wall clock: when a difference counts as one, and the content of the event that names it."""

from __future__ import annotations

from typing import Any, Final

JUMP_MICROSECONDS: Final = 2_000_000
"""Smallest difference between a wall clock and a clock that is never set, from one check to the next, that is a jump.

NTP corrects smaller differences slowly, and changes the speed of both clocks then."""


def jump_message(jump: int, *, owner: str, remark: str) -> str:
    """Return the message of the event that the clock of `owner` was set by `jump` µs."""
    return f"the clock of the {owner} was set {_direction(jump)} by {abs(jump) / 1e6:.1f} s; {remark}"


def jump_details(jump: int) -> dict[str, Any]:
    """Return the details of the event: the direction, and the seconds, which are negative if the clock was set back."""
    return {"direction": _direction(jump), "seconds": jump / 1e6}


def _direction(jump: int) -> str:
    return "back" if jump < 0 else "forward"
