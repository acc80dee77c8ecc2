"""A query of remote read: label matchers and a time range, and the conditions by which they select files and rows.

Raw rows and rollups are read as one relation.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.schema import ROLLUPS
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.matchers import NAME, Matcher, MatchType, fits
from rankscope_storage.sql.rollups import combined_query, raw_columns

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
