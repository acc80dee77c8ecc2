"""Execute the queries of remote read on one version of the store, within limits of memory and time.

This module has no clock and no client connection. Another thread limits the time: it cancels the request's token, which
interrupts the running statement.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final

import duckdb

from rankscope_contract.security.escaping import sql_string
from rankscope_storage.base.errors import FilesGoneError, LimitError, StoreError
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus.external_series import ExternalSeries
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.rank_series import RankSeries
from rankscope_storage.prometheus.run_series import RunSeries
from rankscope_storage.prometheus.series import ResultLimit, Series, labelled, merge_series

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
        yield Series(labelled({**external_labels, **dict(series.labels)}), series.times_ms, series.values)
