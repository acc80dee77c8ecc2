"""Selection of the published statistics: for all quantities or for one, at the start or by a switch."""

from __future__ import annotations

import json
import math
import urllib.request

import pytest
import torch
from tests.exporter.parts import hooks_of, small
from tests.exporter.runs import Published, config_of, published, train

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor
from rankscope_exporter.statistics.selection import EVERY_OP, chosen_ops, op_notices, rule_notices

OPS = (*VALUE_OPS, *COUNT_OPS)


def ops_by_kind(found: Published) -> dict[tuple[int, str], set[str]]:
    """Return the names of the statistics that are not null, by step and kind."""
    ops: dict[tuple[int, str], set[str]] = {}
    for row in found.rows:
        own = {name for name in OPS if row.numbers.get(name) is not None}
        assert own == ops.setdefault((row.step, row.entry.kind), own)
    return ops


@pytest.mark.parametrize(
    ("names", "expected", "notices"),
    [
        (OPS, set(OPS), 0),
        (DEFAULT_OPS, EVERY_OP, 0),
        (["min", "nans"], {"min", "nans", "numel"}, 0),
        ([], {"norm", "numel"}, 1),
        (["nrom"], {"norm", "numel"}, 1),
        (["shape", "dtype"], {"norm", "numel"}, 2),
        (["max", "shape", "dtype"], {"max", "numel"}, 1),
        (["id"], {"mean", "numel"}, 1),
    ],
)
def test_chosen_ops_always_include_numel(names, expected, notices):
    """Names without effect give one notice each."""
    assert expected == chosen_ops(names)
    assert notices == len(op_notices(names))


UNKNOWN = r"is not a statistic; the statistics are norm, .*Did you mean 'zeros'\?"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ops": ["norm", "zeroes"]}, UNKNOWN),
        ({"options": {"gradients": {"ops": ["max", "zero"]}}}, UNKNOWN),
        ({"ops": "norm"}, r"ops must be a list of names, .*write \['norm'\]"),
        ({"options": {"gradients": {"ops": "norm"}}}, "ops must be a list of statistics"),
        ({"options": {"linear": {"ops": ["norm"]}}}, "options.linear.ops has no effect"),
    ],
)
def test_invalid_ops_are_rejected(settings, text):
    with pytest.raises(ConfigError, match=text):
        config_of("gradients", "linear", **settings)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usual(3)
def test_single_selected_op_is_published_and_others_are_null(op):
    net, optimizer = small()
    with Monitor(config_of("parameters", "activations", ops=[op])).attach(net, optimizer) as monitor:
        train(net, optimizer)
        rows = published(monitor).rows
        page = urllib.request.urlopen(f"{monitor.address}/metrics", timeout=10).read().decode()
    wanted = {op, "numel"} | ({f"{op}_baseline"} & set(BASELINE_OPS))

    assert {"param_before", "param_after", "act_in", "act_out"} <= {row.entry.kind for row in rows}
    for row in rows:
        assert wanted == {name for name, value in row.numbers.items() if value is not None}
    shown = {
        line.partition('op="')[2].partition('"')[0] for line in page.splitlines() if line.startswith("rankscope_tensor")
    }
    assert shown <= wanted
    assert (op in shown) == (op in ("norm", "mean", "nans", "infs"))  # the ops that rules judge


def test_ops_of_a_quantity_override_the_ops_of_the_monitor():
    net, optimizer = small()
    config = config_of("parameters", "gradients", ops=["mean", "zeros"], options={"gradients": {"ops": ["max"]}})
    with Monitor(config).attach(net, optimizer) as monitor:
        train(net, optimizer)
        found = ops_by_kind(published(monitor))

    assert {"mean", "zeros", "numel"} == found[1, "param_after"]
    assert {"max", "numel"} == found[1, "grad_reduced"]


def test_ops_without_a_valid_name_publish_norm_with_one_notice():
    net, optimizer = small()
    with Monitor(config_of("parameters", "gradients", ops=[])).attach(net, optimizer) as monitor:
        train(net, optimizer, 3)
        found = published(monitor)

    assert {3: {"norm", "numel"}} == {step: ops for (step, _), ops in ops_by_kind(found).items() if step == 3}
    (notice,) = found.notices
    assert notice.startswith("ops [] contains no statistic, so norm is published")


@pytest.mark.parametrize(
    ("rule", "ops", "missing"),
    [
        (AnomalyNan(), ["norm"], ""),
        (AnomalyNan(threshold=1.0), ["norm"], "min, max, mean"),
        (AnomalyTurbulence(threshold=1.0), ["max"], "norm, mean"),
        (AnomalyTurbulence(threshold=1.0, kinds=("exp_avg",)), ["max"], ""),  # of a kind that is not measured
    ],
)
def test_rule_without_its_ops_is_reported(rule: AnomalyRule, ops, missing):
    expected = [f"rule {rule.name} reads {missing}, which the setting ops does not publish"] if missing else []

    assert expected == rule_notices([rule], {"param_after": chosen_ops(ops)})


def test_rule_ignores_unpublished_ops_except_nan_counts():
    net, optimizer = small()
    rules = (AnomalyNan(), AnomalyTurbulence(threshold=0.5, ops=("norm",)), *RANK_RULES[2:])
    with Monitor(config_of("parameters", ops=["max"], rules=rules)).attach(net, optimizer) as monitor:
        train(net, optimizer)
        with torch.no_grad():
            net[0].bias.fill_(1000.0)
            net[2].bias[0] = math.nan
        train(net, optimizer)
        found = published(monitor)
    fired = {(event.rule, event.tensor, event.op) for event in found.events if event.type == "anomaly"}

    assert ("AnomalyNan", "2.bias", "nans") in fired
    assert {"AnomalyNan"} == {rule for rule, *_ in fired}
    assert ["rule AnomalyTurbulence reads norm, which the setting ops does not publish"] == found.notices


def test_switch_changes_ops_and_keeps_rows_hooks_and_baselines():
    net, optimizer = small()
    with Monitor(config_of("parameters", "activations")).attach(net, optimizer) as monitor:
        train(net, optimizer, 2)
        hooks = hooks_of(net)
        monitor.switch({"ops": ["norm"], "options": {"activations": {"ops": ["min"]}}})
        train(net, optimizer, 2)
        monitor.switch({})
        train(net, optimizer)
        found = published(monitor)
        assert hooks == hooks_of(net)
    ops = ops_by_kind(found)
    (first, *_) = [json.loads(event.details) for event in found.events if event.type == "switch"]

    default, norm = set(DEFAULT_OPS), {"norm", "numel"}
    assert [default, default, norm, norm, default] == [ops[step, "param_after"] for step in range(1, 6)]
    assert {"min", "numel"} == ops[4, "act_out"]
    assert 1 == len({record.statistics.plan.hash for record in found.records if record.statistics is not None})
    assert all(row.numbers["norm_baseline"] is not None for row in found.rows if row.entry.kind == "param_after")
    assert (list(DEFAULT_OPS), ["norm"]) == (first["was"]["ops"], first["now"]["ops"])
