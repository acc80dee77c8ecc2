"""A query of remote read: matchers and a time range, and the part that files and columns of a dataset can answer.

Raw rows and rollups are read as one relation, whatever the age of the rows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.rollups import ROLLUPS
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
"""Labels of a rank's series beside `job`, as SQL."""


@dataclass(frozen=True, slots=True)
class SeriesQuery:
    """One query of remote read. The span is closed, in ms. `series_alone`: of each series the last sample is enough."""

    matchers: tuple[Matcher, ...]
    start_ms: int
    end_ms: int
    series_alone: bool = False

    def fits(self, label: str, text: str) -> bool:
        """Return whether `label` may be `text`."""
        return fits(self.matchers, label, text)

    def fits_all(self, labels: Mapping[str, str], known: Sequence[str] = ()) -> bool:
        """Return whether a series with `labels` fits; the labels `known` are judged elsewhere."""
        judged = [matcher for matcher in self.matchers if matcher.name not in known]
        return all(matcher.matches(labels.get(matcher.name, "")) for matcher in judged)

    def without(self, labels: Mapping[str, str]) -> SeriesQuery | None:
        """Return what is asked of series that all have `labels`; None where these do not fit."""
        if not all(self.fits(name, text) for name, text in labels.items()):
            return None
        rest = tuple(matcher for matcher in self.matchers if matcher.name not in labels)
        return replace(self, matchers=rest)

    def within(self) -> str:
        """Return the predicate of time."""
        start, end = self.span()
        return f"ts >= TIMESTAMPTZ '{start.isoformat()}' AND ts < TIMESTAMPTZ '{end.isoformat()}'"

    def span(self) -> tuple[dt.datetime, dt.datetime]:
        """Return the half-open span of time, as far as stores have times."""
        start, end = (min(max(ms, 0), _LATEST_MS) for ms in (self.start_ms, self.end_ms + 1))
        return _EPOCH + dt.timedelta(milliseconds=start), _EPOCH + dt.timedelta(milliseconds=max(start, end))

    def source(self, connection: Connection, dataset: str, *, of_ranks: bool = True) -> str:
        """Return what stands behind FROM: `dataset` in both tiers, from only those files that can hold an answer.

        The column `run` is the label only where rows are of ranks.
        """
        runs = self._runs() if of_ranks else None
        run = runs[0] if runs is not None and len(runs) == 1 else None
        return both_tiers(connection, dataset, run=run, times=self.span())

    def of_rank(self) -> str:
        """Return the predicate of run, rank, instance and time for rows of a rank."""
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
        """Return whether series of ranks can fit at all."""
        return self.fits("job", names.JOB)

    def is_of(self, metric: str) -> bool:
        """Return whether a metric is asked for."""
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
    """Return what `Connection.relation` does, and rollup rows beyond the raw ones of `dataset` where there are any."""
    raw = connection.relation(dataset, run=run, times=times)
    beyond = ROLLUPS.get(dataset)
    if beyond is None or not connection.files(beyond, run=run):
        return raw
    rows = combined_query(dataset, connection.relation(beyond, run=run, times=times))
    return f"(SELECT * FROM {raw} UNION ALL BY NAME SELECT {raw_columns(dataset)} FROM ({rows}))"
