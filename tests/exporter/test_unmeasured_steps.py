"""What is left to do on a step that nobody measures, and when hooks go by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.sampling.measuring import chosen


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
    session = monitor._session
    assert session is not None
    return session


def test_only_the_first_gradient_of_a_backward_pass_gets_past_its_hook(monkeypatch):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of("gradients", "activations", every=100)).attach(net, optimizer) as monitor:
        session = parts_of(monitor)
        train(net, optimizer)  # measured
        calls: list[str] = []
        inner = session.hooks._gradient_ready
        monkeypatch.setattr(session.hooks, "_gradient_ready", lambda *args: calls.append("gradient") or inner(*args))
        began = session.recorder.backward_begins
        monkeypatch.setattr(session.recorder, "backward_begins", lambda: calls.append("pass") or began())
        timed = session.hooks._timed
        monkeypatch.setattr(session.hooks, "_timed", lambda where, *args: calls.append(where) or timed(where, *args))
        train(net, optimizer, steps=2, passes=2)
        assert 0 == monitor.faults

    assert 4 == calls.count("gradient") == calls.count("pass")
    assert {"a forward hook", "a backward hook", "an optimizer hook"} == set(calls) - {"gradient", "pass"}


@pytest.mark.parametrize("quantity", ["structure", "activations"])
def test_hooks_of_modules_go_when_their_last_step_is_over(quantity, reader, eventually):
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
    assert bare <= 2  # that a forward begins and ends
    assert {1} == steps
    assert {1, 2, 3} == {row.step for row in rows if row.kind == "param_after"}
    assert ("Linear" in structure) == (quantity == "structure")


def test_what_is_over_can_be_switched_on_again(reader, eventually):
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


def test_hooks_stay_for_a_change_that_is_to_come():
    """With ranks it is known many steps ahead, and a quantity hooks a model only once."""
    net, optimizer = net_and_optimizer()
    config = config_of("activations", times=1)
    with Monitor(config).attach(net, optimizer) as monitor:
        session = parts_of(monitor)
        hooked = hooks_of(net)
        lineup = session._collection.lineup(chosen(session.subject, config, 0, switched=True))
        train(net, optimizer, 3)
        waiting = hooks_of(net)
        session.recorder.between(lambda: session._collection.take(lineup))
        train(net, optimizer, 3)

    assert hooked == waiting
    assert hooks_of(net) < hooked


def test_skipped_steps_are_told_on_steps_that_nobody_measures(reader, eventually):
    net, optimizer = net_and_optimizer()
    with Monitor(config_of("gradients", every=100)).attach(net, optimizer) as monitor:
        read = reader(monitor)
        train(net, optimizer, 3)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.zero_grad()  # and no update
        train(net, optimizer, 2)
        monitor.end_step()
        eventually(lambda: [record for record in read.records() if record["step"] == 6])
        events = read.events()

    assert [4] == [event["step"] for event in events if event["type"] == "step_skipped"]
