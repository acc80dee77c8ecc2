"""The remaining work at steps that are not sampled, and the removal of hooks."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from tests.exporter.parts import hooks_of, session_of, small
from tests.exporter.runs import Published, config_of, published, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from rankscope_exporter import Monitor
from rankscope_exporter.sampling.sampling_config import selected_parts


def rows_by_step(found: Published) -> dict[int, set[tuple[str, str, int | None]]]:
    rows: dict[int, set[tuple[str, str, int | None]]] = {}
    for row in found.rows:
        rows.setdefault(row.step, set()).add((row.entry.kind, row.entry.tensor, row.entry.micro_step))
    return rows


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
        net = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(3, 3), nn.Tanh())))
        optimizer = torch.optim.Adam(net.parameters())
        with Monitor(config_of(*EVERYTHING, every=100)).attach(net, optimizer) as monitor:
            train(net, optimizer, steps=2)
            counts.append(calls_of_ours(lambda net=net, optimizer=optimizer: train(net, optimizer)))
            assert 0 == monitor.faults
            assert [f"{2 * layers - 2}.bias"] == hooked_parameters(net)
            assert 0 == sum(hooks_of(module) for module in net)

    assert counts[0] == counts[1]
    assert counts[0].total() < 300, counts[0]  # about 25 µs


def test_every_sampled_step_has_all_rows():
    net, optimizer = small()
    with Monitor(config_of(*EVERYTHING, every=3)).attach(net, optimizer) as monitor:
        train(net, optimizer, steps=7)
        found = published(monitor)
        assert 0 == monitor.faults

    seen = rows_by_step(found)
    assert {1, 4, 7} == seen.keys() == {row["step"] for row in found.of("features")}
    assert seen[1] == seen[4] == seen[7]
    assert 5 * 4 + 14 == len(seen[1])  # rows of parameters, and of modules and the model without gradients of the batch


class TwoHeads(nn.Module):
    """A model that trains one of two independent heads at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        result: torch.Tensor = self.get_submodule(head)(x)
        return result


def test_backward_pass_through_unmeasured_parameters_is_detected():
    """A skipped step is detected although no step with its head is sampled."""
    net = TwoHeads()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    skipped = {2, 4, 5, 6}
    with Monitor(config_of("gradients", every=100)).attach(net, optimizer) as monitor:
        for step, head in enumerate(["left", "right", "right", "left", "right", "left", "right"], start=1):
            net(torch.ones(1, 3), head).sum().backward()
            if step not in skipped:
                optimizer.step()
            optimizer.zero_grad()
        found = published(monitor)
        assert sorted(["left.bias", "right.bias"]) == sorted(hooked_parameters(net))

    assert skipped == {r.step for r in found.records for event in r.events if event.type == "step_skipped"}


def test_steps_that_begin_in_a_backward_pass_keep_gradient_hooks():
    """If the whole model is never called, a step begins with its first gradient. The others follow immediately."""
    net, optimizer = small()
    with Monitor(config_of("gradients", every=3)).attach(net, optimizer) as monitor:
        for _ in range(7):
            x = torch.ones(2, 3)
            for layer in net:
                x = layer(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        norms = published(monitor).norms("grad_unreduced")

    assert {(step, name) for step in (1, 4, 7) for name, _ in net.named_parameters()} == norms.keys()


@pytest.mark.parametrize("compiled_first", [True, False])
def test_transient_hooks_cause_no_recompilation(compiled_first):
    torch._dynamo.reset()
    net, optimizer = small()
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
def test_module_hooks_are_removed_after_the_last_sampled_step(quantity):
    net, optimizer = small()
    config = config_of("parameters", quantity, options={quantity: {"times": 1}})
    with Monitor(config).attach(net, optimizer) as monitor:
        hooked = hooks_of(net)
        train(net, optimizer, 2)
        bare = hooks_of(net)
        train(net, optimizer)
        found = published(monitor)
        structure = monitor.structure()
        assert 0 == monitor.faults

    assert bare < hooked
    assert bare <= 2  # hooks on begin and end of the forward pass
    kinds = {step: {kind for kind, *_ in rows} for step, rows in rows_by_step(found).items()}
    assert {1} == {row["step"] for row in found.of("modules")} | {step for step in kinds if "act_out" in kinds[step]}
    assert [1, 2, 3] == [step for step in kinds if "param_after" in kinds[step]]
    assert ("Linear" in structure) == (quantity == "structure")


def test_quantity_that_ended_can_be_switched_on_again():
    net, optimizer = small()
    with Monitor(config_of("activations", times=1)).attach(net, optimizer) as monitor:
        train(net, optimizer, 3)
        monitor.switch({"times": 2})
        train(net, optimizer, 4)
        rows = rows_by_step(published(monitor))
        assert 0 == monitor.faults

    assert {1, 4, 5} == rows.keys()
    assert {"act_in", "act_out", "act_grad_out"} <= {kind for kind, *_ in rows[5]}


def test_planned_change_is_measured_from_its_first_step():
    """With several ranks, a change is planned many steps ahead, and a quantity hooks a model only once."""
    net, optimizer = small()
    config = config_of("activations", times=1)
    with Monitor(config).attach(net, optimizer) as monitor:
        session = session_of(monitor)
        prepared = session.active_quantities.prepare(selected_parts(session.monitored, config, 0, ignore_start=True))
        train(net, optimizer, 3)
        session.hooks.between(lambda: session.active_quantities.replace(prepared))
        train(net, optimizer, 3)
        rows = rows_by_step(published(monitor))
        assert 0 == monitor.faults

    assert {1, 4} == rows.keys()
    assert rows[1] == rows[4]
    assert 14 == len(rows[1])  # rows of three modules and the model, without gradients of the batch
