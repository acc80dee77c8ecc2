"""Checks of settings that several configurations share. Pure."""

from __future__ import annotations

import difflib
import operator
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from rankscope_exporter.base.errors import ConfigError

MOST: Final = sys.float_info.max
"""The largest magnitude; a whole number may well be larger, and is then no number to measure by."""


def whole(value: Any) -> int | None:
    """Return the whole number that `value` is, one of numpy or torch included; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers, or without any
        return None


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether `value` is an integer or a float and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def steps_from(name: str, value: Any, *, at_least: int) -> int:
    """Return `value`, a number of steps. Raises ConfigError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} is a number of steps from {at_least} on, not {value!r}")
    return value


def callable_or_none(name: str, value: Any) -> Any:
    """Return `value`, a function or None. Raises ConfigError naming the argument."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} is a function of one argument, not {value!r}")
    return value


def listed(name: str, value: Any, of: type) -> tuple[Any, ...]:
    """Return the items of the list `value`, each of type `of`. Raises ConfigError naming the setting."""
    if isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is a list, not {value!r}" + (f": write [{value!r}]" if isinstance(value, str) else "")
        )
    items = tuple(value)
    for item in items:
        if not isinstance(item, of):
            raise ConfigError(f"{name} is a list of names, and {item!r} is none")
    return items


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a sentence with the one of `known` that is meant by `word`, empty where none is near."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_keys(
    settings: Iterable[str], known: Collection[str], prefix: str = "", *, also_near: Iterable[str] = ()
) -> None:
    """Raise ConfigError for a key that is not in `known`. The text names the nearest key in `known` and `also_near`."""
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), {*known, *also_near}, n=1)
            hint = f" Did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(f"unknown setting {prefix}{key}; there are {', '.join(sorted(known))}.{hint}")


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
