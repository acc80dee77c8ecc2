"""Execute the queries of remote read on one version of the store, within limits of memory and time.

Clocks and clients are outside: another thread cancels the token of a request to interrupt its statement.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import duckdb

from rankscope_contract.security.escaping import sql_string
from rankscope_storage.base.errors import FilesGoneError, LimitError, StoreError
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus.external_series import ExternalSeries
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.rank_series import RankSeries
from rankscope_storage.prometheus.series import ResultLimit, Series, labelled, merge_series

MEMORY_BYTES: Final = 1 << 30
"""What DuckDB may take for an answer, at least."""

SAMPLE_BYTES: Final = 256
"""What it may take for each sample that an answer may have; five million took 100 to 200 each."""

_REMEDY: Final = "ask for fewer series or a shorter time"


class CancelToken:
    """Of those who wait for one answer: it lasts until somebody says that it has ended."""

    def __init__(self) -> None:
        self._why: str | None = None
        self._cursor: duckdb.DuckDBPyConnection | None = None
        self._lock = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits any more."""
        return self._why is not None

    def end(self, why: str) -> None:
        """Refuse the question, whose statement under way is interrupted; from any thread.

        Between two statements there is nothing to interrupt: say it again until the question has been refused.
        """
        with self._lock:
            self._why = self._why or why
            if self._cursor is not None:
                self._cursor.interrupt()

    def refusal(self) -> LimitError:
        """Return what is said to who asked."""
        return LimitError(f"the question was ended because {self._why}: {_REMEDY}")

    @contextlib.contextmanager
    def lasting(self, cursor: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Let `end` interrupt what `cursor` does inside, and nothing that it does later. Raises LimitError."""
        with self._lock:
            if self._why is not None:
                raise self.refusal()
            self._cursor = cursor
        try:
            yield
        finally:
            with self._lock:
                self._cursor = None


@contextlib.contextmanager
def bounded(connection: Connection, patience: CancelToken, max_samples: int) -> Iterator[None]:
    """Bound what is asked of `connection` inside, which is neither locked nor moves to another version meanwhile.

    Raises LimitError beyond a bound, StoreError when the store fails.
    """
    memory = max(MEMORY_BYTES, SAMPLE_BYTES * max_samples)
    try:
        cursor = connection.execute("SELECT current_setting('temp_directory')")
        [(folder,)] = cursor.fetchall()
        with _limited(cursor, memory, str(folder)), patience.lasting(cursor):
            yield
    except (duckdb.Error, OSError) as error:  # Arrow's where rows were on their way: it has the text alone
        if patience.is_cancelled:
            raise patience.refusal() from error
        if "Out of Memory Error" in str(error):
            raise LimitError(f"the question takes more than {memory >> 20} MiB of memory: {_REMEDY}") from error
        raise StoreError(f"the store cannot be read: {error}") from error


@contextlib.contextmanager
def _limited(cursor: duckdb.DuckDBPyConnection, memory: int, folder: str) -> Iterator[None]:
    """Let the DuckDB of `cursor` take no more than `memory`, and no disk; others are lent it afterwards, as it was."""
    with cursor.cursor() as settings:  # one of its own: an answer that is not fetched to its end is in nobody's way
        settings.execute(f"SET GLOBAL memory_limit = '{memory} B'")
        _spill_to(settings, "")
        try:
            yield
        finally:
            settings.execute("RESET GLOBAL memory_limit")
            _spill_to(settings, folder)


def _spill_to(settings: duckdb.DuckDBPyConnection, folder: str) -> None:
    with contextlib.suppress(duckdb.NotImplementedException):  # one that has spilled before keeps to its folder
        settings.execute(f"SET GLOBAL temp_directory = {sql_string(folder)}")


def read(
    connection: Connection,
    questions: Sequence[SeriesQuery],
    *,
    max_series: int,
    max_samples: int,
    external_labels: Mapping[str, str] = MappingProxyType({}),
    patience: CancelToken | None = None,
) -> list[list[Series]]:
    """Return the series that answer each question, sorted by labels; the limits are for all of them together.

    `external_labels` are those of the Prometheus that asks, which it demands of all that is remote: every series has
    them, unless it has a label of that name itself. By `patience` another thread can end the questions.

    Raises LimitError beyond a limit, of memory and of time too, QueryError for an expression that is none, StoreError
    when the store fails.
    """

    def answers() -> list[list[Series]]:
        allowance = ResultLimit(max_series, max_samples)
        with connection.pinned(), bounded(connection, patience or CancelToken(), max_samples):
            return [_answer(connection, question, allowance, external_labels) for question in questions]

    try:
        return answers()
    except FilesGoneError:  # replaced by compaction long ago, and swept away just now
        return answers()


def _answer(
    connection: Connection, question: SeriesQuery, allowance: ResultLimit, external_labels: Mapping[str, str]
) -> list[Series]:
    found: dict[tuple[tuple[str, str], ...], list[Series]] = defaultdict(list)
    for series in _of_ranks(connection, question, allowance, external_labels):
        found[series.labels].append(series)
    for series in ExternalSeries(connection, question, allowance, external_labels).read():
        found[series.labels].append(series)
    return [merge_series(found[labels]) for labels in sorted(found)]


def _of_ranks(
    connection: Connection, question: SeriesQuery, allowance: ResultLimit, external_labels: Mapping[str, str]
) -> Iterator[Series]:
    of_ranks = question.without(external_labels)
    if of_ranks is None:
        return
    for series in RankSeries(connection, of_ranks, allowance).read():
        yield Series(labelled({**external_labels, **dict(series.labels)}), series.times_ms, series.values)
