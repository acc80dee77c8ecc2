"""The chart and the numbers of one tensor equal SQL: each rank, baseline, limit and firings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import MAIN, rows, run_row

from rankscope_view.data.curves import Axis, CurveRequest, Role, Smoothing
from rankscope_view.data.tensor import Limit, allowed_range, firing_groups, tensor_curve, tensor_detail
from rankscope_view.data.tensor import total_gradient_norm as gradient_norm

TENSOR, KIND = "layers.1.mlp.down_proj.weight", "grad_unreduced"
REQUEST = CurveRequest(axis=Axis.ARRIVAL, smoothing=Smoothing.NONE)


@pytest.fixture(scope="module")
def detail(connection):
    return tensor_detail(connection, MAIN, KIND, "norm", TENSOR)


@pytest.fixture(scope="module")
def drawn(connection, detail):
    return tensor_curve(connection, MAIN, detail, REQUEST)


def test_lines_of_ranks_baseline_and_limit_equal_sql(connection, drawn, detail):
    lines, roles = ({getattr(line, name): line for line in drawn.lines} for name in ("label", "role"))
    stored = connection.query(
        "SELECT rank, list(norm ORDER BY attempt, step) FILTER (norm IS NOT NULL) AS norms, "
        "any_value(norm_baseline) AS baseline FROM tensor_stats WHERE run = $run AND kind = $kind AND tensor = $tensor "
        "GROUP BY rank",
        {"run": MAIN, "kind": KIND, "tensor": TENSOR},
    ).to_pylist()
    levels = {role: set(roles[role].value[np.isfinite(roles[role].value)]) for role in (Role.BASELINE, Role.LIMIT)}

    assert {f"rank {row['rank']}": row["norms"] for row in stored} == {
        label: line.value[np.isfinite(line.value)].tolist() for label, line in lines.items() if "rank" in str(label)
    }
    assert Role.SUBJECT is lines["rank 1"].role, "the first to fire"
    assert Limit(high=4.0) == detail.limit
    assert {Role.BASELINE: {stored[0]["baseline"]}, Role.LIMIT: {4 * stored[0]["baseline"]}} == levels


def test_firings_are_on_the_line_of_their_rank(connection, drawn, detail):
    expected = connection.query(
        "SELECT step, op FROM events WHERE run = $run AND type = 'anomaly' AND tensor = $tensor ORDER BY step",
        {"run": MAIN, "tensor": TENSOR},
    ).to_pylist()
    fired = next(one for one in detail.firings if one["op"] == "norm") | {"rank": 0, "value": 1e9}
    other = tensor_curve(connection, MAIN, replace(detail, firings=(*detail.firings, fired)), REQUEST)
    lines = {line.label: dict(zip(line.x.tolist(), line.value.tolist(), strict=True)) for line in other.lines}
    placed = [one for one in drawn.firings if one.value is not None]

    assert [lines["rank 1"][one.x] for one in placed] == [one.value for one in placed]
    assert [row["step"] for row in expected if row["op"] == "norm"] == sorted(one.step for one in placed)
    assert len(expected) == len(drawn.firings)
    assert lines["rank 0"][other.firings[-1].x] == other.firings[-1].value


def test_firings_of_a_rule_at_consecutive_steps_are_one_group():
    fired = {"attempt": 0, "rank": 1, "rule": "A", "severity": "warning", "op": "norm", "baseline": 2.0}
    steps = {200: 4.0, 102: 3.0, 101: 9.0, 100: 5.0}
    found = firing_groups([fired | {"step": step, "value": value} for step, value in steps.items()])

    assert [(100, 102, 3, 4.5, 101), (200, 200, 1, 2.0, 200)] == [
        (one.first, one.last, one.times, one.ratio, one.step) for one in found
    ]


def test_newest_values_of_all_ranks_equal_sql(connection, detail):
    expected = connection.query(
        "SELECT rank, arg_max(norm, (attempt, step)) AS value, max(norm) AS highest, sum(nans) AS nans "
        "FROM tensor_stats WHERE run = $run AND kind = $kind AND tensor = $tensor GROUP BY rank ORDER BY rank",
        {"run": MAIN, "kind": KIND, "tensor": TENSOR},
    ).to_pylist()

    assert expected == [{name: row[name] for name in ("rank", "value", "highest", "nans")} for row in detail.ranks]


def test_curve_of_one_attempt_is_on_the_axis_of_steps(connection, detail):
    found = tensor_curve(connection, MAIN, detail, CurveRequest(axis=Axis.ATTEMPT, smoothing=Smoothing.NONE), attempt=1)

    assert found.lines[0].x.tolist() == found.lines[0].step.tolist()
    assert all(np.diff(found.lines[0].x) > 0)


def test_limit_is_known_from_the_configuration_without_a_firing(connection, opened):
    arguments = {"threshold": 24.0, "direction": "both", "ops": ["norm"], "kinds": None}
    config = json.dumps({"rules": [{"rule_name": "AnomalyTurbulence", "args": arguments}]})
    bad = [None, "[]", "not JSON", '{"rules": [1]}', '{"rules": 3}']
    states = [run_row(f"r{at}", "completed", config=text) for at, text in enumerate([config, *bad])]
    store = opened(runs=pa.concat_tables(states))

    assert Limit(high=25.0, low=0.04) == allowed_range(store, "r0", KIND, "norm")
    places = [("r0", "mean"), *((f"r{at}", "norm") for at in range(1, 6))]
    assert {None} == {allowed_range(store, run, KIND, op) for run, op in places}
    assert allowed_range(connection, MAIN, KIND, "max") is None, "a statistic without a baseline"


def test_total_gradient_norm_has_each_replica_once_and_all_shards(opened):
    known = {"run": "r", "attempt": 0, "seq": [0], "step": [0], "kind": "grad_reduced", "numel": 4}
    parts = []
    for rank in (0, 1):
        own = known | {"rank": rank, "incarnation": f"r-{rank}"}
        parts.append(rows("tensor_stats", **own, tensor="a", placement="replica", norm=12.0))
        parts.append(rows("tensor_stats", **own, tensor="b", placement="shard", shard_group="0-1", norm=3.0 + rank))

    assert [13.0] == gradient_norm(opened(tensor_stats=pa.concat_tables(parts)), "r").value.tolist()
