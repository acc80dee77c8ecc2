"""Series of exporters that are not ours: dataset `samples`, under their own names and labels and `instance`.

A row without a value is where Prometheus said that the series had ended, and is given back as its mark of staleness.

An exporter may have any number of series. They are judged by columns, some thousands at once, and only when all that
fit are known to be few enough does each have labels of its own: a question that is too large is refused in no time.
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

JUDGED_AT_ONCE: Final = 10_000
"""Series; so many are read beyond what is allowed, at most."""


@dataclass(frozen=True, slots=True)
class ExternalSeries:
    """Answers a question from what exporters of others said."""

    connection: Connection
    question: SeriesQuery
    allowance: ResultLimit
    external_labels: Mapping[str, str]

    def read(self) -> Iterator[Series]:
        """Yield the series that fit. Raises LimitError."""
        predicates = [self.question.within()]
        for matcher in self.question.matchers:
            if matcher.name == NAME:
                predicates.append(matcher.on_text("metric"))
            elif matcher.name == "instance":
                predicates.append(f"(target = '' OR {matcher.on_text('target')})")  # brought in: a label of its own
            elif matcher.type is MatchType.EQUAL and matcher.value and matcher.name not in self.external_labels:
                fragment = canonical_labels({matcher.name: matcher.value}) or ""
                predicates.append(f"contains(labels, {sql_string(fragment[1:-1])})")  # judged again below, in full
        where = " AND ".join(predicates)
        source = self.question.source(self.connection, "samples", of_ranks=False)
        chosen = self._chosen(f"SELECT DISTINCT metric, target, labels FROM {source} WHERE {where}")
        if not chosen:
            return
        # As parameters: to parse twenty thousand series as SQL took seconds, and most of a GiB that no limit knows of.
        listed = [[row[column] for row, _ in chosen] for column in ("metric", "target", "labels")]
        query = (
            f"SELECT place, epoch_ms(ts) AS ms, value FROM (SELECT * FROM {source} WHERE {where}) "
            "JOIN (SELECT unnest(?::VARCHAR[]) AS c_metric, unnest(?::VARCHAR[]) AS c_target, "
            f"unnest(?::VARCHAR[]) AS c_labels, unnest(range({len(chosen)})) AS place) "
            "ON metric = c_metric AND target = c_target AND labels IS NOT DISTINCT FROM c_labels "
            "ORDER BY place, ts"
        )
        rows = gathered(self.connection.stream(query, listed), self.allowance)
        if rows is None:
            return
        for own, times, values in split_series(rows, ["place"], ResultLimit(len(chosen), 0)):
            yield Series(labelled(chosen[int(str(own["place"]))][1]), times, values)

    def _chosen(self, query: str) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """Return the series that fit, as they stand in the store and with their labels. Raises LimitError."""
        fitting = []
        for found in self.connection.stream(query, batch_rows=JUDGED_AT_ONCE):
            some = found.filter(self._fit(found))
            self.allowance.take_series(some.num_rows)
            fitting.append(some)
        return [(row, self._labels(row)) for some in fitting for row in some.to_pylist()]

    def _fit(self, found: pa.RecordBatch) -> pa.BooleanArray:
        """Return which of the series `found` fit; labels that many of them share are read once."""
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
        """Return the labels of a series."""
        return {
            **self.external_labels,
            **(_own_labels(row["labels"]) or {}),
            **({"instance": row["target"]} if row["target"] else {}),
            NAME: row["metric"],
        }


def _own_labels(text: str | None) -> dict[str, str] | None:
    """Return what a series has in its column `labels`; None where that holds something else."""
    try:
        own = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
        return None
    return own
