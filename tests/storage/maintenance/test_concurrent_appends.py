"""Maintenance blocks neither appends nor reads, at whatever fsync it is delayed."""

from __future__ import annotations

import datetime as dt
import threading

import pytest
from tests.storage.rows import ask, put

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.maintenance.vacuum import maintain

LONG_SECONDS = 60


class Held:
    """A sync function that blocks at its `moment`-th call until it is released."""

    def __init__(self, moment: int) -> None:
        self._left = moment
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, path) -> None:
        self._left -= 1
        if not self._left:
            self.stopped.set()
            assert self.go_on.wait(LONG_SECONDS)
        sync_to_disk(path)


def age(root, sync) -> None:
    """Retention that removes all rows of these tests, which have times in 1970."""
    retain(root, Retention(raw_days=1, scalars_days=1, samples_days=1), sync, now=dt.datetime.now(dt.UTC))


def append(writer, batch, seq: int) -> int:
    """Append a scalar and a row of statistics; return the number of each then."""
    writer.append(batch([seq]))
    row = {"run": "r", "incarnation": "i-s", "seq": seq, "step": seq, "ts": seq * 1_000_000, "kind": "k", "tensor": "t"}
    put(writer, "tensor_stats", [row], {"i-s": seq})
    return seq + 1


STORED = 'SELECT (SELECT sum("rows")::BIGINT FROM tensor_timeline), (SELECT sum("rows")::BIGINT FROM scalar_timeline)'


@pytest.mark.usual(1)
@pytest.mark.parametrize("work", [age, compact, maintain])
def test_appends_and_reads_work_while_maintenance_is_blocked(store, writer, connection, batch, monkeypatch, work):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    rows = 0
    for moment in range(1, 60, 5):
        for _ in range(2):
            rows = append(writer, batch, rows)
        held = Held(moment)
        upkeep = threading.Thread(target=work, args=(store.root, held))
        upkeep.start()
        while upkeep.is_alive() and not held.stopped.wait(0.01):
            pass
        rows = append(writer, batch, rows)

        assert [(rows, rows)] == ask(connection, STORED)
        held.go_on.set()
        upkeep.join(LONG_SECONDS)
        assert not upkeep.is_alive()
        assert [(rows, rows)] == ask(connection, STORED)
        if not held.stopped.is_set():
            break
    assert moment > 3
    assert check(store.root, deep=True).is_intact
