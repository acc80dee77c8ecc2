"""Tests of fields, plans and their Arrow schemas."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.fields import arrow_schema
from rankscope_contract.model.kinds import BASELINE_OPS, CAUSAL_STAGE, COUNT_OPS, JUDGED_OPS, VALUE_OPS, Kind
from rankscope_contract.model.schema import (
    DATASETS,
    NESTED,
    TENSOR_ROW_KEY,
    WIRE_FIELDS,
    Plan,
    PlanEntry,
    canonical_labels,
    plan_hash,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.none() | st.integers(0, 1 << 40)
entries = st.builds(
    PlanEntry,
    kind=st.sampled_from(list(Kind)).map(str),
    tensor=text,
    index=number,
    vpp_stage=number,
    call_seq=number,
    placement=st.sampled_from(["full", "shard", "partial", "replica"]),
    shard_group=st.none() | text,
    dtype=text,
    shape=st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    module=st.none() | text,
    aliases=st.lists(text, max_size=3).map(tuple),
)


@given(st.lists(entries, max_size=6).map(tuple).map(Plan))
def test_plan_is_unchanged_after_a_json_round_trip(plan):
    read = Plan.from_json(plan.to_json())

    assert plan == read
    assert plan.hash == read.hash == plan_hash(plan.to_json())


@given(st.lists(entries, max_size=4).map(lambda some: Plan((*some, *some))))
def test_text_of_a_plan_has_sorted_keys_and_no_spaces(plan):
    document = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(plan)}

    assert json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False) == plan.to_json()


def test_plan_hash_is_equal_in_every_process():
    """Ranks and the service compute the hash in different processes, in which Python has different hash seeds."""
    plan = Plan((PlanEntry(kind="grad_reduced", tensor="学习.weight", shape=(2, 3)),))
    script = (
        "from rankscope_contract.model.schema import Plan, PlanEntry;"
        "print(Plan((PlanEntry(kind='grad_reduced', tensor='学习.weight', shape=(2, 3)),)).hash)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert plan.hash == printed.strip()
    assert 32 == len(plan.hash)


def test_unknown_keys_of_a_newer_plan_are_ignored():
    document = {"schema_version": 9, "entries": [{"kind": "act_out", "tensor": "a", "colour": "red"}], "more": 1}

    assert Plan((PlanEntry(kind="act_out", tensor="a"),)) == Plan.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": 1}', '{"entries": [1]}', '{"entries": [{}]}'])
def test_invalid_plan_is_rejected(text):
    with pytest.raises(ValueError):
        Plan.from_json(text)


@pytest.mark.parametrize("fields", [*DATASETS.values(), WIRE_FIELDS], ids=[*DATASETS, "wire"])
def test_every_schema_is_valid_in_arrow_and_has_unique_names(fields):
    schema = arrow_schema(pa, fields)

    assert [field.name for field in fields] == schema.names
    assert len(set(schema.names)) == len(schema.names)


def test_columns_keys_and_stages_agree():
    schema = arrow_schema(pa, DATASETS["tensor_stats"])

    assert {pa.float32()} == {schema.field(op).type for op in (*VALUE_OPS, *BASELINE_OPS)}
    assert {pa.int64()} == {schema.field(op).type for op in COUNT_OPS}
    assert BASELINE_OPS == tuple(f"{op}_baseline" for op in JUDGED_OPS)
    assert set(TENSOR_ROW_KEY) <= set(schema.names)
    assert set(Kind) == set(CAUSAL_STAGE)
    for name, fields in NESTED.items():
        assert {field.name for field in fields} <= {field.name for field in DATASETS[name]}


@given(st.dictionaries(text, text, min_size=1, max_size=4))
def test_label_text_does_not_depend_on_the_order_of_labels(labels):
    backwards = dict(reversed(labels.items()))

    assert canonical_labels(labels) == canonical_labels(backwards)
    assert labels == json.loads(canonical_labels(labels))
    assert None is canonical_labels({}) is canonical_labels(None)
