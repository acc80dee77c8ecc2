"""Fixtures of the importer tests: a store for imported logs, and the recorded logs if they are available."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope_ingest.importers import ImportReport, find_importer, import_records, importers
from rankscope_ingest.importers.common.importer import Detection
from rankscope_ingest.importers.common.log_identity import known_imports
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect

SHARED = Path(os.environ.get("RANKSCOPE_SHARED") or Path(__file__).resolve().parents[3].parent / "shared")
DATA = SHARED / "data"


@pytest.fixture
def data() -> Path:
    """Return the folder of the recorded logs. Without it, the test is skipped."""
    if not DATA.is_dir():
        pytest.skip(f"the recorded logs are not here ({DATA})")
    return DATA


class Counting:
    """A writer that counts appends and refreshes, and fails from the append with the number `fails_at` on."""

    def __init__(self, writer: Any, fails_at: int | None = None) -> None:
        self.writer, self.fails_at, self.appends = writer, fails_at, 0
        self.refreshes = 0

    def append(self, batch: Any) -> Any:
        self.appends += 1
        if self.fails_at is not None and self.appends >= self.fails_at:
            raise StoreError("disk full")
        return self.writer.append(batch)

    def watermark(self, incarnation: str, *, refresh: bool = True) -> int:
        self.refreshes += refresh
        return self.writer.watermark(incarnation, refresh=refresh)


class Made:
    """An importer that yields the given items."""

    name = "made"

    def __init__(self, *items: Any) -> None:
        self.items = items

    def detect(self, path: Path, head: bytes) -> Detection:
        return Detection(1.0, "made")

    def read(self, path: Path, faults: Any) -> Iterator[Any]:
        yield from self.items


class Logs:
    """One store with methods to import logs and to query it."""

    def __init__(self, folder: Path, writer: Any) -> None:
        self.folder = folder
        self.writer = writer
        self._connection: Any = None

    def import_log(self, path: Path, *, run: str = "r", kind: str | None = None) -> ImportReport:
        importer = find_importer(path) if kind is None else importers()[kind]
        return import_records(path, self.writer, importer, run=run)

    def import_again(self, path: Path, *, run: str = "r", importer: Any = None, **options: Any) -> ImportReport:
        """Import a log as the command does: with the stored facts about earlier imports."""
        with connect(self.folder / "store") as connection:
            known = known_imports(connection, run)
        return import_records(path, self.writer, importer or find_importer(path), run=run, known=known, **options)

    def query(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        self._connection = self._connection or connect(self.folder / "store")
        return self._connection.query(query, parameters or None).to_pylist()

    def tuples(self, query: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in self.query(query, **parameters)]

    def close(self) -> None:
        if self._connection:
            self._connection.close()

    def value(self, query: str, **parameters: Any) -> Any:
        """Return the only value of the only row, None without a row."""
        rows = self.query(query, **parameters)
        assert len(rows) <= 1, rows
        return next(iter(rows[0].values())) if rows else None

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield a writer of a new store, and a connection to it."""
    folder = tmp_path / "store"
    with Store.open(folder, create=True).claim(owner="test") as writer, connect(folder) as connection:
        yield writer, connection


@contextlib.contextmanager
def logs_in(folder: Path) -> Iterator[Logs]:
    with Store.open(folder / "store", create=True).claim(owner="test") as writer:
        logs = Logs(folder, writer)
        yield logs
        logs.close()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    with logs_in(tmp_path) as logs:
        yield logs
