"""The ring of records, the stream that encodes them, and jumps of the wall clock between them."""

import datetime as dt
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import (
    NESTED,
    WIRE_FIELDS,
    WIRE_METADATA,
    WIRE_VALUE_OPS,
    PlanEntry,
    arrow_schema,
    canonical_labels,
)
from rankscope_exporter.publish.rank_server import ClockWatch
from rankscope_exporter.publish.ring import OPTIONAL, CursorError, Ring, encode, stream
from rankscope_exporter.publish.serving_config import MIN_RING_RECORDS
from rankscope_exporter.records.record import Scalar, StepRecord

EVERYTHING = 1 << 40


def _fill(ring: Ring, records: int, **more: Any) -> Ring:
    for step in range(records):
        ring.append(encode(StepRecord(ts=step, step=step, **more)))
    return ring


def _filled(records: int, *, room: int = 1024, max_bytes: int = EVERYTHING) -> Ring:
    return _fill(Ring(room, max_bytes), records)


def _steps(ring: Ring, after: int, max_bytes: int = EVERYTHING) -> list[int | None]:
    return [record.step for record in ring.after(after, max_bytes).records]


def test_empty_ring_refuses_a_cursor_above_the_head():
    ring = Ring(8, EVERYTHING)

    assert (-1, 0, 0, 0.0) == (ring.head, ring.first, ring.uncommitted, ring.fill)
    assert () == ring.after(-1, 1).records
    with pytest.raises(CursorError, match="above the sequence number of the newest record: -1"):
        ring.after(0, 1)
    assert [0, 1, 2] == [ring.append(encode(StepRecord(ts=0))) for _ in range(3)]
    assert (2, 0, 3) == (ring.head, ring.first, len(ring))


def test_max_bytes_limits_the_window_to_at_least_one_record():
    ring = _filled(10)
    window = ring.after(-1, 3 * 256)

    assert (0, 2, 3) == (window.first, window.last, len(window.records))
    assert ([8, 9], [8]) == (_steps(ring, after=7), _steps(ring, after=7, max_bytes=1))


def test_overwritten_records_are_reported_and_counted():
    ring = _filled(12, room=8)
    window = ring.after(1, EVERYTHING)

    assert 4 == window.first  # 2 and 3 are lost
    assert list(range(4, 12)) == [record.step for record in window.records]
    assert 4 == ring.overrun
    ring.commit(9)  # its records are no loss
    _fill(ring, 8)
    assert 6 == ring.overrun


def test_committed_never_decreases_nor_exceeds_the_head():
    ring = _filled(5)
    ring.commit(3)
    ring.commit(1)
    with pytest.raises(CursorError, match="committed=5 is above the sequence number of the newest record: 4"):
        ring.commit(5)

    assert (3, 1) == (ring.committed, ring.uncommitted)


def test_byte_limit_applies_above_the_smallest_ring(statistics):
    big = statistics([PlanEntry(kind="grad_reduced", tensor=f"t{i}") for i in range(400)], [{"norm": 1.0}] * 400)
    ring = _fill(Ring(10_000, 1_000_000), MIN_RING_RECORDS + 50, statistics=big)
    small = _filled(1000, room=10_000, max_bytes=400 * 256)

    assert (MIN_RING_RECORDS, 50, 1.0) == (len(ring), ring.overrun, ring.fill)
    assert (400, 1.0) == (len(small), small.fill)
    small.commit(799)
    assert 0.5 == small.fill  # only of the records that are not overwritten


def test_plan_is_kept_while_a_record_uses_it(statistics):
    ring = Ring(300, EVERYTHING)
    plans = []
    for step in range(400):
        numbers = statistics([PlanEntry(kind="act_out", tensor=f"t{step}")], [{"norm": 1.0}])
        plans.append(numbers.plan.hash)
        ring.append(encode(StepRecord(ts=step, statistics=numbers)))

    assert all(ring.plan(plan) is not None for plan in plans[-300:])
    assert ring.plan(plans[0]) is None


_operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("fetch"), st.integers(1, 5 * 256)),
        st.tuples(st.just("commit"), st.floats(0, 1)),
    ),
    max_size=80,
)


@given(_operations)
def test_each_record_is_delivered_once_or_reported_as_lost(operations):
    """A reader that commits only received records can account for each record."""
    ring = Ring(5, EVERYTHING)
    published = 0
    cursor = -1
    delivered: list[int | None] = []
    lost: list[int] = []
    committed = -1
    overwritten_uncommitted = 0

    for name, argument in [*operations, ("fetch", EVERYTHING)]:
        if name == "append":
            for _ in range(argument):
                if published - 5 > committed and published >= 5:
                    overwritten_uncommitted += 1
                assert published == ring.append(encode(StepRecord(ts=0, step=published)))
                published += 1
        elif name == "fetch":
            window = ring.after(cursor, argument)
            lost += range(cursor + 1, window.first)
            delivered += [record.step for record in window.records]
            cursor = window.last
        else:
            committed = max(committed, int(argument * (cursor + 1)) - 1)
            ring.commit(committed)

    assert list(range(published)) == sorted([*delivered, *lost])
    assert delivered == sorted(delivered)
    assert overwritten_uncommitted == ring.overrun
    assert min(5, published - 1 - committed) == ring.uncommitted


EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _decoded(records, first=0):
    return pa.ipc.open_stream(stream(first, list(map(encode, records)))).read_all().to_pylist()


def _timestamp(microseconds):
    return EPOCH + dt.timedelta(microseconds=microseconds)


