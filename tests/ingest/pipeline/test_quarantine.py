"""Rows that the store always rejects are quarantined and reported, and all others are stored."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.pipeline.batcher import Batcher, PendingBatch
from rankscope_ingest.pipeline.flusher import FOLDER, Quarantine, halves, parts
from rankscope_ingest.reporting.rows import Stamp
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import BatchError
from rankscope_storage.writer.writer import Writer


def poisoned(monkeypatch, is_bad):
    """Make the store reject batches with one bad value of loss, as it does with invalid rows."""
    genuine = Writer.append

    def append(writer, batch):
        table = batch.tables.get("scalars")
        if table is not None and any(map(is_bad, table["value"].to_pylist())):
            raise BatchError("scalars.value must be float64")
        return genuine(writer, batch)

    monkeypatch.setattr(Writer, "append", append)


def told(service) -> list[dict]:
    return service.rows("SELECT run, rank, message, details FROM events WHERE type = 'fault'")


async def test_rejected_rows_are_quarantined_and_all_others_are_stored_once(
    start_service, fake_rank, eventually, monkeypatch
):
    poisoned(monkeypatch, lambda value: value == 13.0)
    async with fake_rank(world_size=2) as good, fake_rank(rank=1, world_size=2) as bad, start_service() as service:
        for rank in (good, bad):
            await rank.register(service.url)
        for step in range(20):
            good.publish(step=step, scalars=[{"name": "loss", "value": 1.0}])
            bad.publish(step=step, scalars=[{"name": "loss", "value": float(step)}])
        await eventually(lambda: (good.committed, bad.committed) == (19, 19))
        await bad.deliver(service, 1)  # later records follow the rejected ones
        _, page = await service.get("/metrics")
    monkeypatch.undo()

    stored = service.rows("SELECT rank, step FROM scalars WHERE name = 'loss' ORDER BY ALL")
    (event,) = told(service)
    details = json.loads(event["details"])
    (folder,) = (service.store / FOLDER).iterdir()
    kept = pa.ipc.open_file(folder / "scalars.arrow").read_all()
    steps = [[row["step"] for row in stored if row["rank"] == rank] for rank in (0, 1)]
    assert [list(range(20)), list(range(21))] == [steps[0], sorted(steps[1] + kept["step"].to_pylist())]
    assert 13.0 in kept["value"].to_pylist()
    assert (1, details["folder"]) == (event["rank"], str(folder))
    assert f"rankscope_ingest_rows_set_aside_total {float(details['rows'])}" in page
    assert "scalars.value must be float64" == json.loads((folder / "why.json").read_text())["error"]


async def test_body_that_cannot_be_decoded_is_quarantined_as_received(start_service, fake_rank, monkeypatch):
    genuine = PendingBatch.tables

    def tables(batch):
        if any(body.context.rank == 1 for body in batch.bodies):
            raise KeyError("a column that nobody thought of")
        return genuine(batch)

    monkeypatch.setattr(PendingBatch, "tables", tables)
    async with fake_rank(world_size=2) as good, fake_rank(rank=1, world_size=2) as bad, start_service() as service:
        await asyncio.gather(*(rank.deliver(service, 1) for rank in (good, bad)))
    monkeypatch.undo()
    (kept,) = (service.store / FOLDER).glob("*/as_it_came.pickle")

    assert [0.0] == pickle.loads(kept.read_bytes()).tables()["scalars"]["value"].to_pylist()
    assert [{"rank": 0}] == service.rows("SELECT rank FROM scalars WHERE name = 'loss'")
    assert ["KeyError" in event["message"] for event in told(service)] == [True]


def test_quarantined_rows_survive_all_maintenance_of_the_store(tmp_path):
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        quarantine = Quarantine(tmp_path / "store", stamp=lambda: Stamp(0, 0), count=lambda rows: None)
        table = pa.table({"incarnation": ["a"], "seq": [0], "value": ["no number"]})
        folder = quarantine.keep(PendingBatch(pieces={"scalars": (table,)}, watermarks={"a": 0}, rows=1), "why")
        kept = sorted(folder.iterdir())
        for path in (*kept, folder, folder.parent):
            os.utime(path, (0, 0))
        report = writer.maintain()

    assert ["scalars.arrow", "why.json"] == [path.name for path in kept]
    assert (kept, 0, 0) == (sorted(folder.iterdir()), report.data_files, report.staged_files)


NAMES = st.sampled_from(["a", "b", None])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 9) | st.none()), max_size=12), st.integers(0, 9), st.integers(0, 9))
def test_parts_have_all_rows_in_an_order_that_the_store_accepts(rows, last_of_a, last_of_b):
    """Each row occurs once; a row with a seq is in a part whose watermark includes it."""
    lasts = {"a": last_of_a, "b": last_of_b}
    rows = [(name, None if seq is None else min(seq, lasts.get(name, seq)), n) for n, (name, seq) in enumerate(rows)]
    batcher = Batcher(flush_rows=1, flush_after_seconds=1.0, max_pending_rows=100)
    for name, seq, number in rows:
        columns = {"incarnation": pa.array([name], pa.string()), "seq": pa.array([seq], pa.int64()), "n": [number]}
        batcher.add({"events": pa.table(columns)}, time.monotonic())
    batcher.add({}, time.monotonic(), watermarks=lasts)
    batch = batcher.take()
    tables = [(part, table) for part in parts(batch) for table in part.pieces.get("events", ())]
    found = [(part, row) for part, table in tables for row in table.to_pylist()]

    assert list(range(len(rows))) == sorted(row["n"] for _, row in found)
    assert batch.rows == sum(part.rows for part in parts(batch))
    for part, row in found:
        if row["incarnation"] is not None and row["seq"] is not None:
            assert row["seq"] <= part.watermarks[row["incarnation"]]
    if (pair := halves(batch)) is not None:
        assert batch.rows == sum(half.rows for half in pair)
        assert batch.watermarks == pair[0].watermarks | pair[1].watermarks
