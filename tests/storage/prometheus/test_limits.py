"""A question ends when nobody waits for it any more, and when it takes too much memory; the next one is answered."""

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
def test_question_is_ended_from_another_thread_and_the_next_one_answered(history):
    patience, refused = CancelToken(), threading.Event()

    def impatient():
        while not refused.wait(0.02):
            patience.end("it took longer than 1 s")

    threading.Thread(target=impatient, daemon=True).start()
    with pytest.raises(LimitError, match="because it took longer than 1 s: ask for fewer series or a shorter time"):
        read(history.connection, [Endless((), *ALWAYS)], **LIMITS, patience=patience)
    refused.set()

    assert history.ask(("run", "=", "spring"))


def test_question_for_which_nobody_waits_is_not_begun(history):
    patience = CancelToken()
    patience.end("who asked has hung up")

    with pytest.raises(LimitError, match="hung up"):
        read(history.connection, [Endless((), *ALWAYS)], **LIMITS, patience=patience)


def test_patience_that_ends_after_the_answer_ends_no_other(history):
    patience = CancelToken()
    read(history.connection, [SeriesQuery((), 0, 1)], **LIMITS, patience=patience)
    rows = history.connection.stream("SELECT range FROM range(1_000_000)", batch_rows=1000)
    next(rows)
    patience.end("it took too long")

    assert 999_000 <= sum(batch.num_rows for batch in rows)


def test_question_that_takes_too_much_memory_is_refused_with_what_to_narrow(history, monkeypatch):
    monkeypatch.setattr("rankscope_storage.prometheus.read.MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("rankscope_storage.prometheus.read.SAMPLE_BYTES", 0)

    with pytest.raises(LimitError, match="more than 1 MiB of memory: ask for fewer series or a shorter time"):
        history.ask()


def test_memory_is_bounded_while_a_question_is_read_and_no_longer(history):
    """DuckDB's instance may be lent to others, who have no such bound."""
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
