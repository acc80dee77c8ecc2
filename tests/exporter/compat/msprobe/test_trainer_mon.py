"""Tests of `TrainerMon`: the calls of msprobe scripts work, and none of them disturbs training."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.compat.msprobe.monitored_runs import (
    LONG_SECONDS,
    QUIET,
    Run,
    adam,
    batch,
    left,
    model,
    train,
    write,
)
from tests.exporter.parts import session_of
from torch import nn
from torch.distributed.pipelining import PipelineStage

import rankscope
from rankscope_exporter import ConfigError
from rankscope_exporter.adapters import framework_of
from rankscope_exporter.api import session
from rankscope_exporter.compat.msprobe import TrainerMon

EVERYTHING = {"wg_distribution": True, "xy_distribution": True, "ops": ["norm", "nans"]}


def test_trainer_mon_is_exported_by_the_package():
    assert TrainerMon is rankscope.TrainerMon


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group that contains this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def attached(folder: Path, *arguments: Any, net: nn.Module, construction: tuple[Any, ...] = (), **document: Any) -> Run:
    """Train two steps under a monitor that is attached with `arguments`."""
    path = write(folder / "monitor_config.json", {**QUIET, "format": "api", "wg_distribution": True, **document})
    monitor = TrainerMon(path, *construction)
    monitor.set_monitor(*arguments)
    optimizer = next(item for item in arguments if hasattr(item, "step"))
    for _ in range(2):
        net(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.monitor is not None
    return left(monitor.monitor, net, folder, monitor.faults)


def test_both_argument_orders_attach(tmp_path, group):
    for as_in_the_manual in (True, False):
        net = model()
        optimizer = adam(net)
        manual, code = (net, 1, optimizer, group, None, 10), (net, optimizer, 1, None, group, 10)
        run = attached(tmp_path, *(manual if as_in_the_manual else code), net=net)

        assert [11, 12] == run.steps(), "the tool's steps 10 and 11"
        assert 0 == run.faults


def test_single_chunk_list_and_wrapped_optimizer_are_accepted(tmp_path):
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

        def zero_grad(self) -> None:
            self.optimizer.zero_grad()

    net = model()
    run = attached(tmp_path, [net], Wrapper(adam(net)), net=net, mv_distribution=True)

    assert {"exp_avg", "exp_avg_sq"} <= run.kinds()
    assert 0 == run.faults


def test_chunks_of_a_virtual_pipeline_are_monitored_together(tmp_path, monkeypatch):
    """A substitute for Megatron's wrapper marks the chunks; `make test-frameworks` uses the real one."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    fake = types.ModuleType("megatron.core.distributed.distributed_data_parallel")
    fake.DistributedDataParallel = DistributedDataParallel
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    chunks = [DistributedDataParallel(nn.Linear(3, 3)) for _ in range(2)]
    monitor = TrainerMon(write(tmp_path / "c.json", {**QUIET, "param_distribution": True}))
    monitor.set_monitor(chunks, optimizer=adam(nn.ModuleList(chunks)))

    assert monitor.monitor is not None
    session = session_of(monitor.monitor)
    assert {0, 1} == {session.monitored.framework.vpp_stage(item.parameter) for item in session.monitored.parameters}
    monitor.detach()


def test_first_of_several_models_is_monitored_with_a_remark(tmp_path):
    net = model()
    optimizer = adam(net)
    run = attached(tmp_path, [net, nn.Linear(2, 2)], optimizer, net=net)

    assert [1, 2] == run.steps("grad_reduced")
    (said,) = run.said()
    assert "the 2 models are no chunks" in said


def test_wrong_hints_are_reported_once_and_change_no_number(tmp_path):
    net = model()
    optimizer = adam(net)
    run = attached(tmp_path, net, optimizer, net=net, construction=(None, True, "Megatron_DistributedOptimizer"))

    assert [
        "params_have_main_grad=True, but no parameter has a main_grad: gradients are read from .grad",
        "opt_ty='Megatron_DistributedOptimizer', but the optimizer is a AdamW, and is read as one",
    ] == run.said()
    assert [1, 2] == run.steps("grad_reduced")


def test_attach_errors_are_raised_before_training(tmp_path):
    monitor = TrainerMon(write(tmp_path / "c.json", {**QUIET, "wg_distribution": True}))
    with pytest.raises(ConfigError, match="set_monitor needs the optimizer"):
        monitor.set_monitor(model())
    assert monitor.monitor is None


