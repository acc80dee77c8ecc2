"""Decoding of bodies, alone and together: every number and name is in its row, and invalid bodies are rejected."""

import json
import math
import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.conftest import encode_records
from tests.properties import examples

from rankscope_contract.model.schema import (
    NESTED,
    WIRE_COUNT_OPS,
    WIRE_FIELDS,
    WIRE_VALUE_OPS,
    Plan,
    PlanEntry,
    arrow_schema,
    plan_hash,
)
from rankscope_exporter.publish.ring import encode, stream
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Statistics, StepRecord
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.record_channel.bodies import PlanCache, RowContext, ValidBody, check, decode, plan_ids
from rankscope_ingest.record_channel.client import inflated_bytes, open_stream
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.files.sorting import SORT_KEYS, sort_order

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FLOATS = st.none() | st.floats(width=32, allow_nan=False)
COUNTS = st.integers(0, 1 << 62)
TEXT = st.text(max_size=8)
NUMBER = st.none() | st.floats()
SMALL = st.none() | st.integers(-(1 << 31), (1 << 31) - 1)
CONTEXT = {"run": "../ru'n=1 学", "attempt": 2, "rank": 3, "incarnation": "abc"}

entries = st.builds(
    PlanEntry,
    kind=TEXT,
    tensor=TEXT,
    **dict.fromkeys(("index", "vpp_stage", "micro_step"), SMALL),
    call_seq=st.none() | st.integers(0, 1 << 40),
    placement=st.sampled_from(["full", "shard"]),
    shard_group=st.none() | TEXT,
)
plans = st.lists(entries, max_size=4).map(lambda chosen: Plan(tuple(chosen)))
scalars = st.fixed_dictionaries({"name": TEXT, "value": NUMBER, "unit": st.none() | TEXT, "labels": st.none() | TEXT})
TEXTS = {"type": TEXT, "tensor": st.none() | TEXT, "message": st.none() | TEXT}
events = st.fixed_dictionaries({**TEXTS, "value": NUMBER, "vpp_stage": SMALL, "micro_step": SMALL})
histograms = st.fixed_dictionaries(
    {"kind": TEXT, "tensor": TEXT, "scheme": TEXT, "counts": st.none() | st.lists(st.integers(0, 9), max_size=3)}
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Plan]]:
    """Return the records of one body, in order of seq and with gaps, and the plans that they use."""
    known = draw(st.lists(plans, min_size=1, max_size=2, unique_by=lambda plan: plan.hash))
    records, seq = [], -1
    for _ in range(draw(st.integers(1, 5))):
        seq += draw(st.integers(1, 3))
        record: dict[str, Any] = {
            "seq": seq,
            "step": draw(st.none() | st.integers(0, 1 << 40)),
            "micro_step": draw(st.none() | st.integers(0, 100)),
            "ts": draw(st.integers(0, 1 << 50)),
            "scalars": draw(st.none() | st.lists(scalars, max_size=3)),
            "events": draw(st.none() | st.lists(events, max_size=2)),
            "histograms": draw(st.none() | st.lists(histograms, max_size=2)),
        }
        plan = draw(st.none() | st.sampled_from(known))
        if plan is not None:
            size, numbers = len(plan.entries), len(plan.entries) * len(WIRE_VALUE_OPS)
            present = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            record["plan"] = plan.hash
            record["values"] = draw(st.lists(FLOATS, min_size=numbers, max_size=numbers))
            record["counts"] = [draw(COUNTS) if here else None for _ in WIRE_COUNT_OPS for here in present]
        records.append(record)
    return records, known


def slow_rows(records: list[dict[str, Any]], known: list[Plan], first_ordinal: int) -> dict[str, list[dict[str, Any]]]:
    """Decode one value at a time in plain Python, as an independent reference."""
    by_hash = {plan.hash: plan for plan in known}
    rows: dict[str, list[dict[str, Any]]] = {}
    for position, record in enumerate(records):
        common = CONTEXT | {
            "seq": record["seq"],
            "ordinal": first_ordinal + position,
            "step": record["step"],
            "micro_step": record["micro_step"],
            "ts": EPOCH + timedelta(microseconds=record["ts"]),
            "ts_origin": "rank",
        }
        if record.get("plan") is not None:
            plan = by_hash[record["plan"]].entries
            for at, entry in enumerate(plan):
                if record["counts"][at] is None:
                    continue
                row = dict.fromkeys(field.name for field in DATASETS["tensor_stats"]) | common
                for name in ("kind", "tensor", "index", "vpp_stage", "call_seq", "placement", "shard_group"):
                    row[name] = getattr(entry, name)
                row |= {} if entry.micro_step is None else {"micro_step": entry.micro_step}
                row |= {op: record["values"][n * len(plan) + at] for n, op in enumerate(WIRE_VALUE_OPS)}
                row |= {op: record["counts"][n * len(plan) + at] for n, op in enumerate(WIRE_COUNT_OPS)}
                rows.setdefault("tensor_stats", []).append(row)
        for dataset in NESTED:
            for item in record.get(dataset) or ():
                row = dict.fromkeys(field.name for field in DATASETS[dataset]) | common | item
                row |= {"micro_step": common["micro_step"]} if item.get("micro_step") is None else {}
                rows.setdefault(dataset, []).append(row)
    return rows


