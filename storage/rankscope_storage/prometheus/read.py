"""Execute the queries of remote read on one version of the store, within limits of memory and time.

This module has no clock and no client connection. Another thread limits the time: it cancels the request's token, which
interrupts the running statement.

`ExternalSeries` has the samples of other exporters: original names and labels, and the label `instance`. A row without
a value marks the end of a series; it is returned as the staleness marker of Prometheus. An exporter may have any number
of series. The matchers are therefore applied to Arrow columns of several thousand series. Labels of single series are
created only if the number of matching series is within the limit. A query for too many series is thus rejected quickly.

`RunSeries` has the state, progress, start, end, incidents and latest events of runs, with the names of the metrics of
the service. The store has a version of an attempt for each change of its state, and one per minute while it is active.
Each version is one sample. The loss has a sample for each step, the mean of the ranks that logged it. An incident has a
sample with the age 0 at each of its rows, except at its end. Each type of event has a sample for each minute with such
events. Metrics of the service have another job than ranks; here, all series have the job of ranks, for which Prometheus
queries the store.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.model.events import EventType, RunState
from rankscope_contract.model.schema import canonical_labels
from rankscope_storage.base import service_catalogue
from rankscope_storage.base.errors import FilesGoneError, LimitError, StoreError
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.query import NAME, MatchType, SeriesQuery
from rankscope_storage.prometheus.rank_series import RankSeries
from rankscope_storage.prometheus.series import ResultLimit, Series, gathered, labelled, merge_series, split_series

_VALUES: Final = {
    service_catalogue.RUN_ATTEMPT: "attempt",
    service_catalogue.RUN_START: "epoch(started_at)",
    service_catalogue.RUN_END: "epoch(ended_at)",
    service_catalogue.RUN_STEP: "last_step",
    service_catalogue.RUN_STEPS_PLANNED: "planned_steps",
    service_catalogue.RUN_PROGRESS: "last_step / nullif(planned_steps, 0)",
    service_catalogue.RANKS_EXPECTED: "world_size",
}
"""Gauges of a run, with the SQL expression of the value over a version of an attempt."""

_INCIDENT_LABELS: Final = {
    "run": "run",
    "rank": f"coalesce(rank::VARCHAR, {sql_string(service_catalogue.UNKNOWN_RANK)})",
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
        if self.question.is_of(service_catalogue.RUN_LOSS.name):
            losses = f"{self._rows('scalars')} AND name = 'loss' AND labels IS NULL AND step IS NOT NULL"
            means = f"SELECT run, min(ts) AS ts, avg(value) AS value FROM {losses} GROUP BY run, attempt, step"
            yield from self._series(service_catalogue.RUN_LOSS, ("run",), means)
        states = ", ".join(sql_string(state) for state in RunState)
        each = f"SELECT *, unnest([{states}]) AS one FROM ({versions})"
        state = f"SELECT run, one AS state, ts, (state = one)::INT AS value FROM ({each})"
        yield from self._series(service_catalogue.RUN_STATE, ("run", "state"), state)
        labels = ", ".join(f"{value} AS {sql_identifier(name)}" for name, value in _INCIDENT_LABELS.items())
        is_end = "json_extract_string(details, '$.state') IN ('resolved', 'closed')"
        incidents = f"type = {sql_string(EventType.INCIDENT)} AND NOT {is_end}"
        rows = f"SELECT {labels}, ts, 0 AS value FROM {self._rows('events')} AND {incidents}"
        yield from self._series(service_catalogue.INCIDENT_AGE, tuple(_INCIDENT_LABELS), rows)
        minutes = (
            f"SELECT run, type, max(ts) AS ts FROM {self._rows('events')} "
            "GROUP BY run, type, time_bucket(INTERVAL 1 minute, ts)"
        )
        rows = f"SELECT run, type, ts, epoch(ts) AS value FROM ({minutes})"
        yield from self._series(service_catalogue.EVENT_LAST, ("run", "type"), rows)

    def _rows(self, dataset: str) -> str:
        """Return the FROM and WHERE clauses for the rows of `dataset` in the runs and the time of the query."""
        runs = [matcher.on_text("run") for matcher in self.question.matchers if matcher.name == "run"]
        return f"{self.question.source(self.connection, dataset)} WHERE {' AND '.join([self.question.within(), *runs])}"

    def _series(self, spec: MetricSpec, labels: Sequence[str], rows: str) -> Iterator[Series]:
        """Yield the series of `spec` from rows with the columns `labels`, `ts` and `value`."""
        if not self.question.is_of(spec.name) or not self.question.fits_all({}, (NAME, "job", *labels)):
            return
        by = ", ".join(map(sql_identifier, labels))
        ends = self.question.ends(self.connection) if spec is service_catalogue.RUN_LOSS else {}
        query = f"SELECT {by}, epoch_ms(ts) AS ms, value::DOUBLE AS value FROM ({rows}) WHERE value IS NOT NULL"
        if self.question.series_alone:
            query += f" QUALIFY row_number() OVER (PARTITION BY {by} ORDER BY ts DESC) = 1"
        found = gathered(self.connection.stream(f"{query} ORDER BY {by}, ms"), self.limit)
        if found is None:
            return
        for own, times, values in split_series(found, list(labels), self.limit):
            texts = {NAME: spec.name, "job": names.JOB, **{name: str(text) for name, text in own.items()}}
            if self.question.fits_all(texts):
                yield Series(labelled(texts), times, values).ended(ends.get(texts["run"], ()))


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
        own = [names.text_labels(text) for text in encoded.dictionary.to_pylist()]
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
            **(names.text_labels(row["labels"]) or {}),
            **({"instance": row["target"]} if row["target"] else {}),
            NAME: row["metric"],
        }


MEMORY_BYTES: Final = 1 << 30
"""Smallest memory limit of DuckDB for a query, in bytes.

