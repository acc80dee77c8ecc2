"""Print log messages as lines above a live display."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Final

from rankscope.output.rows import printable
from rankscope_contract.model.redaction import MAX_LABEL, redacted_text


class LineHandler(logging.Handler):
    """A log handler that prints log records above the progress bars, so that they do not disturb the bars."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._print_line = print_line

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line with the level, the message and the context of `record`."""
        fields = ((key, value) for key, value in vars(record).items() if key not in _RECORD_FIELDS)
        about = "".join(f", {key} {value}" for key, value in fields if value is not None)
        line = redacted_text(f"{record.levelname.lower()}: {record.getMessage()}{about}", MAX_LABEL)
        self._print_line(printable(line))


_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}
"""Attributes that every log record has. All other attributes of a record are its context and are printed."""


@contextlib.contextmanager
def log_to(print_line: Callable[[str], None]) -> Iterator[None]:
    """Print the log messages of the service and of the store with `print_line` in the body of the context."""
    handler = LineHandler(print_line)
    loggers = [logging.getLogger(name) for name in ("rankscope_ingest", "rankscope_storage", "rankscope_contract")]
    loggers[0].setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