def _same(left, right):
    """Return whether two numbers or nulls are equal; NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(left, float) and isinstance(right, float):
        return left.hex() == right.hex()
    return left == right


def test_schema_is_that_of_the_contract_without_datasets_without_rows():
    records = [encode(StepRecord(ts=0)), encode(StepRecord(ts=1, scalars=(Scalar("loss", 0.5),)))]
    lean, whole = (pa.ipc.open_stream(stream(0, records, names)).read_all() for names in ((), OPTIONAL))

    assert arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA).equals(whole.schema, check_metadata=True)
    assert ["seq", "step", "micro_step", "ts", "plan", "values", "counts", "scalars"] == lean.column_names
    assert lean.equals(whole.select(lean.column_names), check_metadata=True)
    assert [None, None] == whole["clock_offset"].to_pylist()
    more = set(whole.column_names).difference(lean.column_names, ["clock_offset"])
    assert {0} == {len(rows) for name in more for rows in whole[name]}


def test_body_is_lz4_compressed_and_has_an_end_mark(record):
    numbers = [{"norm": 1.0}] * 1000
    entries = [PlanEntry(kind="grad_reduced", tensor=f"t{i}") for i in range(1000)]
    body = stream(0, [encode(record(1, entries, numbers))]).to_pybytes()

    assert len(body) < 1000 * 4 * len(WIRE_VALUE_OPS) // 2
    assert body.endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")


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
    return {field.name: None for field in NESTED[dataset]} | row


_float32 = st.one_of(st.none(), st.floats(width=32, allow_nan=False))
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


_rows = st.lists(st.none() | st.tuples(_float32, st.integers(0, 2**62)), max_size=3)
_labels = st.dictionaries(_text, _text, max_size=2)
_scalars = st.lists(st.tuples(_text, st.floats(), st.none() | _text, _labels), max_size=3)
_sent_steps = st.none() | st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(_sent_steps, st.none() | _rows, _scalars), min_size=1, max_size=5))
@pytest.mark.timeout(120)
def test_any_records_round_trip(record, steps):
    records = []
    for step, numbers, scalars in steps:
        rows = None if not numbers else [row and {"norm": row[0], "numel": row[1]} for row in numbers]
        entries = [PlanEntry(kind="act_in", tensor=str(i)) for i in range(len(rows or ()))]
        made = record(0, entries, rows or (), scalars=tuple(Scalar(*scalar) for scalar in scalars))
        records.append(replace(made, step=step, micro_step=2, clock_offset=-5))

    for seq, (made, row) in enumerate(zip(records, _decoded(records, first=41), strict=True), start=41):
        own = [row[name] for name in ("seq", "step", "micro_step", "ts", "clock_offset")]
        assert [seq, made.step, 2, _timestamp(made.ts), -5] == own
        numbers = made.statistics or SimpleNamespace(plan=None, values=None, counts=None)
        assert (numbers.plan and numbers.plan.hash) == row["plan"]
        assert repr(numbers.values and numbers.values.to_pylist()) == repr(row["values"])  # -0.0 is not 0.0
        assert (numbers.counts and numbers.counts.to_pylist()) == row["counts"]
        for scalar, got in zip(made.scalars, row.get("scalars", ()), strict=True):
            wanted = (scalar.name, scalar.unit, canonical_labels(scalar.labels))
            assert wanted == (got["name"], got["unit"], got["labels"])
            assert _same(scalar.value, got["value"])


SECOND = 1_000_000
START = 1_700_000_000 * SECOND
HOUR, DAYS = 3600 * SECOND, 40 * 86400 * SECOND


def watched(*records: StepRecord) -> list[StepRecord]:
    watch = ClockWatch(START, 0)
    return [watch.corrected(record) for record in records]


def record(seconds: float, offset: int = 0) -> StepRecord:
    """Return a record of `seconds` after the start, by a clock that was set forward by `offset` microseconds."""
    monotonic = round(seconds * SECOND)
    return StepRecord(ts=START + monotonic + offset, monotonic=monotonic)


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAYS, DAYS])
def test_jump_is_named_once_and_removed_from_all_later_records(jump):
    before, first, second = watched(record(1), record(2, jump), record(3, jump))
    (event,) = first.events

    assert (0, jump, jump) == (before.clock_offset, first.clock_offset, second.clock_offset)
    assert ([], []) == (before.events, second.events)
    assert (EventType.CLOCK, jump / SECOND) == (event.type, event.value)
    assert ("forward" if jump > 0 else "back") in event.message
    assert jump == json.loads(str(event.details))["offset_us"]
    assert START + 2 * SECOND + jump == first.ts  # stored times do not change


def test_jumps_add_up_and_records_without_a_monotonic_time_are_corrected():
    records = watched(record(1, HOUR), StepRecord(ts=START), record(2, HOUR - 5 * SECOND), record(3))

    assert [HOUR, HOUR, HOUR - 5 * SECOND, 0] == [one.clock_offset for one in records]


def test_clock_that_is_corrected_slowly_has_not_jumped():
    records = [record(second, second * 19 * SECOND // 10) for second in range(20)]

    assert records == watched(*records)


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAYS, DAYS])
def test_late_record_from_before_a_jump_does_not_name_the_jump_again(jump):
    records = watched(record(1), record(2.1, jump), record(2), record(1.5), record(3, jump))

    assert [0, 1, 0, 0, 0] == [len(one.events) for one in records]
    assert [1, 2.1, 2, 1.5, 3] == [(one.ts - one.clock_offset - START) / SECOND for one in records]
    assert [0, *[jump] * 4] == [one.clock_offset for one in records]