It applies if the limit computed from the allowed samples is lower."""

SAMPLE_BYTES: Final = 256
"""Memory limit of DuckDB per allowed sample, in bytes. Five million samples needed 100 to 200 bytes each."""

_REMEDY: Final = "ask for fewer series or a shorter time"


class CancelToken:
    """Token with which another thread cancels one request."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._cursor: duckdb.DuckDBPyConnection | None = None
        self._lock = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        """True if the request was cancelled by a call of `end`."""
        return self._reason is not None

    def end(self, reason: str) -> None:
        """Cancel the request and interrupt its running statement. May be called from any thread.

        Between two statements there is nothing to interrupt: repeat the call until the request has ended. `reason`
        becomes part of the error message.
        """
        with self._lock:
            self._reason = self._reason or reason
            if self._cursor is not None:
                self._cursor.interrupt()

    def refusal(self) -> LimitError:
        """Return the LimitError for the client of a cancelled request, with the reason of the cancellation."""
        return LimitError(f"the query was cancelled because {self._reason}: {_REMEDY}")

    @contextlib.contextmanager
    def lasting(self, cursor: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Let `end` interrupt statements of `cursor` inside the context.

        Raises LimitError if the request was cancelled before.
        """
        with self._lock:
            if self._reason is not None:
                raise self.refusal()
            self._cursor = cursor
        try:
            yield
        finally:
            with self._lock:
                self._cursor = None


@contextlib.contextmanager
def bounded(connection: Connection, patience: CancelToken, max_samples: int) -> Iterator[None]:
    """Limit the memory and the time of the statements of `connection` inside the context.

    Raises LimitError if a statement exceeds a limit, and StoreError if the store cannot be read.
    """
    memory = max(MEMORY_BYTES, SAMPLE_BYTES * max_samples)
    try:
        cursor = connection.execute("SELECT current_setting('temp_directory')")
        [(folder,)] = cursor.fetchall()
        with _limited(cursor, memory, str(folder)), patience.lasting(cursor):
            yield
    except (duckdb.Error, OSError) as error:  # while rows are fetched, Arrow raises an error with the same text
        if patience.is_cancelled:
            raise patience.refusal() from error
        if "Out of Memory Error" in str(error):
            raise LimitError(f"the query needs more than {memory >> 20} MiB of memory: {_REMEDY}") from error
        raise StoreError(f"the store cannot be read: {error}") from error


@contextlib.contextmanager
def _limited(cursor: duckdb.DuckDBPyConnection, memory: int, folder: str) -> Iterator[None]:
    """Limit DuckDB to `memory` bytes and no temporary files inside the context.

    Restore the earlier limits afterwards.
    """
    with cursor.cursor() as settings:  # separate, because the other cursor may have rows that are not fetched
        settings.execute(f"SET GLOBAL memory_limit = '{memory} B'")
        _spill_to(settings, "")
        try:
            yield
        finally:
            settings.execute("RESET GLOBAL memory_limit")
            _spill_to(settings, folder)


def _spill_to(settings: duckdb.DuckDBPyConnection, folder: str) -> None:
    with contextlib.suppress(duckdb.NotImplementedException):  # DuckDB cannot change the folder after it has spilled
        settings.execute(f"SET GLOBAL temp_directory = {sql_string(folder)}")


def read(
    connection: Connection,
    queries: Sequence[SeriesQuery],
    *,
    max_series: int,
    max_samples: int,
    external_labels: Mapping[str, str] = MappingProxyType({}),
    patience: CancelToken | None = None,
) -> list[list[Series]]:
    """Return the matching series of each query, sorted by labels. The limits apply to all queries together.

    `external_labels` are those of the Prometheus server that sends the request. This server expects its external labels
    on all remote series. Each series therefore gets them, unless it already has a label of the same name. `patience` is
    the token with which another thread cancels the request.

    Raises LimitError if the result exceeds a limit of series, samples, memory or time. Raises QueryError for an invalid
    regular expression, and StoreError if the store cannot be read.
    """

    def answers() -> list[list[Series]]:
        limit = ResultLimit(max_series, max_samples)
        with connection.pinned(), bounded(connection, patience or CancelToken(), max_samples):
            return [_answer(connection, question, limit, external_labels) for question in queries]

    try:
        return answers()
    except FilesGoneError:  # vacuum removed replaced files after the snapshot was read
        return answers()


def _answer(
    connection: Connection, question: SeriesQuery, limit: ResultLimit, external_labels: Mapping[str, str]
) -> list[Series]:
    found: dict[tuple[tuple[str, str], ...], list[Series]] = defaultdict(list)
    for series in _of_ranks(connection, question, limit, external_labels):
        found[series.labels].append(series)
    for series in ExternalSeries(connection, question, limit, external_labels).read():
        found[series.labels].append(series)
    merged = [merge_series(found[labels]) for labels in sorted(found)]
    return [series.last() for series in merged] if question.last_alone or question.series_alone else merged


def _of_ranks(
    connection: Connection, question: SeriesQuery, limit: ResultLimit, external_labels: Mapping[str, str]
) -> Iterator[Series]:
    of_ranks = question.without(external_labels)
    if of_ranks is None:
        return
    for series in chain(RankSeries(connection, of_ranks, limit).read(), RunSeries(connection, of_ranks, limit).read()):
        labels = labelled({**external_labels, **dict(series.labels)}) if external_labels else series.labels
        yield Series(labels, series.times_ms, series.values)
