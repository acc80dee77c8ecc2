"""Many bodies decoded together give the same rows as each body alone, and the rows of a series are adjacent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.conftest import encode_records
from tests.ingest.record_channel.test_decode import bodies, cache_of, comparable
from tests.properties import examples

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.pipeline.batcher import Batcher
from rankscope_ingest.record_channel.arrow_guard import open_stream
from rankscope_ingest.record_channel.decode import decode
from rankscope_ingest.record_channel.validate import RowContext, ValidBody, check, plan_ids
from rankscope_storage.files.sorting import SORT_KEYS, sort_order

MADE = {"run": st.sampled_from(["a", "学"]), "attempt": st.integers(0, 1), "rank": st.integers(0, 2)}
contexts = st.builds(RowContext, **MADE, incarnation=st.sampled_from(["i", "j"]))
CONTEXT = RowContext(run="r", attempt=0, rank=0, incarnation="i")


def checked(records, known, context, after=-1) -> ValidBody:
    wire = open_stream(encode_records(records))
    cache = cache_of(known)
    return check(wire, {name: cache.get(name) for name in plan_ids(wire)}, context, after=after, first_ordinal=7)


def rows_of(tables) -> dict[str, list[str]]:
    return {dataset: comparable(table.to_pylist()) for dataset, table in tables.items()}


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(bodies(), contexts), min_size=2, max_size=4))
def test_bodies_decoded_together_give_the_rows_of_each_body(mixed):
    """Any mixture of runs, ranks, plans, gaps, absent tensors and statistics, micro-steps and nested rows."""
    read = [checked(*body, context) for body, context in mixed]
    alone = [decode([body]) for body in read]
    expected = {name: pa.concat_tables(table[name] for table in alone if name in table) for name in set().union(*alone)}

    assert rows_of(expected) == rows_of(decode(read))
    assert sum(body.rows for body in read) == sum(table.num_rows for table in decode(read).values())


def test_rows_are_in_storage_order_for_any_order_of_plans_and_ranks():
    """Sorting them does not change their order."""
    plan = Plan(tuple(PlanEntry(kind=kind, tensor=tensor) for tensor in ("b", "a", "学") for kind in ("y", "x")))
    numbers = {"plan": plan.hash, "values": [1.0] * 36, "counts": [1] * 24}
    read = [
        checked([{"seq": seq, "step": seq, "ts": 0, **numbers} for seq in span], [plan], replace(CONTEXT, rank=rank))
        for span, rank in ((range(2), 2), (range(1), 0), (range(2, 3), 2), (range(3), 1))
    ]
    table = decode(read)["tensor_stats"]

    assert 6 * 7 == table.num_rows
    assert np.arange(table.num_rows).tolist() == sort_order(table, SORT_KEYS["tensor_stats"]).tolist()


def test_events_of_ranks_and_service_are_in_one_table():
    gathered = Batcher(flush_rows=10, flush_after_seconds=1.0, max_pending_rows=10)
    gathered.add_body(checked([{"seq": 0, "ts": 0, "events": [{"type": "anomaly"}]}], [], CONTEXT), 0.0)
    gathered.add({"events": rows_table("events", [{"run": "r", "type": "gap"}])}, 0.0)
    batch = gathered.take()

    assert ["anomaly", "gap"] == batch.tables()["events"]["type"].to_pylist()
    assert (2, {"i": 0}) == (batch.rows, batch.watermarks)
