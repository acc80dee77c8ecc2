"""Settings of TFLOP/s and MFU. Checked at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from rankscope_exporter.errors import ConfigError

METHODS: Final = ("auto", "given", "formula", "6n", "off")

_COUNTED: Final = ("counted", "count")
"""Not methods: FLOPs were counted automatically before, with the label `counted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """FLOPs are those of the model, forward and backward, without recomputed activations."""

    method: str = "auto"
    """"auto" takes the first that is available: given, formula, 6n. "given" applies no formula; "formula" and "6n"
    apply only this one where nothing is given; "off" publishes neither TFLOP/s nor MFU."""
    flops_per_token: float | None = None
    """Of the whole model, also where ranks hold parts of it."""
    flops_per_sample: float | None = None
    peak_tflops: float | None = None
    """Of one device, dense; without it the table by the device's name."""
    model_parallel: int | None = None
    """How many ranks compute one copy of the model; without it what the framework and the groups of attach() say."""

    def __post_init__(self) -> None:
        if self.method in _COUNTED:
            raise ConfigError(
                f"throughput.method is one of {', '.join(METHODS)}; {self.method!r} is none of them, because nothing "
                "is counted during training: call rankscope.count_flops() before attach() and set "
                "throughput.flops_per_token or throughput.flops_per_sample to the result"
            )
        if self.method not in METHODS:
            raise ConfigError(f"throughput.method is one of {', '.join(METHODS)}, not {self.method!r}")
        for name in ("flops_per_token", "flops_per_sample", "peak_tflops"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"throughput.{name} is a number above 0, not {value!r}")
        count = self.model_parallel
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"throughput.model_parallel is a number of ranks from 1 on, not {count!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
