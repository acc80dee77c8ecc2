"""The table of statistics over several steps, and the selection of the published statistics."""

import json
import math
import urllib.request

import numpy as np
import pytest
import torch
from tests.exporter.measure.kernels.conftest import CPU
from tests.exporter.parts import Published, config_of, hooks_of, published, small, train

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_exporter import Monitor
from rankscope_exporter.measure.kernels import torch_backend
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import NUMEL_ROW, HostCopy, StatisticsTable
from rankscope_exporter.records.plan import EVERY_OP, chosen_ops, op_notices, rule_notices

MAX, NUMEL = VALUE_OPS.index("max"), COUNT_OPS.index("numel")


def test_pending_and_finished_copies_are_not_changed_by_later_steps(compiled):
    """Three copies are pending, and are finished in a different order than they were created."""
    table = StatisticsTable(1, CPU, compiled=compiled)
    group = MeasureGroup([0])
    copies = []
    for step in range(3):
        group.measure([torch.full((step + 1,), float(step))], table)
        copies.append(HostCopy(table))
    results = []
    for step in (2, 0, 1):
        group.measure([torch.full((5,), 99.0)], table)
        results.append(copies[step].finish())
        HostCopy(table).finish()

    assert [(2.0, 3), (0.0, 1), (1.0, 2)] == [(one.values[MAX, 0], one.counts[NUMEL, 0]) for one in results]


def test_any_number_of_steps_needs_two_buffers(compiled):
    table = StatisticsTable(1, CPU, compiled=compiled)
    group = MeasureGroup([0])
    addresses = set()
    for _ in range(20):
        group.measure([torch.ones(3)], table)
        addresses.add(table.buffer.data_ptr())
        HostCopy(table).finish()

    assert 2 == len(addresses)


def test_growing_table_keeps_its_statistics():
    table = StatisticsTable(1, CPU)
    MeasureGroup(range(1)).measure([torch.tensor([3.0, 4.0])], table)
    early = HostCopy(table, 1)
    MeasureGroup(range(1)).measure([torch.tensor([3.0, 4.0])], table)
    table.grow(70)
    MeasureGroup(range(69, 70)).measure([torch.ones(9)], table)
    late = HostCopy(table, 70).finish()

    assert [5.0] == early.finish().values[0].tolist()
    assert [5.0, 3.0] == late.values[0, [0, 69]].tolist()
    assert [0, 69] == late.present.nonzero()[0].tolist()


def test_tensors_may_move_grow_and_return(compiled, check):
    """Addresses are kept between steps; a wrong one would read foreign memory. An absent entry has no older value."""
    table = StatisticsTable(3, CPU, compiled=compiled)
    group = MeasureGroup(range(3))
    storage = torch.randn(10_000)
    story = [
        [storage[:100], storage[100:5000], None],
        [storage[:100], storage[100:5000], None],
        [storage[:4999], storage[100:300], storage],
        [storage[:100].view(torch.int32), storage[100:300].view(torch.bfloat16), storage[:0]],
        [storage[:5000].view(50, 100).t(), storage.view(100, 100)[:, :50], None],
        [storage.view(100, 100)[:50], storage[:5000].view(50, 100).t(), None],
        [storage.view(100, 100)[:, :50], storage.view(100, 100).t(), None],
        [storage.view(100, 100).t(), storage.view(100, 100)[:, :50].t(), None],
    ]
    for tensors in story * 2:
        group.measure(tensors, table)
        finished = HostCopy(table).finish()
        for entry, tensor in enumerate(tensors):
            if tensor is None:
                assert not finished.present[entry]
                assert np.isnan(finished.values[:, entry]).all()
            else:
                check(finished, entry, tensor, ops=DEFAULT_OPS)


def test_accelerator_formula_reads_no_result():
    """Meta tensors have no values: reading one, such as with `.item()`, would raise."""
    meta = torch.device("meta")
    sizes = {10: torch.float32, 5_000_000: torch.bfloat16, 0: torch.complex64, 7: torch.int64}
    flats = [torch.empty(size, dtype=dtype, device=meta) for size, dtype in sizes.items()]
    for zero_below, rows in ((0.0, range(4)), (0.1, (3, 1, 0, 2))):
        table = StatisticsTable(4, meta, zero_below=zero_below)
        torch_backend.measure(flats, [10, 5_000_000, 3, 7], rows, table)

    assert "meta" == table.buffer[NUMEL_ROW].device.type