def test_old_names_work_with_one_deprecation_line_each(tmp_path):
    net = model()
    optimizer = adam(net)
    monitor = TrainerMon(write(tmp_path / "c.json", {**QUIET, "format": "api", "wg_distribution": True}))
    for _ in range(2):
        monitor.set_wrapped_optimizer(optimizer)
    monitor.monitor_gnorm_with_ad(net, 1, None, None, None, 0)
    for step in range(4):
        net(batch()).square().mean().backward()
        if step % 2:
            monitor.reload_xy(xy_distribution=step == 1)
        else:
            monitor.ops = ["min"]
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.monitor is not None
    run = left(monitor.monitor, net, tmp_path, monitor.faults)
    deprecated = [sentence.partition(" is deprecated: ")[0] for sentence in run.said()]

    assert ["set_wrapped_optimizer", "monitor_gnorm_with_ad", "monitor.ops = […]", "reload_xy"] == deprecated
    assert 0 == run.faults


def test_monitor_gnorm_with_ad_reports_a_missing_optimizer(tmp_path):
    monitor = TrainerMon(write(tmp_path / "c.json", {**QUIET, "wg_distribution": True}))
    with pytest.raises(ConfigError, match="monitor_gnorm_with_ad needs the optimizer"):
        monitor.monitor_gnorm_with_ad(model())


def test_second_model_is_rejected_with_a_remark(tmp_path):
    def again(_step: int, monitor: TrainerMon) -> None:
        other = model()
        monitor.set_monitor(other, adam(other))

    run = train(tmp_path, {"wg_distribution": True}, during=again)

    assert [
        "set_monitor was called before, and the first model remains attached: create a TrainerMon for each model"
    ] == run.said()


# The getters.


