"""The error boundary, which counts every exception."""

import logging

import pytest

from rankscope_contract.model.redaction import MAX_TEXT
from rankscope_exporter.process.errors import ErrorBoundary, fault_text


def fail(error: Exception) -> None:
    raise error


def test_every_fault_is_counted_and_its_first_occurrence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
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


def test_fault_text_names_the_file_and_has_a_limited_length() -> None:
    assert "the sink failed, training continues: NotADirectoryError: [Errno 20] Not a directory: '/dev/full/x'" == (
        fault_text("the sink", NotADirectoryError(20, "Not a directory", "/dev/full/x"))
    )
    assert "the sink failed, training continues: OSError('full')" == fault_text("the sink", OSError("full"))
    assert MAX_TEXT + 100 > len(fault_text("publishing", ValueError("x" * 1_000_000)))


def test_keyboard_interrupt_is_not_caught() -> None:
    """Ctrl-C and SystemExit must reach the user's code."""
    boundary = ErrorBoundary()
    with pytest.raises(KeyboardInterrupt):
        boundary.call("the hook", fail, KeyboardInterrupt())  # type: ignore[arg-type]  # not an Exception, on purpose

    assert 0 == boundary.count
