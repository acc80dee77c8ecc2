"""Selection of the published statistics: for all quantities or for one, at the start or by a switch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.statistics.selection import EVERY_OP, chosen_ops, op_notices, rule_notices

OPS = (*VALUE_OPS, *COUNT_OPS)


def net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def config_of(**settings: Any) -> MonitorConfig:
    return MonitorConfig(console=False, exit_wait_seconds=0, **settings)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (OPS, set(OPS)),
        (DEFAULT_OPS, EVERY_OP),
        (["norm"], {"norm", "numel"}),
        (["min", "nans"], {"min", "nans", "numel"}),
        ([], {"norm", "numel"}),
        (["nrom"], {"norm", "numel"}),
        (["shape", "dtype"], {"norm", "numel"}),
        (["max", "shape", "dtype"], {"max", "numel"}),
        (["id"], {"mean", "numel"}),
    ],
)
def test_chosen_ops_always_include_numel(names, expected):
    assert expected == chosen_ops(names)


@pytest.mark.parametrize(("names", "count"), [(OPS, 0), (["norm"], 0), ([], 1), (["nrom"], 1), (["max", "dtype"], 1)])
def test_ops_without_effect_give_one_notice_each(names, count):
    assert count == len(op_notices(names))


@pytest.mark.parametrize(
    "settings", [{"ops": ["norm", "zeroes"]}, {"options": {"gradients": {"ops": ["max", "zero"]}}}]
)
def test_unknown_op_is_rejected_with_the_nearest_name(settings):
    with pytest.raises(ConfigError, match=r"is not a statistic; the statistics are norm, .*Did you mean 'zeros'\?"):
        config_of(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ops": "norm"}, r"ops must be a list of names, .*write \['norm'\]"),
        ({"options": {"gradients": {"ops": "norm"}}}, "ops must be a list of statistics"),
        ({"quantities": ["linear"], "options": {"linear": {"ops": ["norm"]}}}, "options.linear.ops has no effect"),
    ],
)
def test_invalid_ops_are_rejected(settings, text):
    with pytest.raises(ConfigError, match=text):
        config_of(**settings)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usual(3)
def test_single_selected_op_is_published_and_others_are_null(op, reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of(quantities=("parameters", "activations"), ops=[op])).attach(net, optimizer) as monitor:
        train(net, optimizer)
        monitor.end_step()
        rows = eventually(reader(monitor).rows)
        page = eventually(lambda: reader(monitor).get("/metrics").decode())
    wanted = {op, "numel"} | ({f"{op}_baseline"} & set(BASELINE_OPS))

    assert {"param_before", "param_after", "act_in", "act_out"} <= {row.kind for row in rows}
    for row in rows:
        assert wanted == {name for name, value in row.numbers.items() if value is not None}
    shown = {
        line.partition('op="')[2].partition('"')[0] for line in page.splitlines() if line.startswith("rankscope_tensor")
    }
    assert shown <= wanted
    assert (op in shown) == (op in ("norm", "mean", "nans", "infs"))  # the ops that rules judge


def test_ops_of_a_quantity_override_the_ops_of_the_monitor(reader, eventually):
    net, optimizer = net_and_optimizer()
    config = config_of(
        quantities=("parameters", "gradients"), ops=["mean", "zeros"], options={"gradients": {"ops": ["max"]}}
    )
    with Monitor(config).attach(net, optimizer) as monitor:
        train(net, optimizer)
        monitor.end_step()
        rows = eventually(reader(monitor).rows)
    by_kind = {row.kind: {name for name in OPS if row.numbers.get(name) is not None} for row in rows}

    assert {"mean", "zeros", "numel"} == by_kind["param_after"]
    assert {"max", "numel"} == by_kind["grad_reduced"]


def notes(read: Any) -> list[str]:
    return [event["message"] for event in read.events() if event["type"] == "note"]


def test_ops_without_a_valid_name_publish_norm_with_one_notice(reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of(quantities=("parameters", "gradients"), ops=[])).attach(net, optimizer) as monitor:
        read = reader(monitor)
        train(net, optimizer, 3)
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 3 and found)
        notices = notes(read)

    assert {"norm", "numel"} == {name for row in rows for name in OPS if row.numbers.get(name) is not None}
    assert 1 == len(notices)
    assert notices[0].startswith("ops [] contains no statistic, so norm is published")


@pytest.mark.parametrize(
    ("rule", "ops", "missing"),
    [
        (AnomalyNan(), ["norm"], ""),
        (AnomalyNan(threshold=1.0), ["norm"], "min, max, mean"),
        (AnomalyTurbulence(threshold=1.0), ["max"], "norm, mean"),
        (AnomalyTurbulence(threshold=1.0), ["norm"], "mean"),
        (AnomalyTurbulence(threshold=1.0, kinds=("exp_avg",)), ["max"], ""),  # of a kind that is not measured
    ],
)
def test_rule_without_its_ops_is_reported(rule: AnomalyRule, ops, missing):
    expected = [f"rule {rule.name} reads {missing}, which the setting ops does not publish"] if missing else []

    assert expected == rule_notices([rule], {"param_after": chosen_ops(ops)})


def test_rule_ignores_unpublished_ops_except_nan_counts(reader, eventually):
    net, optimizer = net_and_optimizer()
    rules = (AnomalyNan(), AnomalyTurbulence(threshold=0.5, ops=("norm",)), *RANK_RULES[2:])
    config = replace(config_of(quantities=("parameters",), ops=["max"]), rules=rules)
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        train(net, optimizer)
        with torch.no_grad():
            net[0].bias.fill_(1000.0)
            net[1].bias[0] = math.nan
        train(net, optimizer)
        monitor.end_step()
        eventually(lambda: (found := read.rows()) and found[-1].step == 2)
        events = [event for event in read.events() if event["type"] == "anomaly"]
        notices = notes(read)

    assert {("AnomalyNan", "1.bias", "nans")} <= {(e["rule"], e["tensor"], e["op"]) for e in events}
    assert {"AnomalyNan"} == {event["rule"] for event in events}
    assert ["rule AnomalyTurbulence reads norm, which the setting ops does not publish"] == notices


def test_switch_changes_ops_and_keeps_rows_hooks_and_baselines(reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of(quantities=("parameters", "activations"))).attach(net, optimizer) as monitor:
        read = reader(monitor)
        train(net, optimizer, 2)
        hooks = count_hooks(net)
        monitor.switch({"ops": ["norm"], "options": {"activations": {"ops": ["min"]}}})
        train(net, optimizer, 2)
        monitor.switch({})
        train(net, optimizer)
        monitor.end_step()
        assert hooks == count_hooks(net)
        records = eventually(lambda: (found := read.records()) and found[-1]["step"] == 5 and found)
        published = {
            (row.step, row.kind): {name for name in OPS if row.numbers.get(name) is not None} for row in read.rows()
        }
        last = [row for row in read.rows() if (row.step, row.kind) == (5, "param_after")]
        (first, *_) = [json.loads(event["details"]) for event in read.events() if event["type"] == "switch"]

    default = set(DEFAULT_OPS)
    assert [default, default, {"norm", "numel"}, {"norm", "numel"}, default] == [
        published[step, "param_after"] for step in range(1, 6)
    ]
    assert {"min", "numel"} == published[4, "act_out"]
    assert 1 == len({record["plan"] for record in records if record["plan"]} - {records[0]["plan"]}) or (
        {records[0]["plan"]} == {record["plan"] for record in records if record["plan"]}
    )
    assert all(row.numbers["norm_baseline"] is not None for row in last)
    assert (list(DEFAULT_OPS), ["norm"]) == (first["was"]["ops"], first["now"]["ops"])


def count_hooks(net: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules())
