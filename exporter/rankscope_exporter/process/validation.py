"""Rules for values of settings. `validate` checks the fields of an options class by the rules in their annotations."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rankscope_exporter.process.errors import ConfigError

MOST: Final = sys.float_info.max
"""Largest magnitude of a numeric setting.

A Python integer can exceed the range of a float, and then cannot be used in a measurement.
"""


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether `value` is an integer or a float and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Return whether `value` is iterable, but neither a text nor a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)


_MOST_QUOTED: Final = 3


@dataclass(frozen=True, slots=True)
class Allowed:
    """A rule for a setting that accepts some values.

    The error text is "NAME must be EXPECTED, not VALUE", followed by `advice`.
    """

    expected: str
    accepts: Callable[[Any], bool]
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A rule for a setting: a function that raises ValueError if a value is invalid."""

    function: Callable[[Any], object]


class Converted(Checked):
    """A rule for a setting: a function that returns the value to store instead of the given one.

    The function raises ValueError if the given value is invalid.
    """


def at_least(least: int, of: str = "a whole number") -> Allowed:
    """Return a rule that accepts whole numbers of at least `least`. `of` describes the number in the error text."""
    return Allowed(f"{of} of at least {least}", lambda value: is_whole(value) and value >= least)


def between(least: int, most: int, of: str = "a whole number") -> Allowed:
    """Return a rule that accepts whole numbers from `least` to `most`."""
    return Allowed(f"{of} from {least} to {most:,}", lambda value: is_whole(value) and least <= value <= most)


def number(expected: str, low: float = -MOST, high: float = MOST, advice: str = "") -> Allowed:
    """Return a rule that accepts numbers from `low` to `high`. It rejects NaN and infinite numbers."""
    return Allowed(expected, lambda value: is_number(value) and low <= value <= high, advice)


def one_of(*values: object) -> Allowed:
    """Return a rule that accepts only `values`. The error text contains them, in quotes if there are at most three."""
    text = " or ".join(filter(None, (", ".join(map(repr, values[:-1])), repr(values[-1]))))
    if len(values) > _MOST_QUOTED:
        text = f"one of {', '.join(map(str, values))}"
    return Allowed(text, lambda value: value in values)


def list_of(item: type, expected: str) -> Allowed:
    """Return a rule that accepts lists whose items are of type `item`. For int, a bool is not accepted."""
    accepts = is_whole if item is int else lambda value: isinstance(value, item)
    return Allowed(expected, lambda value: is_list(value) and all(map(accepts, value)))


def table(expected: str = "a table of settings") -> Allowed:
    """Return a rule that accepts mappings."""
    return Allowed(expected, lambda value: isinstance(value, Mapping))


def some_text(expected: str) -> Allowed:
    """Return a rule that accepts texts that are not empty."""
    return Allowed(expected, lambda value: isinstance(value, str) and value != "")


RANKS: Final = Allowed(
    "a list of rank numbers", lambda value: is_list(value) and all(is_whole(rank) and rank >= 0 for rank in value)
)
_BY_TYPE: Final[Mapping[object, Allowed]] = {
    bool: Allowed("true or false", lambda value: isinstance(value, bool)),
    int: Allowed("a whole number", is_whole),
    float: number("a number"),
    str: Allowed("text", lambda value: isinstance(value, str)),
    Mapping: table(),
}


class _Rule(NamedTuple):
    is_optional: bool
    is_list: bool
    section: type[Any] | None
    allowed: Allowed | None
    checks: tuple[Checked, ...]


def validate(options: Any, error: type[ValueError] = ValueError, prefix: str = "") -> None:
    """Check the fields of the dataclass object `options` by the rules in their annotations.

    Raises `error` for the first field with an invalid value. The text begins with `prefix` and the name of the field.

    An annotation `Annotated[type, rule, …]` contains rules. A rule of the class `Allowed` decides which values are
    valid. If there is no such rule, the type of the field decides. Then each rule of the classes `Checked` and
    `Converted` is called with the value, in order. A field of type tuple accepts any list and stores a tuple. A field
    whose type is a dataclass is a section, and also accepts a table of settings. None is valid only if the annotation
    contains it.
    """
    for name, rule in _rules_of(options.__class__).items():
        given = value = getattr(options, name)
        if value is None and rule.is_optional:
            continue
        if rule.section is not None:
            value = options_from(rule.section, value, f"{prefix}{name}", "; write {} for the defaults")
        if rule.is_list and is_list(value):
            value = tuple(value)
        if rule.allowed is not None and not rule.allowed.accepts(value):
            advice = f": write [{value!r}]" if rule.is_list and isinstance(value, str) else rule.allowed.advice
            raise error(f"{prefix}{name} must be {rule.allowed.expected}, not {given!r}{advice}")
        for check in rule.checks:
            try:
                result = check.function(value)
            except ValueError as cause:
                text = str(cause)
                raise error(prefix + (text if text.startswith(name) else f"{name}: {text}")) from cause
            value = result if isinstance(check, Converted) else value
        if value is not given:
            object.__setattr__(options, name, value)


