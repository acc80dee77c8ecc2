"""When silence of the training means that it hangs. Pure: the clock is an argument.

A sign of life is anything that training does with us: a forward pass (also one of an evaluation), a backward pass, an
optimizer, `log()`, `event()`, the begin or end of a phase. So a long accumulation of gradients or an evaluation that
nobody announced is no hang, and a rank that waits in a collective is one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long training may give no sign of life, in seconds; 0 for ever."""

    training: float
    in_phase: float

    @property
    def is_on(self) -> bool:
        """Return whether anything is watched at all."""
        return self.training > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What is known of training at one moment."""

    heard_at: float  # monotonic seconds of the last sign of life
    has_stepped: bool  # a first step was finished: until then compilers and file systems may take their time
    is_done: bool  # all planned steps were made
    phase: str | None  # announced, such as an evaluation


@dataclass(frozen=True, slots=True)
class Hang:
    """Training gave no sign of life for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training goes on, after `seconds` without a sign of life."""

    seconds: float


class HangWatch:
    """Tells a hang once, and its end once."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._hung_at: float | None = None  # when the silence that was told of had begun

    def look(self, sign: Sign, now: float) -> Hang | Resumed | None:
        """Return what is new at this moment."""
        if self._hung_at is not None:
            if sign.heard_at <= self._hung_at:
                return None
            began, self._hung_at = self._hung_at, None
            return Resumed(sign.heard_at - began)
        if sign.is_done or now - sign.heard_at < self._limit(sign):
            return None
        self._hung_at = sign.heard_at
        return Hang(now - sign.heard_at)

    def _limit(self, sign: Sign) -> float:
        is_calm = sign.has_stepped and sign.phase is None
        seconds = self._limits.training if is_calm else max(self._limits.training, self._limits.in_phase)
        return seconds if self._limits.is_on else float("inf")
