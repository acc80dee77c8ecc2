"""One question after another to one version of the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import duckdb

from rankscope_storage.connection import Connection
from rankscope_storage.errors import FilesGoneError, StoreError
from rankscope_storage.remote_read.foreign import ForeignSeries
from rankscope_storage.remote_read.question import Question
from rankscope_storage.remote_read.ranks import RankSeries
from rankscope_storage.remote_read.series import Allowance, Series, joined


def read(
    connection: Connection, questions: Sequence[Question], *, max_series: int, max_samples: int
) -> list[list[Series]]:
    """Return the series that answer each question, sorted by labels; the limits are for all of them together.

    Raises LimitError beyond a limit, QueryError for an expression that is none, StoreError when the store fails.
    """

    def answers() -> list[list[Series]]:
        allowance = Allowance(max_series, max_samples)
        with connection.steady():
            return [_answer(connection, question, allowance) for question in questions]

    try:
        try:
            return answers()
        except FilesGoneError:  # replaced by compaction long ago, and swept away just now
            return answers()
    except duckdb.Error as error:
        raise StoreError(f"the store cannot be read: {error}") from error


def _answer(connection: Connection, question: Question, allowance: Allowance) -> list[Series]:
    parts = (RankSeries(connection, question, allowance), ForeignSeries(connection, question, allowance))
    found: dict[tuple[tuple[str, str], ...], list[Series]] = defaultdict(list)
    for part in parts:
        for series in part.read():
            found[series.labels].append(series)
    return [joined(found[labels]) for labels in sorted(found)]
