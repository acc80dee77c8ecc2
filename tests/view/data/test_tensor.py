"""The chart and the numbers of one tensor equal SQL: each rank, baseline, limit and firings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import MAIN, append, rows

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_view.data.curves import Axis, CurveRequest, Role, Smoothing
from rankscope_view.data.tensor import (
    Limit,
    _configured,
    allowed_range,
    firing_groups,
    tensor_curve,
    tensor_detail,
    total_gradient_norm,
)

TENSOR, KIND = "layers.1.mlp.down_proj.weight", "grad_unreduced"
REQUEST = CurveRequest(axis=Axis.ARRIVAL, smoothing=Smoothing.NONE)


@pytest.fixture(scope="module")
def detail(connection):
    return tensor_detail(connection, MAIN, KIND, "norm", TENSOR)


@pytest.fixture(scope="module")
def drawn(connection, detail):
    return tensor_curve(connection, MAIN, detail, REQUEST)


def test_each_rank_has_its_line_and_the_first_to_fire_is_the_subject(connection, drawn):
    lines = {line.label: line for line in drawn.lines}
    assert Role.SUBJECT is lines["rank 1"].role

    for rank in (0, 1):
        expected = connection.query(
            "SELECT norm FROM tensor_stats WHERE run = $run AND kind = $kind AND tensor = $tensor AND rank = $rank "
            "AND norm IS NOT NULL ORDER BY attempt, step",
            {"run": MAIN, "kind": KIND, "tensor": TENSOR, "rank": rank},
        )["norm"].to_pylist()
        values = lines[f"rank {rank}"].value
        assert expected == values[np.isfinite(values)].tolist()


def test_baseline_and_limit_are_lines(connection, drawn, detail):
    lines = {line.role: line for line in drawn.lines}
    (stored,) = set(
        connection.query(
            "SELECT norm_baseline FROM tensor_stats WHERE run = $run AND kind = $kind AND tensor = $tensor",
            {"run": MAIN, "kind": KIND, "tensor": TENSOR},
        )["norm_baseline"].to_pylist()
    )
    levels = {role: set(lines[role].value[np.isfinite(lines[role].value)]) for role in (Role.BASELINE, Role.LIMIT)}

    assert Limit(high=4.0) == detail.limit
    assert {Role.BASELINE: {stored}, Role.LIMIT: {4 * stored}} == levels


def test_firings_are_on_the_line_of_their_rank(connection, drawn):
    expected = connection.query(
        "SELECT step, op FROM events WHERE run = $run AND type = 'anomaly' AND tensor = $tensor ORDER BY step",
        {"run": MAIN, "tensor": TENSOR},
    ).to_pylist()
    line = next(one for one in drawn.lines if one.role is Role.SUBJECT)
    values = dict(zip(line.x.tolist(), line.value.tolist(), strict=True))
    placed = [one for one in drawn.firings if one.value is not None]

    assert [values[one.x] for one in placed] == [one.value for one in placed]
    assert [row["step"] for row in expected if row["op"] == "norm"] == sorted(one.step for one in placed)
    assert len(expected) == len(drawn.firings)


def test_firing_of_another_rank_is_on_the_line_of_that_rank(connection, detail):
    fired = next(one for one in detail.firings if one["op"] == "norm")
    other = replace(detail, firings=(*detail.firings, fired | {"rank": 0, "value": 1e9}))
    drawn = tensor_curve(connection, MAIN, other, REQUEST)
    line = next(one for one in drawn.lines if one.label == "rank 0")
    values = dict(zip(line.x.tolist(), line.value.tolist(), strict=True))

    assert values[drawn.firings[-1].x] == drawn.firings[-1].value


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


def test_limit_is_known_from_the_configuration_without_a_firing():
    rule = {
        "rule_name": "AnomalyTurbulence",
        "args": {"threshold": 24.0, "direction": "both", "ops": ["norm"], "kinds": None},
    }
    config = json.dumps({"rules": [rule]})

    assert 24.0 == _configured(config, KIND, "norm")["threshold"]
    assert {} == _configured(config, KIND, "mean")
    for bad in (None, "[]", "not JSON", '{"rules": [1]}', '{"rules": 3}'):
        assert {} == _configured(bad, KIND, "norm")


def test_statistic_without_a_baseline_has_no_limit(connection):
    assert allowed_range(connection, MAIN, KIND, "max") is None


def test_total_gradient_norm_has_each_replica_once_and_all_shards(tmp_path):
    store = tmp_path / "store"
    with Store.open(store, create=True).claim(owner="a test") as writer:
        parts = [
            rows("tensor_stats", run="r", attempt=0, rank=rank, incarnation=f"r-{rank}", seq=[0], step=[0],
                 tensor=tensor, kind="grad_reduced", placement=placement, shard_group=group, norm=norm, numel=4)
            for rank in (0, 1)
            for tensor, placement, group, norm in (("a", "replica", None, 12.0), ("b", "shard", "0-1", 3.0 + rank))
        ]  # fmt: skip
        append(writer, tensor_stats=pa.concat_tables(parts))
    with connect(store) as connection:
        assert [13.0] == total_gradient_norm(connection, "r").value.tolist()
