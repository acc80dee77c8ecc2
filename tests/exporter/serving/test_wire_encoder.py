"""The stream contains all fields of the records, and distinguishes NaN, Inf, null and 0."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.fields import arrow_schema
from rankscope_contract.model.kinds import COUNT_OPS, Kind
from rankscope_contract.model.schema import NESTED, WIRE_FIELDS, WIRE_METADATA, WIRE_VALUE_OPS, PlanEntry
from rankscope_exporter.records.step_record import Scalar, StepRecord
from rankscope_exporter.serving.wire_encoder import encode

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _decoded(records, first=0):
    return pa.ipc.open_stream(encode(first, records).body).read_all().to_pylist()


def _timestamp(microseconds):
    return EPOCH + dt.timedelta(microseconds=microseconds)


def _same(left, right):
    """Return whether two numbers or nulls are equal; NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(left, float) and isinstance(right, float):
        return left.hex() == right.hex()
    return left == right


def _all_same(left, right):
    return len(left) == len(right) and all(_same(*pair) for pair in zip(left, right, strict=True))


def test_schema_is_that_of_the_contract_without_datasets_without_rows():
    records = [StepRecord(ts=0), StepRecord(ts=1, scalars=(Scalar("loss", 0.5),))]
    lean, whole = (pa.ipc.open_stream(encode(0, records, whole=whole).body).read_all() for whole in (False, True))

    assert arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA).equals(whole.schema, check_metadata=True)
    assert ["seq", "step", "micro_step", "ts", "plan", "values", "counts", "scalars"] == lean.column_names
    assert lean.equals(whole.select(lean.column_names), check_metadata=True)
    assert [None, None] == whole["clock_offset"].to_pylist()
    more = set(whole.column_names).difference(lean.column_names, ["clock_offset"])
    assert {0} == {len(rows) for name in more for rows in whole[name]}


def test_body_is_lz4_compressed_and_has_an_end_mark(record):
    numbers = [{"norm": 1.0}] * 1000
    entries = [PlanEntry(kind="grad_reduced", tensor=f"t{i}") for i in range(1000)]
    body = encode(0, [record(1, entries, numbers)]).body.to_pybytes()

    assert len(body) < 1000 * 4 * len(WIRE_VALUE_OPS) // 2
    assert body.endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")


def test_common_fields_round_trip():
    rows = _decoded([StepRecord(ts=5, step=7, micro_step=2), StepRecord(ts=6, clock_offset=-5)], first=41)
    names = ("seq", "step", "micro_step", "ts", "clock_offset")

    wanted = [(41, 7, 2, _timestamp(5), None), (42, None, None, _timestamp(6), -5)]
    assert wanted == [tuple(row[name] for name in names) for row in rows]


def test_statistics_distinguish_null_zero_infinity_and_absence(record):
    entries = [PlanEntry(kind="grad_reduced", tensor=name) for name in ("a", "b", "c")]
    numbers = [
        {"norm": 0.0, "min": -0.0, "max": math.inf, "mean": None, "nans": 3, "infs": 0, "zeros": 0, "numel": 9},
        None,
        {"norm": 1e-45, "min": -math.inf, "norm_baseline": 0.5, "numel": 1 << 40},
    ]
    first, without, again = _decoded([record(1, entries, numbers), StepRecord(ts=0), record(2, entries, numbers)])
    wanted = [(row or {}).get(op) for op in WIRE_VALUE_OPS for row in numbers]
    float32 = pa.array(wanted, pa.float32()).to_pylist()

    assert _all_same(float32, first["values"])
    assert [None if row is None else row.get(op, 0) for op in COUNT_OPS for row in numbers] == first["counts"]
    assert (None, None, None) == (without["plan"], without["values"], without["counts"])
    assert first["counts"] == again["counts"]
    assert record(1, entries, numbers).statistics.plan.hash == first["plan"]


def test_scalars_keep_nan_infinity_unit_and_labels():
    scalars = (
        Scalar("loss", math.nan, None, {"loss": "lm"}),
        Scalar("gnorm", -math.inf),
        Scalar("学习率 'lr\"", 0.0, "1/s", {"b": "ü", "a": "x\ny"}),
        Scalar("int", 3),
    )
    (row,) = _decoded([StepRecord(ts=0, scalars=scalars)])

    assert ["loss", "gnorm", "学习率 'lr\"", "int"] == [scalar["name"] for scalar in row["scalars"]]
    assert _all_same([math.nan, -math.inf, 0.0, 3.0], [scalar["value"] for scalar in row["scalars"]])
    assert [None, None, "1/s", None] == [scalar["unit"] for scalar in row["scalars"]]
    assert ['{"loss":"lm"}', None, '{"a":"x\\ny","b":"ü"}', None] == [scalar["labels"] for scalar in row["scalars"]]


