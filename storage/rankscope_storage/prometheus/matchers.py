"""Label matchers of PromQL, applied to a text, to an Arrow array, or as SQL to a column.

Regular expressions have the syntax of RE2 in Arrow and in DuckDB, and must match the whole value. A label that a series
does not have counts as an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.security.escaping import sql_string
from rankscope_storage.base.errors import QueryError

NAME: Final = "__name__"
_WORDS: Final = re.compile(
    r"[\w \-/:@%=,;~!<>&\"'#]+(?:\|[\w \-/:@%=,;~!<>&\"'#]+)*"
)  # alternatives without metacharacters
_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,17}")


class MatchType(IntEnum):
    """Type of a label matcher; the values are the numbers of the remote read protocol."""

    EQUAL = 0
    NOT_EQUAL = 1
    REGEX = 2
    NOT_REGEX = 3


@dataclass(frozen=True, slots=True)
class Matcher:
    """A label matcher of one of the types `=`, `!=`, `=~` and `!~`.

    Creating a matcher raises QueryError if its value is not a valid regular expression of RE2.
    """

    type: MatchType
    name: str
    value: str

    def __post_init__(self) -> None:
        """Raise QueryError for an invalid regular expression, so that it is reported before rows are read."""
        self.matches("")

    @property
    def is_negative(self) -> bool:
        """True for the types `!=` and `!~`."""
        return self.type in {MatchType.NOT_EQUAL, MatchType.NOT_REGEX}

    def matches(self, text: str) -> bool:
        """Return whether a label with the value `text` matches. The value of an absent label is ""."""
        if self.type in {MatchType.EQUAL, MatchType.NOT_EQUAL}:
            return (text == self.value) is not self.is_negative
        found: bool = self.among(pa.array([text], pa.string()))[0].as_py()
        return found

    def among(self, texts: pa.StringArray) -> pa.BooleanArray:
        """Return a mask of the `texts` that match. One call for thousands of texts costs little more than for one."""
        if self.type in {MatchType.EQUAL, MatchType.NOT_EQUAL}:
            found = pc.equal(texts, self.value)
        else:
            try:
                found = pc.match_substring_regex(texts, self._anchored())
            except pa.ArrowInvalid as error:
                raise QueryError(f"{self.value!r} is not a valid regular expression of RE2: {error}") from error
        return pc.invert(found) if self.is_negative else found

    def alternatives(self) -> list[str] | None:
        """Return the values that match if the matcher is `=` or a plain list such as `a|b`, otherwise None."""
        if self.type is MatchType.EQUAL:
            return [self.value]
        if self.type is MatchType.REGEX and _WORDS.fullmatch(self.value):
            return self.value.split("|")
        return None

    def on_text(self, column: str) -> str:
        """Return the SQL predicate for a text column without nulls.

        For plain values it is a comparison, which DuckDB can evaluate with the statistics of a file.
        """
        values = self.alternatives()
        if values is not None:
            return _among(column, [sql_string(value) for value in values])
        if self.type is MatchType.NOT_EQUAL:
            return f"{column} <> {sql_string(self.value)}"
        negation = "NOT " if self.is_negative else ""
        return f"{negation}regexp_matches({column}, {sql_string(self._anchored())})"

    def on_number(self, column: str) -> str:
        """Return the SQL predicate for a column of integers; a null in this column is an absent label."""
        values = self.alternatives()
        if values is None:
            return self.on_text(f"coalesce({column}::VARCHAR, '')")
        predicates = [f"{column} IS NULL"] if "" in values else []
        numbers = [value for value in values if _INTEGER.fullmatch(value)]
        predicates += [_among(column, numbers)] if numbers else []
        return f"({' OR '.join(predicates)})" if predicates else "false"

    def _anchored(self) -> str:
        return rf"\A(?:{self.value})\z"


def fits(matchers: Sequence[Matcher], name: str, text: str) -> bool:
    """Return whether the value `text` of the label `name` satisfies all `matchers` of this label."""
    return all(matcher.matches(text) for matcher in matchers if matcher.name == name)


def _among(column: str, values: Sequence[str]) -> str:
    return f"{column} = {values[0]}" if len(values) == 1 else f"{column} IN ({', '.join(values)})"
