"""Checks of values that several configuration classes share. The functions have no side effects."""

from __future__ import annotations

import difflib
import operator
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from rankscope_exporter.base.errors import ConfigError

MOST: Final = sys.float_info.max
"""Largest magnitude of a numeric setting.

A Python integer can exceed the range of a float, and then cannot be used in a measurement.
"""


def whole(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number, for example of Python, numpy or torch.

    Return None for any other value.
    """
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
    """Return `value` if it is a number of steps of at least `at_least`.

    Otherwise raise ConfigError, which names the argument `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} must be a whole number of steps of at least {at_least}, not {value!r}")
    return value


def callable_or_none(name: str, value: Any) -> Any:
    """Return `value` if it is a function or None. Otherwise raise ConfigError, which names the argument `name`."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function of one argument, not {value!r}")
    return value


def listed(name: str, value: Any, of: type) -> tuple[Any, ...]:
    """Return the items of `value` as a tuple.

    Raises ConfigError, which names the setting `name`, if `value` is no list or an item is not of type `of`.
    """
    if isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigError(
            f"{name} must be a list, not {value!r}" + (f": write [{value!r}]" if isinstance(value, str) else "")
        )
    items = tuple(value)
    for item in items:
        if not isinstance(item, of):
            raise ConfigError(f"{name} must be a list of names, but {item!r} is not a name")
    return items


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a sentence that suggests the name in `known` that is most similar to `word`.

    It is empty if no name is similar.
    """
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_keys(
    settings: Iterable[str], known: Collection[str], prefix: str = "", *, also_near: Iterable[str] = ()
) -> None:
    """Raise ConfigError for a key that is not in `known`.

    The text suggests the most similar key in `known` and `also_near`.
    """
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), {*known, *also_near}, n=1)
            hint = f" Did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(f"unknown setting {prefix}{key}; valid settings are {', '.join(sorted(known))}.{hint}")


_PERCENT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def share_of(value: Any) -> float | None:
    """Parse a share such as 0.01, "1 %" or "1%" and return it as a float; None means no limit.

    Raises ConfigError if it is invalid.
    """
    if value is None:
        return None
    share = value
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value)
        share = float(found[1]) / 100 if found else None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ConfigError(
            f'max_overhead must be a share between 0 and 1, such as 0.01 or "1 %", not {value!r}; null sets no limit'
        )
    return float(share)


def percent(share: float) -> str:
    """Return a share as a text in percent with three significant digits, such as "1.25 %"."""
    return f"{100 * share:.3g} %"
