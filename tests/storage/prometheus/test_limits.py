"""A query ends when it is cancelled or exceeds the memory limit, and the next query runs."""

import threading

import pytest
from tests.storage.prometheus.conftest import ALWAYS, History

from rankscope_storage.base.errors import LimitError
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.read import CancelToken, read

SETTINGS = "SELECT current_setting('memory_limit') AS memory, current_setting('temp_directory') AS folder"
LIMITS = {"max_series": 1000, "max_samples": 10_000}


class Endless(SeriesQuery):
    """A question that no time is enough for."""

    def within(self):
        return "(SELECT sum(hash(many.range)) FROM range(1_000_000_000_000) AS many) > 0"


@pytest.mark.timeout(60)
def test_query_is_cancelled_by_another_thread_and_the_next_one_runs(history):
    patience, refused = CancelToken(), threading.Event()

    def impatient():
        while not refused.wait(0.02):
            patience.end("it took longer than 1 s")

    threading.Thread(target=impatient, daemon=True).start()
    with pytest.raises(LimitError, match="because it took longer than 1 s: ask for fewer series or a shorter time"):
        read(history.connection, [Endless((), *ALWAYS)], **LIMITS, patience=patience)
    refused.set()

    assert history.ask(("run", "=", "spring"))


def test_cancelled_query_does_not_start(history):
    patience = CancelToken()
    patience.end("the client has disconnected")

    with pytest.raises(LimitError, match="has disconnected"):
        read(history.connection, [Endless((), *ALWAYS)], **LIMITS, patience=patience)


def test_cancel_after_the_result_affects_no_other_query(history):
    patience = CancelToken()
    read(history.connection, [SeriesQuery((), 0, 1)], **LIMITS, patience=patience)
    rows = history.connection.stream("SELECT range FROM range(1_000_000)", batch_rows=1000)
    next(rows)
    patience.end("it took too long")

    assert 999_000 <= sum(batch.num_rows for batch in rows)


def test_query_beyond_the_memory_limit_names_the_remedy(history, monkeypatch):
    monkeypatch.setattr("rankscope_storage.prometheus.read.MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("rankscope_storage.prometheus.read.SAMPLE_BYTES", 0)

    with pytest.raises(LimitError, match="more than 1 MiB of memory: ask for fewer series or a shorter time"):
        history.ask()


def test_memory_limit_applies_only_during_a_query(history):
    """Other connections use the same DuckDB instance without this limit."""
    before = history.connection.query(SETTINGS).to_pylist()
    seen = []

    class Asking(SeriesQuery):
        def within(self):
            seen.extend(history.connection.query(SETTINGS).to_pylist())
            return super().within()

    for max_samples in (10_000, 1 << 24):
        History(history.connection).ask(samples=max_samples)
        read(history.connection, [Asking((), 0, 1)], max_series=1, max_samples=max_samples)

    assert {("1.0 GiB", ""), ("4.0 GiB", "")} == {(row["memory"], row["folder"]) for row in seen}
    assert before == history.connection.query(SETTINGS).to_pylist()
