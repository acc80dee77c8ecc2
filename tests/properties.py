"""Number of examples and cases of tests: few and the same each time; with RANKSCOPE_THOROUGH=1 all, and random."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

THOROUGH = os.environ.get("RANKSCOPE_THOROUGH", "") not in ("", "0")
USUAL = 100  # the default of hypothesis


def examples(thorough: int, *, at_least: int = 5) -> int:
    """Return the number of examples for a property whose thorough test has `thorough` examples."""
    return thorough if THOROUGH else max(thorough // 4, at_least)


def few(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which all but the first `count` are for thorough runs."""
    found = list(cases)
    others = (case if isinstance(case, tuple) else (case,) for case in found[count:])
    return [*found[:count], *(pytest.param(*case, marks=pytest.mark.thorough) for case in others)]


def named(usual: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return `names` as cases for `parametrize`, of which those that are not in `usual` are for thorough runs."""
    ordered = sorted(names, key=lambda name: name not in usual)
    return few(sum(name in usual for name in ordered), ordered)