def test_table_created_in_inference_mode_works_in_training(compiled):
    with torch.inference_mode():
        table = StatisticsTable(1, CPU, compiled=compiled)
    MeasureGroup([0]).measure([torch.full((3,), 2.0)], table)

    assert 2.0 == HostCopy(table).finish().values[MAX, 0]


def test_kernel_that_becomes_ready_within_a_step_is_used_from_the_next() -> None:
    """Equal tensors of one step have bit-identical sums, although the two backends round differently."""
    ready = iter([None, print])
    table = StatisticsTable(1, CPU)

    assert table.decide(lambda *_: next(ready)) is None
    table.grow(9)
    assert table.is_decided
    HostCopy(table)
    assert not table.is_decided
    assert print is table.decide(lambda *_: next(ready))


OPS = (*VALUE_OPS, *COUNT_OPS)


def ops_by_kind(found: Published) -> dict[tuple[int, str], set[str]]:
    ops: dict[tuple[int, str], set[str]] = {}
    for row in found.rows:
        own = {name for name in OPS if row.numbers.get(name) is not None}
        assert own == ops.setdefault((row.step, row.entry.kind), own)
    return ops


@pytest.mark.parametrize(
    ("names", "expected", "notices"),
    [
        *((OPS, set(OPS), 0), (DEFAULT_OPS, EVERY_OP, 0), (["min", "nans"], {"min", "nans", "numel"}, 0)),
        *(([], {"norm", "numel"}, 1), (["nrom"], {"norm", "numel"}, 1), (["shape", "dtype"], {"norm", "numel"}, 2)),
        *((["max", "shape", "dtype"], {"max", "numel"}, 1), (["id"], {"mean", "numel"}, 1)),
    ],
)
def test_chosen_ops_always_include_numel(names, expected, notices):
    """Names without effect give one notice each."""
    assert expected == chosen_ops(names)
    assert notices == len(op_notices(names))


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
    lines = [line for line in page.splitlines() if line.startswith("rankscope_tensor")]
    shown = {line.partition('op="')[2].partition('"')[0] for line in lines}
    assert shown <= wanted
    assert (op in shown) == (op in ("norm", "mean", "nans", "infs"))  # the ops that rules judge


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
    assert "rule AnomalyTurbulence reads norm, which the setting ops does not publish" == found.notices[0]
    assert "rule ParamMovedBetween reads norm, min, mean, which the setting ops does not publish" == found.notices[1]


def test_switch_changes_ops_and_keeps_rows_hooks_and_baselines():
    net, optimizer = small()
    config = config_of("parameters", "activations", options={"activations": {"ops": ["max", "zeros"]}})
    with Monitor(config).attach(net, optimizer) as monitor:
        train(net, optimizer, 2)
        hooks = hooks_of(net)
        monitor.switch({"ops": [], "options": {"activations": {"ops": ["min"]}}})
        train(net, optimizer, 2)
        monitor.switch({})
        train(net, optimizer)
        found = published(monitor)
        assert hooks == hooks_of(net)
    ops = ops_by_kind(found)
    (first, *_) = [json.loads(event.details) for event in found.events if event.type == "switch"]

    default, norm = set(DEFAULT_OPS), {"norm", "numel"}
    assert [default, default, norm, norm, default] == [ops[step, "param_after"] for step in range(1, 6)]
    own = {"max", "zeros", "numel"}
    assert [own, own, {"min", "numel"}, {"min", "numel"}, own] == [ops[step, "act_out"] for step in range(1, 6)]
    assert 1 == sum("ops [] contains no statistic, so norm is published" in notice for notice in found.notices)
    assert 1 == len({record.statistics.plan.hash for record in found.records if record.statistics is not None})
    assert all(row.numbers["norm_baseline"] is not None for row in found.rows if row.entry.kind == "param_after")
    assert (list(DEFAULT_OPS), []) == (first["was"]["ops"], first["now"]["ops"])
