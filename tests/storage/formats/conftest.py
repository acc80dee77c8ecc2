"""Runs to export: rows given as dictionaries, in a store of their own."""

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.storage.rows import table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import Connection, connect
from rankscope_storage.formats import ExportOptions, ExportReport, export_formats

START = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)


def row(**columns: Any) -> dict[str, Any]:
    """Return the common columns of a row of rank 0, a second after START for every step, and the given ones."""
    step = columns.get("step", 1)
    common = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "step": step, "ts_origin": "rank"}
    return common | {"ts": START + dt.timedelta(seconds=step or 0)} | columns


def scalar(step: int | None, value: float | None, name: str = "loss", **columns: Any) -> dict[str, Any]:
    return row(step=step, name=name, value=value, **columns)


def tensor(step: int | None, name: str = "w", kind: str = "grad_reduced", **columns: Any) -> dict[str, Any]:
    return row(step=step, kind=kind, tensor=name, **{"placement": "full", "norm": 1.5} | columns)


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return {tag: [(step, value)]} as TensorBoard has them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


class Shelf:
    """A store that takes rows, and gives them back in other formats."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = Store.open(folder / "store", create=True)
        self._connections: list[Connection] = []
        self._seq = 0

    def put(self, **rows: list[dict[str, Any]]) -> None:
        tables = {}
        for dataset, listed in rows.items():
            numbered = [{"seq": self._seq + place, "ordinal": place} | one for place, one in enumerate(listed)]
            tables[dataset] = table(dataset, numbered)
        self._seq += sum(map(len, rows.values()))
        with self._store.claim(owner="test") as writer:
            writer.append(Batch(tables=tables, watermarks={"i": self._seq - 1}))

    def connect(self) -> Connection:
        self._connections.append(connect(self.folder / "store", locked=True))
        return self._connections[-1]

    def export(
        self, form: str, name: str = "out", *progress: Callable[[int, int], None], run: str = "r", **options: Any
    ) -> tuple[Path, ExportReport]:
        target = self.folder / name
        report = export_formats()[form].export(self.connect(), run, target, ExportOptions(**options), *progress)
        return target, report

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()