def reference(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def test_getters_return_the_statistics_of_the_current_step(tmp_path):
    seen = []

    def look(step: int, monitor: TrainerMon) -> None:
        reduced, unreduced = monitor.generate_wgrad_metrics()
        actv, actv_grad = monitor.generate_xy_metrics()
        net = run_net
        gradient = net.head.weight.grad
        assert gradient is not None
        expected = pytest.approx(reference(gradient), rel=1e-5)
        assert expected == float(reduced["0:head.weight/rank0/post_grad"]["norm"])
        assert expected == float(unreduced["0:head.weight/rank0/acc_grad"]["norm"])
        assert pytest.approx(reference(batch(step)), rel=1e-5) == float(actv["0:.input:0/rank0/actv"]["norm"])
        assert {"0:layers.0.output_0:0/rank0/actv", "0:layers.0.output_1:0/rank0/actv"} <= set(actv)
        assert "0:head.output:0/rank0/actv_grad" in actv_grad
        assert {("norm", "nans")} == {tuple(numbers) for numbers in (*reduced.values(), *actv.values())}
        seen.append(step)

    run_net = model()
    run = train(tmp_path, EVERYTHING, net=run_net, during=look)

    assert ([1, 2], 0) == (seen, run.faults)


def test_getters_change_neither_records_nor_training(tmp_path):
    def look(_step: int, monitor: TrainerMon) -> None:
        monitor.generate_wgrad_metrics()
        monitor.generate_xy_metrics()

    looked = train(tmp_path, EVERYTHING, during=look)
    alone = train(tmp_path, EVERYTHING)

    assert [(row.step, row.entry, row.numbers) for row in alone.rows] == [
        (row.step, row.entry, row.numbers) for row in looked.rows
    ]
    assert all(map(torch.equal, alone.net.parameters(), looked.net.parameters()))


def test_training_is_bit_identical_with_trainer_mon(tmp_path):
    watched = train(tmp_path, {**EVERYTHING, "mv_distribution": True, "param_distribution": True}, steps=3)
    net = model()
    optimizer = adam(net)
    for step in (1, 2, 3):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert all(map(torch.equal, net.parameters(), watched.net.parameters()))


def test_getter_returns_the_last_measured_step(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "CATCH_UP_SECONDS", LONG_SECONDS)
    norms = []

    def look(_step: int, monitor: TrainerMon) -> None:
        reduced, _ = monitor.generate_wgrad_metrics()
        norms.append(float(reduced["0:head.bias/rank0/post_grad"]["norm"]) if reduced else None)

    run = train(tmp_path, {"wg_distribution": True, "start_step": 1, "step_interval": 9}, steps=3, during=look)
    entries = {(row.entry.tensor, row.entry.kind): row.numbers["norm"] for row in run.rows}
    measured = pytest.approx(entries["head.bias", "grad_reduced"])

    assert [2] == run.steps()
    assert [None, measured, measured] == norms


def test_getters_return_nan_with_a_nan_and_zeros_as_a_share(tmp_path):
    found: dict[str, float] = {}

    def look(_step: int, monitor: TrainerMon) -> None:
        numbers = monitor.generate_xy_metrics()[0]["0:.input:0/rank0/actv"]
        found.update({op: float(value) for op, value in numbers.items()})

    inputs = torch.tensor([[[math.nan, 0.0, 0.0, 2.0]]])
    document = {"xy_distribution": True, "ops": ["norm", "mean", "nans", "zeros"]}
    train(tmp_path, document, steps=1, net=nn.Linear(4, 2), inputs=lambda _step: inputs, during=look)

    assert (1.0, 0.5) == (found["nans"], found["zeros"])
    assert math.isnan(found["norm"])
    assert math.isnan(found["mean"])


def test_getters_are_empty_without_model_or_measurement(tmp_path):
    monitor = TrainerMon(write(tmp_path / "c.json", {**QUIET, "wg_distribution": True}))
    assert ({}, {}) == monitor.generate_wgrad_metrics() == monitor.generate_xy_metrics()

    got = []
    train(tmp_path, {"wg_distribution": True}, during=lambda _step, one: got.append(one.generate_xy_metrics()))
    assert [({}, {})] * 2 == got


def test_failing_getter_returns_nothing_and_is_counted(tmp_path, monkeypatch):
    def fails(_step: int, monitor: TrainerMon) -> None:
        monkeypatch.setattr(monitor.monitor, "current", lambda *_: 1 / 0, raising=True)
        assert ({}, {}) == monitor.generate_wgrad_metrics({})

    assert 1 == train(tmp_path, {"wg_distribution": True}, steps=1, during=fails).faults


# Changes while training runs.


def test_new_ops_are_published_from_the_next_step_on(tmp_path):
    def change(step: int, monitor: TrainerMon) -> None:
        assert (["norm", "nans"] if step == 1 else ["max"]) == monitor.ops
        monitor.ops = ["max"]

    run = train(tmp_path, {"wg_distribution": True, "ops": ["norm", "nans"]}, during=change)
    known = {
        step: {
            op for row in run.rows if row.step == step for op in ("norm", "max", "nans") if row.numbers[op] is not None
        }
        for step in (1, 2)
    }

    assert {1: {"norm", "nans"}, 2: {"max"}} == known


def test_invalid_ops_are_reported_without_an_error(tmp_path):
    def change(_step: int, monitor: TrainerMon) -> None:
        monitor.ops = ["norm", "nons"]
        monitor.ops = "norm"  # type: ignore[assignment]  # a mistake
        assert ["norm"] == monitor.ops

    said = train(tmp_path, {"wg_distribution": True}, during=change).said()

    assert 1 == len([sentence for sentence in said if "'nons' is not a statistic" in sentence])
    assert 1 == len([sentence for sentence in said if "ops must be a list of statistics, not 'norm'" in sentence])


def test_ops_set_before_attach_apply_to_the_first_step(tmp_path):
    monitor = TrainerMon(write(tmp_path / "c.json", {**QUIET, "wg_distribution": True}))
    monitor.ops = ["max"]

    assert (["max"], ("max",)) == (monitor.ops, monitor._config.ops)


def test_reload_xy_switches_activations_with_the_configured_targets(tmp_path):
    def reload(step: int, monitor: TrainerMon) -> None:
        monitor.reload_xy(xy_distribution=step == 1)

    document = {"wg_distribution": True, "targets": {"head": {"output": "tensor"}}}
    run = train(tmp_path, document, steps=3, during=reload)

    assert [2] == run.steps("act_out")
    assert {"head"} == run.names("act_out")
    assert [1, 2, 3] == run.steps("grad_reduced")
    assert {"act_out"} == run.kinds() - {"grad_reduced", "grad_unreduced"}


# Pipeline stages of ranks.


def test_pipeline_group_gives_stage_and_group_mates(tmp_path, group, output):
    net = nn.Linear(4, 2)
    document = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}
    net.weight.data.fill_(math.nan)
    run = attached(tmp_path, net, adam(net), net=net, construction=(group,), **document)
    text = (output / "anomaly_detected/rank0/anomaly.json").read_text()

    assert '"pp_stage": 0' in text
    assert '"group_mates": [0]' in text
    assert {0} == {event.pp_stage for record in run.records for event in record.events if event.type == "anomaly"}


def test_pipeline_module_gives_its_own_stage(group):
    stage = PipelineStage(nn.Linear(4, 2), 0, 1, torch.device("cpu"))

    assert 0 == framework_of(stage).pp_stage
    assert framework_of(nn.Linear(4, 2)).pp_stage is None
