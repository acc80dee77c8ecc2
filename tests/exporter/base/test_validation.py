"""The rules of settings, whose errors name the field; and the error boundary, which counts every exception."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from rankscope_contract.model.redaction import MAX_TEXT
from rankscope_exporter import ConfigError
from rankscope_exporter.base.errors import ErrorBoundary, fault_text
from rankscope_exporter.base.validation import (
    RANKS,
    Checked,
    Converted,
    at_least,
    between,
    list_of,
    number,
    one_of,
    some_text,
    table,
    validate,
)


def _no_spaces(text: str) -> None:
    if " " in text:
        raise ValueError("contains a space")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    flag: bool = True
    count: int = 1
    share: float = 0.5
    text: str = "a"
    settings: Mapping[str, Any] = field(default_factory=dict)
    choice: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    inner: _Inner = field(default_factory=_Inner)
    steps: Annotated[int, at_least(1)] = 1
    digits: Annotated[int, between(1, 1000)] | None = None
    ratio: Annotated[float, number("a share from 0 to 1", 0, 1, "; 0 disables it")] = 0
    signal: Annotated[str, one_of("A", "B", "C", "D")] = "A"
    numbers: Annotated[tuple[int, ...], list_of(int, "a list of numbers")] = ()
    tables: Annotated[Mapping[str, Any], table("a table of tables")] = field(default_factory=dict)
    path: Annotated[str, some_text("a path")] | None = None
    ranks: Annotated[tuple[int, ...], RANKS] | None = None
    word: Annotated[str, Checked(_no_spaces)] = "a"
    upper: Annotated[str, Converted(str.upper)] = "A"

    def __post_init__(self) -> None:
        validate(self, ConfigError, "section.")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("flag", 1, " must be true or false, not 1"),
        ("count", True, " must be a whole number, not True"),
        ("count", None, " must be a whole number, not None"),
        ("share", math.nan, " must be a number, not nan"),
        ("share", math.inf, " must be a number, not inf"),
        ("text", 5, " must be text, not 5"),
        ("settings", [], " must be a table of settings, not []"),
        ("choice", "c", " must be 'a' or 'b', not 'c'"),
        ("names", "a", " must be a list of names, not 'a': write ['a']"),
        ("names", [5], " must be a list of names, not [5]"),
        ("inner", {}, " must be a _Inner, not {}"),
        ("steps", 0, " must be a whole number of at least 1, not 0"),
        ("digits", 1001, " must be a whole number from 1 to 1,000, not 1001"),
        ("ratio", 2, " must be a share from 0 to 1, not 2; 0 disables it"),
        ("signal", "E", " must be one of A, B, C, D, not 'E'"),
        ("numbers", [True], " must be a list of numbers, not [True]"),
        ("tables", 3, " must be a table of tables, not 3"),
        ("path", "", " must be a path, not ''"),
        ("ranks", [-1], " must be a list of rank numbers, not [-1]"),
        ("word", "a b", ": contains a space"),
    ],
)
def test_invalid_value_is_rejected_with_the_name_of_the_field(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _Options(**{name: value})

    assert str(caught.value) == f"section.{name}{text}"


def test_list_becomes_a_tuple_and_converted_value_is_stored() -> None:
    """Other valid values are stored unchanged."""
    given = {"share": 2, "digits": None, "steps": 1, "ratio": 1.0, "signal": "D", "choice": "b", "path": "a"}
    options = _Options(names=["a"], ranks=[1], upper="b", **given)

    assert (options.names, options.ranks, options.upper) == (("a",), (1,), "B")
    assert {name: getattr(options, name) for name in given} == given


def fail(error: Exception) -> None:
    raise error


def test_every_fault_is_counted_and_its_first_occurrence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    boundary = ErrorBoundary()
    with caplog.at_level(logging.ERROR, logger="rankscope"):
        for _ in range(3):
            boundary.call("the hook", fail, ValueError("first"))
        boundary.call("the hook", fail, KeyError("second"))

    assert 4 == boundary.count
    assert [
        "the hook failed, training continues: ValueError('first')",
        "the hook failed, training continues: KeyError('second')",
    ] == [record.getMessage() for record in caplog.records]


def test_fault_text_names_the_file_and_has_a_limited_length() -> None:
    assert "the sink failed, training continues: NotADirectoryError: [Errno 20] Not a directory: '/dev/full/x'" == (
        fault_text("the sink", NotADirectoryError(20, "Not a directory", "/dev/full/x"))
    )
    assert "the sink failed, training continues: OSError('full')" == fault_text("the sink", OSError("full"))
    assert MAX_TEXT + 100 > len(fault_text("publishing", ValueError("x" * 1_000_000)))


def test_keyboard_interrupt_is_not_caught() -> None:
    """Ctrl-C and SystemExit must reach the user's code."""
    boundary = ErrorBoundary()
    with pytest.raises(KeyboardInterrupt):
        boundary.call("the hook", fail, KeyboardInterrupt())  # type: ignore[arg-type]  # not an Exception, on purpose

    assert 0 == boundary.count
