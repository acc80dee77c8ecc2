"""One question after another to one version of the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rankscope_storage.connection import Connection
from rankscope_storage.errors import FilesGoneError
from rankscope_storage.remote_read.bounds import Patience, bounded
from rankscope_storage.remote_read.foreign import ForeignSeries
from rankscope_storage.remote_read.question import Question
from rankscope_storage.remote_read.ranks import RankSeries
from rankscope_storage.remote_read.series import Allowance, Series, joined, labelled


def read(
    connection: Connection,
    questions: Sequence[Question],
    *,
    max_series: int,
    max_samples: int,
    external_labels: Mapping[str, str] = MappingProxyType({}),
    patience: Patience | None = None,
) -> list[list[Series]]:
    """Return the series that answer each question, sorted by labels; the limits are for all of them together.

    `external_labels` are those of the Prometheus that asks, which it demands of all that is remote: every series has
    them, unless it has a label of that name itself. By `patience` another thread can end the questions.

    Raises LimitError beyond a limit, of memory and of time too, QueryError for an expression that is none, StoreError
    when the store fails.
    """

    def answers() -> list[list[Series]]:
        allowance = Allowance(max_series, max_samples)
        with connection.steady(), bounded(connection, patience or Patience(), max_samples):
            return [_answer(connection, question, allowance, external_labels) for question in questions]

    try:
        return answers()
    except FilesGoneError:  # replaced by compaction long ago, and swept away just now
        return answers()


def _answer(
    connection: Connection, question: Question, allowance: Allowance, external_labels: Mapping[str, str]
) -> list[Series]:
    found: dict[tuple[tuple[str, str], ...], list[Series]] = defaultdict(list)
    for series in _of_ranks(connection, question, allowance, external_labels):
        found[series.labels].append(series)
    for series in ForeignSeries(connection, question, allowance, external_labels).read():
        found[series.labels].append(series)
    return [joined(found[labels]) for labels in sorted(found)]


def _of_ranks(
    connection: Connection, question: Question, allowance: Allowance, external_labels: Mapping[str, str]
) -> Iterator[Series]:
    of_ranks = question.of_whom(external_labels)
    if of_ranks is None:
        return
    for series in RankSeries(connection, of_ranks, allowance).read():
        yield Series(labelled({**external_labels, **dict(series.labels)}), series.times_ms, series.values)
