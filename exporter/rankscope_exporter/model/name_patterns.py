"""Selection by name: exact name, glob, or regular expression. The functions have no side effects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import Final

REGEX: Final = "re:"
_SAID: Final = re.compile(r"re:\(\?#([^()]*)\)")
"""A regular expression that matches the beginning of a name pattern which `regex_pattern` made.

The beginning of the name pattern contains the name that messages display, as a comment of the regular expression.
"""


class Targets:
    """Patterns for names.

    A pattern is an exact name, a glob, or a regular expression after "re:", and must match the whole name.

    Raises ValueError if `patterns` is not a list of names, or if a regular expression is invalid.
    """

    def __init__(self, patterns: Sequence[str] = ("*",)) -> None:
        is_list = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"targets must be a list of names, not {patterns!r}")
        self.patterns = tuple(patterns)
        self._exact = frozenset(patterns)
        self._compiled = [(pattern, _compiled(pattern)) for pattern in self.patterns]

    @property
    def selects_all(self) -> bool:
        """Return whether the patterns select every name."""
        return "*" in self._exact

    def selects(self, *names: str) -> bool:
        """Return whether the patterns select one of the `names` of an object."""
        return self.selects_all or any(
            name in self._exact or any(compiled.fullmatch(name) for _, compiled in self._compiled) for name in names
        )

    def unmatched(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return each pattern that selects none of `names`, with the names that are most similar to it.

        The patterns are returned in the form that messages display.
        """
        if self.patterns == ("*",):
            return {}
        known = list(names)
        return {
            display_name(pattern): difflib.get_close_matches(
                display_name(pattern).removeprefix(REGEX), known, n=3, cutoff=0.4
            )
            for pattern, compiled in self._compiled
            if pattern != "*" and not any(name == pattern or compiled.fullmatch(name) for name in known)
        }


def regex_pattern(name: str, expression: str) -> str:
    """Return a pattern for the regular expression `expression`. Messages display the pattern as `name`."""
    return f"{REGEX}{expression}" if set(name) & {"(", ")"} else f"{REGEX}(?#{name}){expression}"


def display_name(pattern: str) -> str:
    """Return the name that messages display for `pattern`.

    If `regex_pattern` made the pattern, it is the name in the pattern; otherwise it is the pattern itself.
    """
    found = _SAID.match(pattern)
    return pattern if found is None else found[1]


def target_notices(targets: Targets, names: Iterable[str], of: str) -> list[str]:
    """Return a sentence for each target that selects none of `names`, with the most similar names.

    `of` is the kind of the named objects, such as "parameter" or "module".
    """
    return [
        f"target {target!r} matches no {of}" + (f"; nearest: {', '.join(near)}" if near else "")
        for target, near in targets.unmatched(names).items()
    ]


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(REGEX):
        return re.compile(translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        raise ValueError(f"target {pattern!r} is not a valid regular expression: {error}") from error
