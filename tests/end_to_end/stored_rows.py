"""Rows that the decoder of the service creates from the records of a rank in this process."""

import itertools

import pyarrow as pa
from tests.exporter.conftest import Reader

from rankscope_contract.wire.channel import PLAN_PATH, RECORDS_PATH, SCHEMA_HEADER
from rankscope_ingest.record_channel.bodies import PlanCache, RowContext, check, decode, plain_text, plan_ids
from rankscope_ingest.record_channel.client import open_stream


def tables_of(read: Reader, run: str = "r", incarnation: str = "i") -> dict[str, pa.Table]:
    """Return the rows of all records in the ring by dataset, including the tensors of its plans."""
    wire = open_stream(read.get(f"{RECORDS_PATH}?after=-1", **{SCHEMA_HEADER: "1"}))
    cache = PlanCache()
    for plan in plan_ids(wire):
        cache.add(plan, read.get(PLAN_PATH + plan).decode())
    plans = {plan: columns for plan in plan_ids(wire) if (columns := cache.get(plan)) is not None}
    context = RowContext(run=run, attempt=0, rank=0, incarnation=incarnation)
    places = itertools.count()
    named = [
        plan.dimension_rows(lambda: {"run": run, "attempt": 0, "ordinal": next(places)}) for plan in plans.values()
    ]
    decoded = decode([check(wire, plans, context, after=-1, first_ordinal=0)])
    tables = {dataset: plain_text(table) for dataset, table in decoded.items()}
    return {**tables, **({"tensors": pa.concat_tables(named)} if named else {})}
