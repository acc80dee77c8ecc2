"""Series of other exporters, from dataset `samples`: original names and labels, and the label `instance`.

A row without a value marks the end of a series; it is returned as the staleness marker of Prometheus. An exporter may
have any number of series. The matchers are therefore applied to Arrow columns of several thousand series. Labels of
single series are created only if the number of matching series is within the limit. A query for too many series is thus
rejected quickly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import canonical_labels
from rankscope_contract.security.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus.matchers import NAME, MatchType
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.series import ResultLimit, Series, gathered, labelled, split_series

MATCH_BATCH_ROWS: Final = 10_000
"""Number of series to which the matchers are applied together.

At most this number of series is read beyond the limit of the request."""


@dataclass(frozen=True, slots=True)
class ExternalSeries:
    """Execution of a query over the samples of other exporters."""

    connection: Connection
    question: SeriesQuery
    limit: ResultLimit
    external_labels: Mapping[str, str]

    def read(self) -> Iterator[Series]:
        """Yield the series of other exporters that the query selects.

        Raises LimitError if they have too many series or samples.
        """
        predicates = [self.question.within()]
        for matcher in self.question.matchers:
            if matcher.name == NAME:
                predicates.append(matcher.on_text("metric"))
            elif matcher.name == "instance":
                predicates.append(
                    f"(target = '' OR {matcher.on_text('target')})"
                )  # imported series have the label in their labels
            elif matcher.type is MatchType.EQUAL and matcher.value and matcher.name not in self.external_labels:
                fragment = canonical_labels({matcher.name: matcher.value}) or ""
                predicates.append(f"contains(labels, {sql_string(fragment[1:-1])})")  # matched exactly below
        where = " AND ".join(predicates)
        source = self.question.source(self.connection, "samples", of_ranks=False)
        chosen = self._chosen(f"SELECT DISTINCT metric, target, labels FROM {source} WHERE {where}")
        if not chosen:
            return
        # Parameters, because DuckDB needs seconds and most of a GiB outside its limit to parse 20,000 series as SQL.
        listed = [[row[column] for row, _ in chosen] for column in ("metric", "target", "labels")]
        last = "QUALIFY row_number() OVER (PARTITION BY place ORDER BY ts DESC) = 1"
        query = (
            f"SELECT place, epoch_ms(ts) AS ms, value FROM (SELECT * FROM {source} WHERE {where}) "
            "JOIN (SELECT unnest(?::VARCHAR[]) AS c_metric, unnest(?::VARCHAR[]) AS c_target, "
            f"unnest(?::VARCHAR[]) AS c_labels, unnest(range({len(chosen)})) AS place) "
            "ON metric = c_metric AND target = c_target AND labels IS NOT DISTINCT FROM c_labels "
            f"{last if self.question.series_alone else ''} ORDER BY place, ts"
        )
        rows = gathered(self.connection.stream(query, listed), self.limit)
        if rows is None:
            return
        for own, times, values in split_series(rows, ["place"], ResultLimit(len(chosen), 0)):
            yield Series(labelled(chosen[int(str(own["place"]))][1]), times, values)

    def _chosen(self, query: str) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """Return each series that satisfies all matchers, as a row (metric, target and labels text) and its labels.

        Raises LimitError if there are too many series.
        """
        fitting = []
        for found in self.connection.stream(query, batch_rows=MATCH_BATCH_ROWS):
            some = found.filter(self._fit(found))
            self.limit.take_series(some.num_rows)
            fitting.append(some)
        return [(row, self._labels(row)) for some in fitting for row in some.to_pylist()]

    def _fit(self, found: pa.RecordBatch) -> pa.BooleanArray:
        """Return a mask of the series in `found` that satisfy all matchers of the query.

        A text of labels that several series share is parsed once.
        """
        encoded = found["labels"].dictionary_encode(null_encoding="encode")
        own = [_own_labels(text) for text in encoded.dictionary.to_pylist()]
        fits = pa.array([labels is not None for labels in own], pa.bool_()).take(encoded.indices)
        for matcher in self.question.matchers:
            absent = self.external_labels.get(matcher.name, "")
            values = [(labels or {}).get(matcher.name, absent) for labels in own]
            texts = pa.array(values, pa.string()).take(encoded.indices)
            if matcher.name == NAME:
                texts = found["metric"]
            elif matcher.name == "instance":
                texts = pc.if_else(pc.equal(found["target"], ""), texts, found["target"])
            fits = pc.and_(fits, matcher.among(texts))
        return fits

    def _labels(self, row: dict[str, Any]) -> dict[str, str]:
        """Return all labels of the series in `row`: external labels, stored labels, instance and name."""
        return {
            **self.external_labels,
            **(_own_labels(row["labels"]) or {}),
            **({"instance": row["target"]} if row["target"] else {}),
            NAME: row["metric"],
        }


def _own_labels(text: str | None) -> dict[str, str] | None:
    """Return the labels in a text of the column `labels`, or None if the text is not a JSON object of strings."""
    try:
        own = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
        return None
    return own
