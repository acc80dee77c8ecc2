"""Bodies of releases whose plans do not name their ops, and of newer releases with ops that the service lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from rankscope_contract.model.schema import Plan, PlanEntry, plan_hash
from rankscope_exporter.records.step_record import NamedPlan, Statistics, StepRecord
from rankscope_exporter.serving.wire_encoder import encode
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.record_channel.decode import decode
from rankscope_ingest.record_channel.validate import PlanCache, RowContext, check

DATA = Path(__file__).parent / "data"
CONTEXT = RowContext(run="old", attempt=0, rank=1, incarnation="0123456789abcdef")
NEW_OPS = ("rms", "kurtosis")


def _rows(body: bytes, plan_text: str) -> dict[str, list[dict[str, object]]]:
    plan_id = plan_hash(plan_text)
    columns = PlanCache().add(plan_id, plan_text)
    valid = check(pa.ipc.open_stream(body).read_all(), {plan_id: columns}, CONTEXT, after=-1, first_ordinal=0)
    return {name: table.to_pylist() for name, table in decode([valid]).items()}


def test_body_of_a_release_without_named_ops_has_the_same_rows():
    """The folder was written once by that release and is never written again."""
    recorded = json.loads((DATA / "rows.json").read_text(encoding="utf-8"))
    rows = _rows((DATA / "body.arrows").read_bytes(), (DATA / "plan.json").read_text(encoding="utf-8"))
    read = json.loads(json.dumps(rows, default=str))

    assert [dict.fromkeys(NEW_OPS) | row for row in recorded["tensor_stats"]] == read["tensor_stats"]
    assert [repr(row) for row in recorded["scalars"]] == [repr(row) for row in read["scalars"]]
    assert recorded["events"] == read["events"]


def test_body_of_a_newer_release_keeps_known_ops_and_drops_others():
    plan = Plan((PlanEntry(kind="param_before", tensor="w"),), ("skew", "rms", "norm"), ("ones", "numel"))
    statistics = Statistics(NamedPlan.of(plan), pa.array([9.0, 2.0, 3.0], pa.float32()), pa.array([7, 5]))
    (row,) = _rows(encode(0, [StepRecord(ts=0, step=1, statistics=statistics)]).body, plan.to_json())["tensor_stats"]

    assert {"rms": 2.0, "norm": 3.0, "numel": 5} == {op: row[op] for op in ("rms", "norm", "numel")}
    assert {None} == {row[op] for op in ("min", "kurtosis", "nans", "norm_baseline")}
    assert not {"skew", "ones"} & set(row)


@pytest.mark.parametrize("names", [["norm", "norm"], ["norm", 1], 5])
def test_plan_with_invalid_op_names_is_rejected(names):
    text = json.dumps(json.loads(Plan(()).to_json()) | {"value_ops": names})
    with pytest.raises(DecodeError, match="not a plan"):
        PlanCache().add(plan_hash(text), text)
