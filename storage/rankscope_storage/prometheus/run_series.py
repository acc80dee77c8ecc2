"""Series of runs (state, progress, start, end, incidents, latest events) with the names of the metrics of the service.

The store has a version of an attempt for each change of its state, and one per minute while it is active. Each version
is one sample. The loss has a sample for each step, the mean of the ranks that logged it. An incident has a sample with
the age 0 at each of its rows, except at its end. Each type of event has a sample for each minute with such events.
Metrics of the service have another job than ranks; here, all series have the job of ranks, for which Prometheus queries
the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.model.events import EventType, RunState
from rankscope_contract.security.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.matchers import NAME
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.series import ResultLimit, Series, gathered, labelled, split_series

_VALUES: Final = {
    catalogue.RUN_ATTEMPT: "attempt",
    catalogue.RUN_START: "epoch(started_at)",
    catalogue.RUN_END: "epoch(ended_at)",
    catalogue.RUN_STEP: "last_step",
    catalogue.RUN_STEPS_PLANNED: "planned_steps",
    catalogue.RUN_PROGRESS: "last_step / nullif(planned_steps, 0)",
    catalogue.RANKS_EXPECTED: "world_size",
}
"""Gauges of a run, with the SQL expression of the value over a version of an attempt."""

_INCIDENT_LABELS: Final = {
    "run": "run",
    "rank": f"coalesce(rank::VARCHAR, {sql_string(catalogue.UNKNOWN_RANK)})",
    "rule": "coalesce(rule, 'Anomaly')",
    "severity": "severity",
    **{name: f"coalesce({name}::VARCHAR, '')" for name in ("kind", "tensor", "op", "step")},
}
"""Labels of the series of an incident, with their SQL expressions over a row of `events`."""


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Execution of a query over the states of runs and their incidents."""

    connection: Connection
    question: SeriesQuery
    limit: ResultLimit

    def read(self) -> Iterator[Series]:
        """Yield the series of runs that the query selects.

        Raises LimitError if they have too many series or samples.
        """
        if not self.question.is_of_ranks():
            return
        # The newest attempt of each time: an earlier attempt can end after a later one has begun.
        versions = (
            f"SELECT * FROM {self._rows('attempts')} QUALIFY attempt = max(attempt) OVER (PARTITION BY run ORDER BY ts)"
        )
        for spec, value in _VALUES.items():
            yield from self._series(spec, ("run",), f"SELECT run, ts, {value} AS value FROM ({versions})")
        if self.question.is_of(catalogue.RUN_LOSS.name):
            losses = f"{self._rows('scalars')} AND name = 'loss' AND labels IS NULL AND step IS NOT NULL"
            means = f"SELECT run, min(ts) AS ts, avg(value) AS value FROM {losses} GROUP BY run, attempt, step"
            yield from self._series(catalogue.RUN_LOSS, ("run",), means)
        states = ", ".join(sql_string(state) for state in RunState)
        each = f"SELECT *, unnest([{states}]) AS one FROM ({versions})"
        state = f"SELECT run, one AS state, ts, (state = one)::INT AS value FROM ({each})"
        yield from self._series(catalogue.RUN_STATE, ("run", "state"), state)
        labels = ", ".join(f"{value} AS {sql_identifier(name)}" for name, value in _INCIDENT_LABELS.items())
        is_end = "json_extract_string(details, '$.state') IN ('resolved', 'closed')"
        incidents = f"type = {sql_string(EventType.INCIDENT)} AND NOT {is_end}"
        rows = f"SELECT {labels}, ts, 0 AS value FROM {self._rows('events')} AND {incidents}"
        yield from self._series(catalogue.INCIDENT_AGE, tuple(_INCIDENT_LABELS), rows)
        minutes = (
            f"SELECT run, type, max(ts) AS ts FROM {self._rows('events')} "
            "GROUP BY run, type, time_bucket(INTERVAL 1 minute, ts)"
        )
        rows = f"SELECT run, type, ts, epoch(ts) AS value FROM ({minutes})"
        yield from self._series(catalogue.EVENT_LAST, ("run", "type"), rows)

    def _rows(self, dataset: str) -> str:
        """Return the FROM and WHERE clauses for the rows of `dataset` in the runs and the time of the query."""
        runs = [matcher.on_text("run") for matcher in self.question.matchers if matcher.name == "run"]
        return f"{self.question.source(self.connection, dataset)} WHERE {' AND '.join([self.question.within(), *runs])}"

    def _series(self, spec: MetricSpec, labels: Sequence[str], rows: str) -> Iterator[Series]:
        """Yield the series of `spec` from rows with the columns `labels`, `ts` and `value`."""
        if not self.question.is_of(spec.name) or not self.question.fits_all({}, (NAME, "job", *labels)):
            return
        by = ", ".join(map(sql_identifier, labels))
        query = f"SELECT {by}, epoch_ms(ts) AS ms, value::DOUBLE AS value FROM ({rows}) WHERE value IS NOT NULL"
        if self.question.series_alone:
            query += f" QUALIFY row_number() OVER (PARTITION BY {by} ORDER BY ts DESC) = 1"
        found = gathered(self.connection.stream(f"{query} ORDER BY {by}, ms"), self.limit)
        if found is None:
            return
        for own, times, values in split_series(found, list(labels), self.limit):
            texts = {NAME: spec.name, "job": names.JOB, **{name: str(text) for name, text in own.items()}}
            if self.question.fits_all(texts):
                yield Series(labelled(texts), times, values)
