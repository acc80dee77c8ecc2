"""The remaining work at steps that are not sampled, and the removal of hooks."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.sampling.sampling_config import selected_parts


def net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, passes: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            net(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def config_of(*quantities: str, **settings: Any) -> MonitorConfig:
    return MonitorConfig(quantities=quantities, console=False, exit_wait_seconds=0, **settings)


def hooks_of(net: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules())


def parts_of(monitor: Monitor) -> Any:
    return session_of(monitor)


def calls_of_ours(function: Callable[[], None]) -> Counter[str]:
    """Return the number of calls of each function of the exporter while `function` runs on this thread."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and f"{os.sep}rankscope_exporter{os.sep}" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def deep(layers: int) -> nn.Module:
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(3, 3), nn.Tanh())))


def hooked_parameters(net: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in net.named_parameters()
        if parameter._post_accumulate_grad_hooks or parameter._backward_hooks
    ]


EVERYTHING = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations", "structure", "linear")


def test_unsampled_step_costs_the_same_for_all_model_sizes():
    counts = []
    for layers in (2, 20):
        net = deep(layers)
        optimizer = torch.optim.Adam(net.parameters())
        with Monitor(config_of(*EVERYTHING, every=100)).attach(net, optimizer) as monitor:
            train(net, optimizer, steps=2)
            counts.append(calls_of_ours(lambda net=net, optimizer=optimizer: train(net, optimizer)))
            assert 0 == monitor.faults
            assert [f"{2 * layers - 2}.bias"] == hooked_parameters(net)
            assert 0 == sum(hooks_of(module) for module in net)

    assert counts[0] == counts[1]
    assert counts[0].total() < 300, counts[0]  # about 25 µs


def test_every_sampled_step_has_all_rows(reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of(*EVERYTHING, every=3)).attach(net, optimizer) as monitor:
        train(net, optimizer, steps=7)
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == 7])
        rows = read.rows()
        features = {(row["module"], row["kind"]) for record in read.records()[4:] for row in record["features"]}
        assert 0 == monitor.faults

    seen = [{(row.kind, row.tensor, row.micro_step) for row in rows if row.step == step} for step in (1, 4, 7)]
    assert {1, 4, 7} == {row.step for row in rows}
    assert seen[0] == seen[1] == seen[2]
    assert 5 * 4 + 14 == len(seen[0])  # rows of parameters, and of modules and the model without gradients of the batch
    assert features


class TwoHeads(nn.Module):
    """A model that trains one of two independent heads at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        result: torch.Tensor = self.get_submodule(head)(x)
        return result


def test_backward_pass_through_unmeasured_parameters_is_detected(reader, eventually):
    net = TwoHeads()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    heads = ["left", "right", "right", "left", "right", "left", "right"]
    skipped = {2, 4, 5, 6}
    with Monitor(config_of("gradients", every=100)).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for step, head in enumerate(heads, start=1):
            net(torch.ones(1, 3), head).sum().backward()
            if step not in skipped:
                optimizer.step()
            optimizer.zero_grad()
        monitor.end_step()
        eventually(lambda: [record for record in read.records() if record["step"] == len(heads)])
        events = read.events()
        assert sorted(["left.bias", "right.bias"]) == sorted(hooked_parameters(net))

    assert skipped == {event["step"] for event in events if event["type"] == "step_skipped"}


def test_steps_that_begin_in_a_backward_pass_keep_gradient_hooks(reader, eventually):
    """If the whole model is never called, a step begins with its first gradient. The others follow immediately."""
    net, optimizer = net_and_optimizer()
    with Monitor(config_of("gradients", every=3)).attach(net, optimizer) as monitor:
        for _ in range(7):
            x = torch.ones(2, 3)
            for layer in net:
                x = layer(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == 7])
        rows = read.rows()

    local = [(row.step, row.tensor) for row in rows if row.kind == "grad_unreduced"]
    assert sorted((step, name) for step in (1, 4, 7) for name, _ in net.named_parameters()) == sorted(local)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_transient_hooks_cause_no_recompilation(compiled_first):
    torch._dynamo.reset()
    net, optimizer = net_and_optimizer()
    graphs = CompileCounterWithBackend("aot_eager")
    config = config_of("gradients", "micro_gradients", "activations", every=2)
    model = torch.compile(net, backend=graphs) if compiled_first else net
    with Monitor(config).attach(model, optimizer) as monitor:
        model = model if compiled_first else torch.compile(net, backend=graphs)
        train(model, optimizer)
        made = graphs.frame_count
        train(model, optimizer, 5)
        assert 0 == monitor.faults
    torch._dynamo.reset()

    assert made == graphs.frame_count > 0


@pytest.mark.parametrize("quantity", ["structure", "activations"])
def test_module_hooks_are_removed_after_the_last_sampled_step(quantity, reader, eventually):
    net, optimizer = net_and_optimizer()
    config = config_of("parameters", quantity, options={quantity: {"times": 1}})
    with Monitor(config).attach(net, optimizer) as monitor:
        hooked = hooks_of(net)
        train(net, optimizer, 2)
        bare = hooks_of(net)
        train(net, optimizer)
        monitor.end_step()
        read = reader(monitor)
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 3 and found)
        steps = {record["step"] for record in read.records() if record["modules"]} | {
            row.step for row in rows if row.kind.startswith("act_")
        }
        structure = monitor.structure()
        assert 0 == monitor.faults

    assert bare < hooked
    assert bare <= 2  # hooks on begin and end of the forward pass
    assert {1} == steps
    assert {1, 2, 3} == {row.step for row in rows if row.kind == "param_after"}
    assert ("Linear" in structure) == (quantity == "structure")


def test_quantity_that_ended_can_be_switched_on_again(reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of("activations", times=1)).attach(net, optimizer) as monitor:
        train(net, optimizer, 3)
        monitor.switch({"times": 2})
        train(net, optimizer, 4)
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == 7])
        rows = read.rows()
        assert 0 == monitor.faults

    assert [1, 4, 5] == sorted({row.step for row in rows if row.kind == "act_out"})
    assert {"act_in", "act_out", "act_grad_out"} <= {row.kind for row in rows if row.step == 5}


def test_planned_change_is_measured_from_its_first_step(reader, eventually):
    """With several ranks, a change is planned many steps ahead, and a quantity hooks a model only once."""
    net, optimizer = net_and_optimizer()
    config = config_of("activations", times=1)
    with Monitor(config).attach(net, optimizer) as monitor:
        session = parts_of(monitor)
        prepared = session.active_quantities.prepare(selected_parts(session.monitored, config, 0, ignore_start=True))
        train(net, optimizer, 3)
        session.hooks.between(lambda: session.active_quantities.replace(prepared))
        train(net, optimizer, 3)
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == 6])
        rows = read.rows()
        assert 0 == monitor.faults

    first, second = ({(row.kind, row.tensor) for row in rows if row.step == step} for step in (1, 4))
    assert first == second
    assert 14 == len(first)  # rows of three modules and the model, without gradients of the batch
    assert {1, 4} == {row.step for row in rows}


def test_skipped_steps_are_detected_at_unsampled_steps(reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of("gradients", every=100)).attach(net, optimizer) as monitor:
        read = reader(monitor)
        train(net, optimizer, 3)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.zero_grad()  # without an update
        train(net, optimizer, 2)
        monitor.end_step()
        eventually(lambda: [record for record in read.records() if record["step"] == 6])
        events = read.events()

    assert [4] == [event["step"] for event in events if event["type"] == "step_skipped"]