@functools.cache
def _rules_of(options_class: type[Any]) -> Mapping[str, _Rule]:
    hints = get_type_hints(options_class, include_extras=True)
    return {item.name: _rule(hints[item.name]) for item in fields(options_class)}


def _rule(hint: Any) -> _Rule:
    given: list[Any] = []
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    stated = [member for member in members if member is not NoneType]
    if len(stated) == 1:
        hint = stated[0]
    if get_origin(hint) is Annotated:
        hint, *given = get_args(hint)
    allowed = next((item for item in given if isinstance(item, Allowed)), None) or _of_type(hint)
    checks = tuple(item for item in given if isinstance(item, Checked))
    section: Any = hint if is_dataclass(hint) else None
    return _Rule(len(stated) < len(members), get_origin(hint) is tuple, section, allowed, checks)


def _of_type(hint: Any) -> Allowed | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return one_of(*arguments)
    if origin in (tuple, list):
        return list_of(arguments[0], "a list of names" if arguments[0] is str else "a list")
    return _BY_TYPE.get(origin or hint)


def did_you_mean(word: object, known: Iterable[str], form: str = "'{}'") -> str:
    """Return a sentence that suggests the most similar name, in place of {} in `form`; empty if none is similar."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {form.replace('{}', near[0])}?" if near else ""


def listed(known: Collection[str], word: object, form: str = "'{}'") -> str:
    """Return the names in `known` as a list, with a suggestion for `word`: see `did_you_mean`."""
    return f"{', '.join(known)}.{did_you_mean(word, known, form)}"


REMOVED: Final[Mapping[str, str]] = {
    "serve.node_page": "Prometheus scrapes each rank, which /sd lists",
}
"""Settings of earlier releases, with the second half of the sentence with which each is refused."""


def check_keys(
    settings: Iterable[str], known: Collection[str], prefix: str = "", *, also_near: Iterable[str] = ()
) -> None:
    """Raise ConfigError if a key in `settings` is not one of the valid keys in `known`.

    The text suggests the most similar key in `known` and `also_near`. The keys in `also_near` are suggested only: they
    are not valid here.
    """
    for key in settings:
        if key not in known and f"{prefix}{key}" in REMOVED:
            raise ConfigError(f"the setting {prefix}{key} was removed: {REMOVED[prefix + key]}")
        if key not in known:
            hint = did_you_mean(key, {*known, *also_near}, f"{prefix}{{}}")
            raise ConfigError(f"unknown setting {prefix}{key}; valid settings are {', '.join(sorted(known))}.{hint}")


def options_from(cls: type[Any], value: Any, name: str, advice: str = "") -> Any:
    """Return the settings in the table `value` as an object of the dataclass `cls`, which validates them.

    If `value` is such an object, it is returned. Raises ConfigError, whose text names the table `name` and ends with
    `advice` if `value` is not a table.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings, not {value!r}{advice}")
    check_keys(value, {item.name for item in fields(cls)}, f"{name}.")
    try:
        return cls(**value)
    except ConfigError:
        raise
    except ValueError as error:  # its text names only the setting
        raise ConfigError(f"{name}: {error}") from error


def accepted_settings(
    build: Callable[[dict[str, Any]], object], settings: Mapping[str, Any], refuse: Callable[[str], object]
) -> dict[str, Any]:
    """Return the entries of `settings` with which `build` raises no ConfigError. Tables are tested entry by entry.

    `refuse` is called with the reason for each entry that is left out.
    """
    good: dict[str, Any] = {}
    refused = dict.fromkeys(settings, "")
    while True:  # until nothing changes, because an entry may need one that comes later
        left, refused = refused, {}
        for name in left:
            try:
                build({**good, name: settings[name]})
                good[name] = settings[name]
            except ConfigError as error:
                refused[name] = str(error)
        if left.keys() == refused.keys():
            break
    for name, reason in refused.items():
        value = settings[name]
        if isinstance(value, Mapping) and value:
            with contextlib.suppress(ConfigError):
                build({**good, name: {}})
                good[name] = accepted_settings(lambda part: build({**good, name: part}), value, refuse)  # noqa: B023
                continue
        refuse(reason)
    return good


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
