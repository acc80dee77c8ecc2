"""How often the machine is looked at. Checked at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rankscope_exporter.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """What the thread does that reads this rank's GPU, its process and its machine."""

    every_seconds: float = 5.0
    """Time between two looks; 0 takes none."""

    def __post_init__(self) -> None:
        value = self.every_seconds
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"hardware.every_seconds is a time from 0 s on, not {value!r}; 0 takes no look")
