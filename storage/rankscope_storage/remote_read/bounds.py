"""What a question may take beside its rows: memory, and the time of those who wait for its answer.

Clocks and clients are looked at elsewhere: who sees that the time is up ends the question from another thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import duckdb

from rankscope_contract.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.errors import LimitError, StoreError

MEMORY_BYTES: Final = 1 << 30
"""What DuckDB may take for an answer, at least."""

SAMPLE_BYTES: Final = 256
"""What it may take for each sample that an answer may have; five million took 100 to 200 each."""

_REMEDY: Final = "ask for fewer series or a shorter time"


class Patience:
    """Of those who wait for one answer: it lasts until somebody says that it has ended."""

    def __init__(self) -> None:
        self._why: str | None = None
        self._cursor: duckdb.DuckDBPyConnection | None = None
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
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
def bounded(connection: Connection, patience: Patience, max_samples: int) -> Iterator[None]:
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
        if patience.has_ended:
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
