"""Rows that cannot be stored, and requests to a service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope_ingest.pipeline.flusher import Quarantine
from rankscope_ingest.remote_write import handler
from rankscope_storage.base.errors import BatchError


@pytest.fixture
def rejecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Quarantine]:
    """Return a function that makes tables of samples fail whose values `is_bad`, and returns a quarantine for them."""

    def reject(is_bad: Callable[[list[float]], bool], count: Callable[[int], None] = lambda _: None) -> Quarantine:
        genuine = handler.samples_table

        def table(requests):
            rows = genuine(requests)
            if is_bad(rows["value"].to_pylist()):
                raise BatchError("rows cannot be written as Parquet: a fault of ours")
            return rows

        monkeypatch.setattr(handler, "samples_table", table)
        return Quarantine(tmp_path, stamp=None, count=count)

    return reject
