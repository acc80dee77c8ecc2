"""Series of exporters that are not ours: dataset `samples`, under their own names and labels and `instance`.

A row without a value is where Prometheus said that the series had ended, and is given back as its mark of staleness.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rankscope_contract.escaping import sql_string
from rankscope_contract.records import canonical_labels
from rankscope_storage.connection import Connection
from rankscope_storage.remote_read.matchers import NAME, MatchType
from rankscope_storage.remote_read.question import Question
from rankscope_storage.remote_read.series import Allowance, Series, cut, gathered, labelled


@dataclass(frozen=True, slots=True)
class ForeignSeries:
    """Answers a question from what exporters of others said."""

    connection: Connection
    question: Question
    allowance: Allowance
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
        found = self.connection.query(f"SELECT DISTINCT metric, target, labels FROM {source} WHERE {where}").to_pylist()
        chosen = [(row, labels) for row in found if (labels := self._labels(row)) and self.question.fits_all(labels)]
        if not chosen:
            return
        self.allowance.take_series(len(chosen))
        listed = ", ".join(
            f"({place}, {sql_string(row['metric'])}, {sql_string(row['target'])}, "
            f"{'NULL::VARCHAR' if row['labels'] is None else sql_string(row['labels'])})"
            for place, (row, _) in enumerate(chosen)
        )
        query = (
            f"SELECT place::BIGINT AS place, epoch_ms(ts) AS ms, value FROM (SELECT * FROM {source} WHERE {where}) "
            f"JOIN (VALUES {listed}) AS chosen(place, c_metric, c_target, c_labels) ON metric = c_metric "
            "AND target = c_target AND labels IS NOT DISTINCT FROM c_labels "
            "ORDER BY place, ts"
        )
        rows = gathered(self.connection.stream(query), self.allowance)
        if rows is None:
            return
        for own, times, values in cut(rows, ["place"], Allowance(len(chosen), 0)):
            yield Series(labelled(chosen[int(str(own["place"]))][1]), times, values)

    def _labels(self, row: dict[str, Any]) -> dict[str, str] | None:
        """Return the labels of a series; None where the column holds something else."""
        try:
            own = {} if row["labels"] is None else json.loads(row["labels"])
        except (ValueError, RecursionError):
            return None
        if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
            return None
        return {
            **self.external_labels,
            **own,
            **({"instance": row["target"]} if row["target"] else {}),
            NAME: row["metric"],
        }
