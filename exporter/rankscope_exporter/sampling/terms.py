"""What a running quantity may be told anew without its hooks noticing: when it is measured, and what is published."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope_exporter.sampling.ops import EVERY_OP, Ops
from rankscope_exporter.sampling.schedule import Timing


@dataclass(frozen=True, slots=True)
class Terms:
    """On which steps a quantity is measured, and which of its statistics leave the rank."""

    timing: Timing = field(default_factory=Timing)
    ops: Ops = EVERY_OP