def comparable(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as sorted text, so that NaN equals NaN and differs from None."""
    return sorted(repr(sorted((row | {"ts": row["ts"].astimezone(UTC)}).items())) for row in rows)


def cache_of(known: list[Plan]) -> PlanCache:
    cache = PlanCache()
    for plan in known:
        cache.add(plan.hash, plan.to_json())
    return cache


def checked(body: bytes, known: list[Plan], *, after: int = -1, first_ordinal: int = 100) -> Any:
    wire = open_stream(body)
    cache = cache_of(known)
    named = {plan_id: cache.get(plan_id) for plan_id in plan_ids(wire)}
    return check(wire, named, RowContext(**CONTEXT), after=after, first_ordinal=first_ordinal)  # type: ignore[arg-type]


@settings(max_examples=examples(60), deadline=None)
@given(bodies())
def test_rows_equal_those_of_a_plain_decoder(body):
    """Every seq is either delivered or reported missing."""
    records, known = body
    result = checked(encode_records(records, max_chunksize=2), known)
    expected, tables = slow_rows(records, known, 100), decode([result])
    missing = {seq for first, last in result.missing for seq in range(first, last + 1)}
    delivered = {record["seq"] for record in records}

    assert expected.keys() == tables.keys()
    for dataset, rows in expected.items():
        assert comparable(rows) == comparable(tables[dataset].to_pylist())
    assert sum(map(len, expected.values())) == result.rows
    assert (set(range(result.last + 1)), set()) == (missing | delivered, missing & delivered)


def test_nan_infinity_null_and_zero_remain_distinct():
    plan = Plan((PlanEntry(kind="grad_reduced", tensor="w"),))
    values, scalar_values = [0.0, None, math.inf, -0.0, None, 1.5], [math.nan, math.inf, -math.inf, 0.0, None]
    named = [{"name": str(n), "value": value} for n, value in enumerate(scalar_values)]
    record = {"seq": 0, "ts": 0, "plan": plan.hash, "values": values, "counts": [0, 0, 1, 1], "scalars": named}
    tables = decode([checked(encode_records([record]), [plan])])
    row = tables["tensor_stats"].to_pylist()[0]

    assert values == [row[op] for op in WIRE_VALUE_OPS]
    assert list(map(repr, scalar_values)) == [repr(value) for value in tables["scalars"]["value"].to_pylist()]


def test_body_of_an_older_or_newer_sender_is_accepted():
    """The older one lacks nullable columns, the newer one has another column."""
    older = arrow_schema(pa, tuple(field for field in WIRE_FIELDS if field.name not in {"micro_step", "features"}))
    newer = arrow_schema(pa, WIRE_FIELDS).append(pa.field("colour", pa.string()))
    result = checked(
        encode_records([{"seq": 0, "ts": 0, "scalars": [{"name": "loss", "value": 1.0}]}], schema=older), []
    )

    assert [None] == decode([result])["scalars"]["micro_step"].to_pylist()
    assert 1 == checked(encode_records([{"seq": 0, "ts": 0, "colour": "red"}], schema=newer), []).records


def test_times_of_all_rows_are_without_jumps_of_the_clock():
    loss, note = [{"name": "loss", "value": 1.0}], [{"type": "note", "severity": "info", "message": ""}]
    records = [{"seq": 0, "ts": 7_200_000_000, "scalars": loss}, {"seq": 1, "ts": 3_700_000_000, "scalars": loss}]
    records[1] |= {"clock_offset": -3_600_000_000, "events": note}
    right, jumped = checked(encode_records(records[:1]), []), checked(encode_records(records), [])
    tables = decode([jumped])

    assert (7_200_000_000, 7_300_000_000) == (right.last_ts, jumped.last_ts)
    assert [7_200_000_000, 7_300_000_000] == tables["scalars"]["ts"].cast(pa.int64()).to_pylist()
    assert [7_300_000_000] == tables["events"]["ts"].cast(pa.int64()).to_pylist()


NARROW = pa.schema([pa.field("seq", pa.int32()), pa.field("ts", pa.timestamp("us", tz="UTC"))])
ENTRY = Plan((PlanEntry(kind="k", tensor="t"),))


@pytest.mark.parametrize(
    ("records", "schema", "complaint"),
    [
        ([{"plan": ENTRY.hash, "values": [1.0], "counts": [1]}], None, "values does not have 6 numbers"),
        ([{"plan": ENTRY.hash, "values": None, "counts": None}], None, "values does not have 6 numbers"),
        ([{"events": [None]}], None, "events.type has a null"),
        ([{"seq": 4}, {"seq": 5}], None, "seq does not increase after 4"),
        ([{}], NARROW, "column seq has type int32"),
    ],
)
def test_record_that_violates_the_protocol_is_rejected(records, schema, complaint):
    with pytest.raises(DecodeError, match=complaint):
        checked(encode_records([{"seq": 5, "ts": 0} | record for record in records], schema=schema), [ENTRY], after=4)


@pytest.mark.parametrize("name", ["plan", "seq", "events", "colour"])
def test_duplicate_column_name_is_rejected(name):
    schema = arrow_schema(pa, WIRE_FIELDS)
    field = schema.field(name) if name in schema.names else pa.field(name, pa.string())
    sink = pa.BufferOutputStream()
    doubled = pa.schema([*(other for other in schema if other.name != name), field, field])
    with pa.ipc.new_stream(sink, doubled) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([pa.array([], each.type) for each in doubled], schema=doubled))

    with pytest.raises(DecodeError, match="two columns with the same name"):
        open_stream(sink.getvalue().to_pybytes())


def test_no_prefix_of_a_body_is_accepted():
    """This includes a prefix that ends between two messages, which Arrow accepts as a shorter stream."""
    body = encode_records([{"seq": n, "ts": 0, "scalars": [{"name": "a", "value": 1.0}]} for n in range(3)])
    for length in range(len(body)):
        with pytest.raises(DecodeError):
            open_stream(body[:length])

    assert 3 == open_stream(body).num_rows


def test_uncompressed_size_of_a_body_is_limited():
    body = encode_records([{"seq": 0, "ts": 0, "values": [0.0] * 100_000}])
    plain = encode_records([{"seq": 0, "ts": 0, "values": [0.0] * 1000}], compression=None)

    assert len(body) < 40_000
    assert 400_000 <= inflated_bytes(body) < 410_000
    assert 4000 <= inflated_bytes(plain) <= len(plain)
    with pytest.raises(DecodeError, match="limit is 100000"):
        open_stream(body, max_inflated_bytes=100_000)


def test_stream_with_a_wrong_declared_size_is_rejected():
    body = bytearray(encode_records([{"seq": 0, "ts": 0, "values": [0.0] * 100_000}]))
    claim = struct.pack("<q", 400_000)
    at = bytes(body).index(claim)
    body[at : at + 8] = struct.pack("<q", 1 << 45)

    with pytest.raises(DecodeError, match="uncompressed body has"):
        open_stream(bytes(body))


def test_plan_is_converted_to_rows_of_tensors_and_rejected_with_another_hash():
    plan = Plan((PlanEntry(kind="k", tensor="t", dtype="float32", shape=(2, 3), aliases=("u",)),))
    columns = PlanCache().add(plan.hash, plan.to_json())
    row = columns.dimension_rows(lambda: {"run": "r", "attempt": 0}).to_pylist()[0]

    assert ("t", [2, 3], 6, ["u"]) == (row["tensor"], row["shape"], row["numel"], row["aliases"])
    with pytest.raises(DecodeError, match="another hash than the plan id"):
        PlanCache().add("0" * 32, plan.to_json())


def test_least_recently_used_plan_is_evicted_from_a_full_cache():
    cache = PlanCache(size=2)
    texts = {plan_hash(text): text for text in (json.dumps({"entries": [], "n": n}) for n in range(3))}
    for plan_id, text in texts.items():
        cache.add(plan_id, text)
        cache.get(next(iter(texts)))

    assert [True, False, True] == [cache.get(plan_id) is not None for plan_id in texts]


# Many bodies decoded together give the same rows as each body alone, and the rows of a series are adjacent.

MADE = {"run": st.sampled_from(["a", "学"]), "attempt": st.integers(0, 1), "rank": st.integers(0, 2)}
contexts = st.builds(RowContext, **MADE, incarnation=st.sampled_from(["i", "j"]))
RANK_0 = RowContext(run="r", attempt=0, rank=0, incarnation="i")


def checked_with(records, known, context, after=-1) -> ValidBody:
    wire = open_stream(encode_records(records))
    cache = cache_of(known)
    return check(wire, {name: cache.get(name) for name in plan_ids(wire)}, context, after=after, first_ordinal=7)


def rows_of(tables) -> dict[str, list[str]]:
    return {dataset: comparable(table.to_pylist()) for dataset, table in tables.items()}


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(bodies(), contexts), min_size=2, max_size=4))
def test_bodies_decoded_together_give_the_rows_of_each_body(mixed):
    """Any mixture of runs, ranks, plans, gaps, absent tensors and statistics, micro-steps and nested rows."""
    read = [checked_with(*body, context) for body, context in mixed]
    alone = [decode([body]) for body in read]
    expected = {name: pa.concat_tables(table[name] for table in alone if name in table) for name in set().union(*alone)}

    assert rows_of(expected) == rows_of(decode(read))
    assert sum(body.rows for body in read) == sum(table.num_rows for table in decode(read).values())


def test_rows_are_in_storage_order_for_any_order_of_plans_and_ranks():
    """Sorting them does not change their order."""
    plan = Plan(tuple(PlanEntry(kind=kind, tensor=tensor) for tensor in ("b", "a", "学") for kind in ("y", "x")))
    numbers = {"plan": plan.hash, "values": [1.0] * 36, "counts": [1] * 24}
    read = [
        checked_with(
            [{"seq": seq, "step": seq, "ts": 0, **numbers} for seq in span], [plan], replace(RANK_0, rank=rank)
        )
        for span, rank in ((range(2), 2), (range(1), 0), (range(2, 3), 2), (range(3), 1))
    ]
    table = decode(read)["tensor_stats"]

    assert 6 * 7 == table.num_rows
    assert np.arange(table.num_rows).tolist() == sort_order(table, SORT_KEYS["tensor_stats"]).tolist()


# Bodies of releases with plans that do not name their ops, and of newer releases with ops that the service lacks.

DATA = Path(__file__).parent / "data"
OLD_RANK = RowContext(run="old", attempt=0, rank=1, incarnation="0123456789abcdef")
NEW_OPS = ("rms", "kurtosis")


def _rows(body: bytes, plan_text: str) -> dict[str, list[dict[str, object]]]:
    plan_id = plan_hash(plan_text)
    columns = PlanCache().add(plan_id, plan_text)
    valid = check(pa.ipc.open_stream(body).read_all(), {plan_id: columns}, OLD_RANK, after=-1, first_ordinal=0)
    return {name: table.to_pylist() for name, table in decode([valid]).items()}


def test_body_of_a_release_without_named_ops_has_the_same_rows():
    """The folder was written once by that release and is never written again."""
    recorded = json.loads((DATA / "rows.json").read_text(encoding="utf-8"))
    rows = _rows((DATA / "body.arrows").read_bytes(), (DATA / "plan.json").read_text(encoding="utf-8"))
    read = json.loads(json.dumps(rows, default=str))

    assert [dict.fromkeys(NEW_OPS) | row for row in recorded["tensor_stats"]] == read["tensor_stats"]
    assert [repr(row | {"position": None}) for row in recorded["scalars"]] == [repr(row) for row in read["scalars"]]
    assert recorded["events"] == read["events"]


def test_body_of_a_newer_release_keeps_known_ops_and_drops_others():
    plan = Plan((PlanEntry(kind="param_before", tensor="w"),), ("skew", "rms", "norm"), ("ones", "numel"))
    statistics = Statistics(NamedPlan.of(plan), pa.array([9.0, 2.0, 3.0], pa.float32()), pa.array([7, 5]))
    body = stream(0, [encode(StepRecord(ts=0, step=1, statistics=statistics))])
    (row,) = _rows(body, plan.to_json())["tensor_stats"]

    assert {"rms": 2.0, "norm": 3.0, "numel": 5} == {op: row[op] for op in ("rms", "norm", "numel")}
    assert {None} == {row[op] for op in ("min", "kurtosis", "nans", "norm_baseline")}
    assert not {"skew", "ones"} & set(row)


@pytest.mark.parametrize("names", [["norm", "norm"], ["norm", 1], 5])
def test_plan_with_invalid_op_names_is_rejected(names):
    text = json.dumps(json.loads(Plan(()).to_json()) | {"value_ops": names})
    with pytest.raises(DecodeError, match="not a plan"):
        PlanCache().add(plan_hash(text), text)