def test_events_keep_every_field():
    what = {"type": EventType.ANOMALY, "severity": Severity.CRITICAL, "rule": "AnomalyNan", "kind": Kind.GRAD_REDUCED}
    numbers = {"value": math.nan, "baseline": math.inf, "threshold": 0.0, "pp_stage": 1, "vpp_stage": 0, "call_id": 12}
    full = Event(**what, **numbers, tensor="a", op="nans", message="first\nsecond ☠", details='{"a": 1}')
    (row,) = _decoded([StepRecord(ts=0, events=(full, Event(type="note")))])
    got, bare = row["events"]

    assert {field.name for field in NESTED["events"]} == got.keys()
    for name, value in got.items():
        assert _same(getattr(full, name), value), name
    defaults = {"type": "note", "severity": "info", "value": None, "message": "", "details": None}
    assert defaults.items() <= bare.items()


def test_nested_datasets_round_trip_with_their_record():
    feature = {"kind": "act_out", "module": "layers.0", "index": 3, "value": 0.25, "micro_step": 2}
    histogram = {"kind": "grad_reduced", "tensor": "a", "scheme": "log2", "counts": [0, 5, 1 << 40]}
    histogram |= {"below": 0, "above": 1, "nonfinite": 2}
    collective = {"call_seq": 4, "op": "all_reduce", "group": "dp", "group_size": 2, "bytes": 1 << 33, "dtype": "bf16"}
    collective |= {"call_site": None, "t_start": 1_700_000_000_000_001, "duration": 0.5}
    module = {"module": "layers.0", "class": "Linear", "inputs": "[]", "outputs": "[]"}
    module |= {"placement": "full", "stack": "x.py:1"}
    records = [
        StepRecord(ts=0, features=(feature,), histograms=(histogram,)),
        StepRecord(ts=1),
        StepRecord(ts=2, features=(feature, feature), collectives=(collective,), modules=(module,)),
    ]
    rows = _decoded(records)

    feature, histogram, module = _whole("features", feature), _whole("histograms", histogram), _whole("modules", module)
    collective = _whole("collectives", {**collective, "t_start": _timestamp(collective["t_start"])})
    assert [[feature], [], [feature, feature]] == [row["features"] for row in rows]
    assert [[histogram], [], []] == [row["histograms"] for row in rows]
    assert [collective] == rows[2]["collectives"]
    assert [[], [], [module]] == [row["modules"] for row in rows]


def _whole(dataset: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with null for each missing column."""
    return {field.name: None for field in NESTED[dataset]} | row


def test_row_that_does_not_fit_its_columns_is_counted():
    """One invalid row must not block the records after it."""
    good = _whole("features", {"kind": "act_out", "module": "a", "value": 1.0})
    bad = [
        {**good, "index": 1 << 40},
        {**good, "value": "much"},
        {**good, "module": "\ud800"},
        {"kind": "act_out", "index": None, "value": 1.0},
    ]
    records = [StepRecord(ts=0, features=(bad[0], good, bad[1])), StepRecord(ts=1, features=(*bad[2:], good))]
    encoded = encode(0, records)
    rows = pa.ipc.open_stream(encoded.body).read_all().to_pylist()

    assert [[good], [good]] == [row["features"] for row in rows]
    assert 4 == encoded.unencodable


_float32 = st.one_of(st.none(), st.floats(width=32, allow_nan=False))
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


_rows = st.lists(st.none() | st.tuples(_float32, st.integers(0, 2**62)), max_size=3)
_scalars = st.lists(st.tuples(_text, st.floats(), st.none() | _text), max_size=3)
_steps = st.none() | st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(_steps, st.none() | _rows, _scalars), min_size=1, max_size=5))
@pytest.mark.timeout(120)
def test_any_records_round_trip(record, steps):
    records = []
    for step, numbers, scalars in steps:
        rows = None if not numbers else [row and {"norm": row[0], "numel": row[1]} for row in numbers]
        entries = [PlanEntry(kind="act_in", tensor=str(i)) for i in range(len(rows or ()))]
        made = record(0, entries, rows or (), scalars=tuple(Scalar(*scalar) for scalar in scalars))
        records.append(StepRecord(ts=made.ts, step=step, statistics=made.statistics, scalars=made.scalars))

    for made, row in zip(records, _decoded(records), strict=True):
        assert made.step == row["step"]
        assert (made.statistics and made.statistics.values.to_pylist()) == row["values"]
        assert (made.statistics and made.statistics.counts.to_pylist()) == row["counts"]
        for scalar, got in zip(made.scalars, row.get("scalars", ()), strict=True):
            assert (scalar.name, scalar.unit) == (got["name"], got["unit"])
            assert _same(scalar.value, got["value"])
