"""The setting `max_overhead`: a share of the time of training. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from rankscope_exporter.errors import ConfigError

_PERCENT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def share_of(value: Any) -> float | None:
    """Return the share that `value` means: 0.01, "1 %" or "1%"; None for no limit. Raises ConfigError."""
    if value is None:
        return None
    share = value
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value)
        share = float(found[1]) / 100 if found else None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ConfigError(
            f'max_overhead is a share above 0 and below 1, such as 0.01 or "1 %", not {value!r}; null sets no limit'
        )
    return float(share)


def percent(share: float) -> str:
    """Return a share as a reader sees it."""
    return f"{100 * share:.3g} %"
