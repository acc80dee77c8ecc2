"""The one façade that catches everything: counted always, named once, never raised."""

from __future__ import annotations

import logging

import pytest

from rankscope_exporter.base.errors import MOST_CHARACTERS, ErrorBoundary, fault_text


def fail(error: Exception) -> None:
    raise error


def test_a_fault_is_swallowed_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    boundary = ErrorBoundary()
    with caplog.at_level(logging.ERROR, logger="rankscope"):
        for _ in range(3):
            boundary.call("the hook", fail, ValueError("first"))
        boundary.call("the hook", fail, KeyError("second"))

    assert 4 == boundary.count
    assert [
        "the hook failed, training continues: ValueError('first')",
        "the hook failed, training continues: KeyError('second')",
    ] == [record.getMessage() for record in caplog.records]


def test_a_file_that_failed_is_named_and_an_error_that_quotes_all_is_cut() -> None:
    assert "the sink failed, training continues: NotADirectoryError: [Errno 20] Not a directory: '/dev/full/x'" == (
        fault_text("the sink", NotADirectoryError(20, "Not a directory", "/dev/full/x"))
    )
    assert "the sink failed, training continues: OSError('full')" == fault_text("the sink", OSError("full"))
    assert MOST_CHARACTERS + 100 > len(fault_text("publishing", ValueError("x" * 1_000_000)))


def test_the_result_comes_back() -> None:
    assert 3 == ErrorBoundary().call("sum", sum, (1, 2))


def test_an_interrupt_is_not_a_fault() -> None:
    """Ctrl-C and SystemExit belong to the user."""
    boundary = ErrorBoundary()
    with pytest.raises(KeyboardInterrupt):
        boundary.call("the hook", fail, KeyboardInterrupt())  # type: ignore[arg-type]  # not an Exception, on purpose

    assert 0 == boundary.count
