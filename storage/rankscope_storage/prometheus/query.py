"""A query of remote read: label matchers and a time range, and the conditions by which they select files and rows.

Raw rows and rollups are read as one relation.

A label matcher of PromQL is applied to a text, to an Arrow array, or as SQL to a column. Regular expressions have the
syntax of RE2 in Arrow and in DuckDB, and must match the whole value. A label that a series does not have counts as an
empty text.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.datasets import ROLLUPS
from rankscope_storage.base.errors import QueryError
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus import names
from rankscope_storage.sql.rollups import combined_query, raw_columns

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


_LATEST_MS: Final = 253_402_300_799_000
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

IDENTITY: Final[Mapping[str, str]] = {
    "run": "run",
    "rank": "coalesce(rank::VARCHAR, '')",
    "instance": "run || '/' || coalesce(rank::VARCHAR, '')",
}
"""SQL expressions of the labels that identify a rank, in addition to `job`."""


@dataclass(frozen=True, slots=True)
class SeriesQuery:
    """One query of remote read over a closed interval in ms.

    With `series_alone`, the response needs only the labels of each series, and has a sample of its last millisecond.
    With `last_alone`, it has exactly the last sample of each series. With `largest_alone`, it has at least the largest
    one. With `step_ms`, it has at least the last sample of each period that ends at a multiple of `step_ms`. Set
    `with_ends` for the staleness markers at the ends of attempts.
    """

    matchers: tuple[Matcher, ...]
    start_ms: int
    end_ms: int
    series_alone: bool = False
    last_alone: bool = False
    largest_alone: bool = False
    step_ms: int = 0
    with_ends: bool = True

    def fits(self, label: str, text: str) -> bool:
        """Return whether all matchers of `label` match the value `text`."""
        return fits(self.matchers, label, text)

    def fits_all(self, labels: Mapping[str, str], known: Sequence[str] = ()) -> bool:
        """Return whether a series with `labels` matches. Matchers of the labels in `known` are ignored."""
        judged = [matcher for matcher in self.matchers if matcher.name not in known]
        return all(matcher.matches(labels.get(matcher.name, "")) for matcher in judged)

    def without(self, labels: Mapping[str, str]) -> SeriesQuery | None:
        """Return the query without the matchers of `labels`, a mapping from labels to constant values.

        Returns None if one of these matchers does not match the value of its label.
        """
        if not all(self.fits(name, text) for name, text in labels.items()):
            return None
        rest = tuple(matcher for matcher in self.matchers if matcher.name not in labels)
        return replace(self, matchers=rest)

    def within(self) -> str:
        """Return the SQL predicate that selects rows of this query's time range."""
        start, end = self.span()
        return f"ts >= TIMESTAMPTZ '{start.isoformat()}' AND ts < TIMESTAMPTZ '{end.isoformat()}'"

    def span(self) -> tuple[dt.datetime, dt.datetime]:
        """Return the time range as a half-open interval, restricted to times that a store can contain."""
        start, end = (min(max(ms, 0), _LATEST_MS) for ms in (self.start_ms, self.end_ms + 1))
        return _EPOCH + dt.timedelta(milliseconds=start), _EPOCH + dt.timedelta(milliseconds=max(start, end))

    def source(self, connection: Connection, dataset: str, *, of_ranks: bool = True) -> str:
        """Return the FROM clause for raw rows and rollups of `dataset`, from the files that can contain matching rows.

        Set `of_ranks` for rows that ranks sent: only in these rows, the column `run` has the value of the label `run`.
        """
        runs = self._runs() if of_ranks else None
        run = runs[0] if runs is not None and len(runs) == 1 else None
        return both_tiers(connection, dataset, run=run, times=self.span())

    def ends(self, connection: Connection) -> dict[str, list[int]]:
        """Return the ends in ms of the attempts of each run within the time of the query, if it reads all samples."""
        if self.series_alone or not self.with_ends:
            return {}
        runs = [matcher.on_text("run") for matcher in self.matchers if matcher.name == "run"]
        start, end = (f"TIMESTAMPTZ '{edge.isoformat()}'" for edge in self.span())
        where = " AND ".join([f"ended_at >= {start} AND ended_at < {end}", *runs])
        query = f"SELECT run, list(epoch_ms(ended_at)) AS ends FROM attempts WHERE {where} GROUP BY run"
        return {row["run"]: row["ends"] for row in connection.query(query).to_pylist()}

    def of_rank(self) -> str:
        """Return the SQL predicate for run, rank, instance and time of rows that ranks sent."""
        predicates = [self.within()]
        for matcher in self.matchers:
            if matcher.name == "run":
                predicates.append(matcher.on_text("run"))
            elif matcher.name == "rank":
                predicates.append(matcher.on_number("rank"))
            elif matcher.name == "instance":
                predicates.append(_of_instance(matcher))
        return " AND ".join(predicates)

    def is_of_ranks(self) -> bool:
        """Return whether the matchers of the label `job` allow the job of ranks, `rankscope`."""
        return self.fits("job", names.JOB)

    def is_of(self, metric: str) -> bool:
        """Return whether the matchers of the metric's name allow `metric`."""
        return self.fits(NAME, metric)

    def _runs(self) -> list[str] | None:
        for matcher in self.matchers:
            values = matcher.alternatives()
            if values is not None and matcher.name == "run":
                return values
            if values is not None and matcher.name == "instance":
                return [value.rpartition("/")[0] for value in values]
        return None


def _of_instance(matcher: Matcher) -> str:
    values = matcher.alternatives()
    if values is None:
        return matcher.on_text(f"({IDENTITY['instance']})")
    pairs = [value.rpartition("/") for value in values]
    predicates = [
        f"({Matcher(MatchType.EQUAL, 'run', run).on_text('run')} AND "
        f"{Matcher(MatchType.EQUAL, 'rank', rank).on_number('rank')})"
        for run, slash, rank in pairs
        if slash
    ]
    return f"({' OR '.join(predicates)})" if predicates else "false"


def both_tiers(
    connection: Connection,
    dataset: str,
    *,
    run: str | None = None,
    times: tuple[dt.datetime, dt.datetime] | None = None,
) -> str:
    """Return the SQL relation that reads `dataset` only from files that can have rows of `run` and `times`.

    The rollup rows of `dataset` are added if there are any.
    """
    raw = connection.relation(dataset, run=run, times=times)
    beyond = ROLLUPS.get(dataset)
    if beyond is None or not connection.files(beyond, run=run):
        return raw
    rows = combined_query(dataset, connection.relation(beyond, run=run, times=times))
    return f"(SELECT * FROM {raw} UNION ALL BY NAME SELECT {raw_columns(dataset)} FROM ({rows}))"
