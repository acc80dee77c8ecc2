"""Macros, most of which have one body for both engines, and the few words that the engines write differently.

DuckDB stores a macro. For Spark, a call is replaced by the body. No parameter has the name of a column, because a macro
also replaces names of columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_storage.base.errors import QueryError

RELATION: Final = "source"
"""Parameter of a macro that is the name of a relation. The body reads it as `query_table(source)`."""


@dataclass(frozen=True, slots=True)
class Macro:
    """A macro that returns rows, or with `is_scalar` a value.

    `parameters` has the default of each parameter, or None if it has none. `spark_body` is the body for Spark if it
    differs.
    """

    name: str
    parameters: Mapping[str, str | None]
    body: str
    spark_body: str | None = None
    is_scalar: bool = False

    def statement(self) -> str:
        """Return the statement that creates the macro in DuckDB."""
        listed = ", ".join(
            name if default is None else f"{name} := {default}" for name, default in self.parameters.items()
        )
        kind = "" if self.is_scalar else "TABLE"
        return f"CREATE OR REPLACE MACRO {self.name}({listed}) AS {kind}\n{self.body}"


_FORMS: Final = (
    (re.compile("^CREATE OR REPLACE VIEW "), "CREATE OR REPLACE TEMPORARY VIEW "),
    (re.compile(r" AS (?:NOT )?MATERIALIZED \("), " AS ("),
    (re.compile(r"\* EXCLUDE \("), "* EXCEPT ("),
    (re.compile(rf"query_table\({RELATION}\)"), RELATION),
)
"""Words of our own texts that have another form in Spark. DuckDB 1.4 does not have EXCEPT for columns."""


def for_spark(text: str) -> str:
    """Return `text`, which is a statement of a view or the body of a macro, in the form for Spark."""
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return text


TOKEN: Final = re.compile(
    r"""--[^\n]* | /\*.*?\*/ | '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \w+ | :=|=> | \s+ | .""",
    re.VERBOSE | re.DOTALL,
)
_OPENING, _CLOSING = "([{", ")]}"


def expanded(text: str, macros: Mapping[str, Macro]) -> str:
    """Return `text` for Spark, with the body of the macro in place of each call of one of `macros`.

    A backslash in a text is doubled, because Spark reads it as the start of an escape. Raises QueryError if the
    arguments of a call are not those of the macro.
    """
    tokens = TOKEN.findall(text)
    found: list[str] = []
    place = 0
    while place < len(tokens):
        macro = macros.get(tokens[place].casefold())
        start = _next(tokens, place + 1)
        if macro is None or start == len(tokens) or tokens[start] != "(":
            token = tokens[place]
            found.append(token.replace("\\", "\\\\") if token[0] == "'" else token)
            place += 1
            continue
        arguments, place = _arguments(tokens, start)
        found.append(f"({_body(macro, arguments, macros)})")
    return "".join(found)


def _next(tokens: Sequence[str], place: int) -> int:
    """Return the place of the first token from `place` that is neither a space nor a comment."""
    while place < len(tokens) and (tokens[place].isspace() or tokens[place].startswith(("--", "/*"))):
        place += 1
    return place


def _arguments(tokens: Sequence[str], start: int) -> tuple[list[list[str]], int]:
    """Return the tokens of each argument of the call whose parenthesis is at `start`, and the place after the call."""
    arguments: list[list[str]] = [[]]
    depth = 0
    for place in range(start, len(tokens)):
        sign = tokens[place]
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth == 0:
            return [own for own in arguments if "".join(own).strip()], place + 1
        if sign == "," and depth == 1:
            arguments.append([])
        elif place > start:
            arguments[-1].append(sign)
    raise QueryError("a parenthesis of the statement is not closed: close it")


def _body(macro: Macro, arguments: Sequence[Sequence[str]], macros: Mapping[str, Macro]) -> str:
    given: dict[str, str] = {}
    free = iter(macro.parameters)
    for tokens in arguments:
        first = _next(tokens, 0)
        sign = _next(tokens, first + 1)
        if sign < len(tokens) and tokens[sign] in {":=", "=>"}:
            name, value = tokens[first].casefold(), tokens[sign + 1 :]
        else:
            name, value = next(free, ""), tokens
        if name not in macro.parameters or name in given:
            raise QueryError(f"{macro.name}() has the parameters {', '.join(macro.parameters)}: give each at most once")
        given[name] = "".join(value).strip()
    values = {name: given.get(name, default) for name, default in macro.parameters.items()}
    if missing := [name for name, value in values.items() if value is None]:
        raise QueryError(f"{macro.name}() needs the argument {missing[0]}: its parameters are {', '.join(values)}")
    body = "".join(
        token if token not in values else str(values[token]) if token == RELATION else f"({values[token]})"
        for token in TOKEN.findall(for_spark(macro.spark_body or macro.body))
    )
    return expanded(body, macros)
