"""The text about the value for which a rule fired, on pages and in alerts."""

from __future__ import annotations

import math
from typing import Final

from rankscope_storage.base.rule_names import SLOW_STEPS

_WORDS: Final = {"step_seconds": "step time", "learning_rate": "learning rate", "grad_norm": "gradient norm"}
_OF_MEDIAN: Final = frozenset({"LossSpike", "GradNormSpike", SLOW_STEPS})


def deviation_text(name: str, value: float, baseline: float | None, rule: str | None, extent: str = "") -> str:
    """Return the value for which `rule` fired as text for users, such as `loss 9.7, 8 times its median`.

    `extent` is put before the value, such as `up to ` for the largest of several values.
    """
    words, unit = _WORDS.get(name, name.replace("_per_", " per ")), " s" if name == "step_seconds" else ""
    if not math.isfinite(value):
        return f"{words} became {'NaN' if math.isnan(value) else 'infinite'}"
    if not baseline or not math.isfinite(baseline):
        return f"{words} {value:.3g}{unit}"
    ratio = value / baseline
    times = f"{ratio:,.0f}" if 100 <= abs(ratio) < 1e6 else f"{ratio:.2g}"
    before = "median" if rule in _OF_MEDIAN else "previous maximum" if rule == "LearningRateJump" else "average"
    shown = f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{words} {extent}{shown}{unit}, {times} times its {before}"
