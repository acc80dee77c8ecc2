"""One process: what the monitor records of a plain training loop, against float64 references computed in the loop."""

from __future__ import annotations

import copy
import gc
import math
import socket
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import AnomalyNan, AnomalyTurbulence, Monitor, MonitorConfig, ServeConfig
from rankscope_exporter.quantities.parameters import Parameters

Eventually = Callable[..., Any]
MakeReader = Callable[[Monitor], Any]
RELATIVE = 1e-5


class Net(nn.Module):
    """A model with dropout, a frozen tensor, and a tensor without influence on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(64, 4)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x)))) * self.frozen.sum()


def make(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def reference(tensor: torch.Tensor) -> dict[str, float]:
    exact = tensor.detach().double().flatten()
    return {
        "norm": exact.square().sum().sqrt().item(),
        "min": exact.min().item(),
        "max": exact.max().item(),
        "mean": exact.mean().item(),
        "scale": exact.abs().mean().item(),
        "nans": 0,
        "infs": 0,
        "zeros": int((exact == 0).sum()),
        "numel": exact.numel(),
    }


def assert_equal_statistics(expected: dict[str, float], numbers: dict[str, Any]) -> None:
    for op in ("norm", "min", "max"):
        assert numbers[op] == pytest.approx(expected[op], rel=RELATIVE, abs=1e-30), op
    assert abs(numbers["mean"] - expected["mean"]) <= RELATIVE * expected["scale"]
    for op in ("nans", "infs", "zeros", "numel"):
        assert expected[op] == numbers[op], op


def test_all_quantities_of_all_steps_equal_a_float64_reference(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    expected: dict[tuple[int, str, str], dict[str, float]] = {}

    def note(step: int, kind: str, tensors: dict[str, torch.Tensor | None]) -> None:
        expected.update({(step, kind, name): reference(item) for name, item in tensors.items() if item is not None})

    monitor = Monitor(quiet)
    monitor.attach(net, optimizer)
    read = reader(monitor)
    with monitor:
        for step in range(1, 6):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
            note(step, "grad_unreduced", gradients)
            note(step, "grad_reduced", gradients)
            note(step, "param_before", dict(net.named_parameters()))
            longest = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if longest > 0.1:
                note(step, "grad_clipped", gradients)
            optimizer.step()
            note(step, "param_after", dict(net.named_parameters()))
            for key in ("exp_avg", "exp_avg_sq"):
                state = {
                    name: optimizer.state[p].get(key) for name, p in net.named_parameters() if p in optimizer.state
                }
                note(step, key, state)
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 5 and found)

    assert set(expected) == {(row.step, row.kind, row.tensor) for row in rows}
    assert len(expected) == len(rows)
    for row in rows:
        assert_equal_statistics(expected[row.step, row.kind, row.tensor], row.numbers)
    assert 0 == monitor.faults


def test_tensors_without_a_gradient_are_absent_not_zero(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        train_step(net, optimizer, 1)
        monitor.end_step()
        rows = eventually(read.rows)
    present = {row.tensor for row in rows if row.kind == "grad_reduced"}

    assert {"first.weight", "first.bias", "last.weight", "last.bias"} == present
    assert {"unused.weight", "frozen"} <= {row.tensor for row in rows if row.kind == "param_after"}


def test_fifty_steps_with_dropout_are_bit_identical_with_the_monitor(quiet: MonitorConfig) -> None:
    results = []
    for watched in (False, True):
        net, optimizer = make()
        torch.manual_seed(42)
        monitor = Monitor(quiet)
        if watched:
            monitor.attach(net, optimizer)
        with monitor:
            for step in range(1, 51):
                loss = train_step(net, optimizer, step)
                monitor.log(loss=loss, tokens=8)
        results.append([parameter.detach().clone() for parameter in net.parameters()] + [torch.random.get_rng_state()])

    assert all(torch.equal(without, with_it) for without, with_it in zip(*results, strict=True))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_attach_leaves_the_garbage_collector_as_it_was(quiet: MonitorConfig, is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with Monitor(quiet).attach(*make()):
            found = gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()

    assert is_enabled == found


def test_attach_frees_recent_garbage_and_keeps_frozen_objects_frozen(quiet: MonitorConfig) -> None:
    class Knot:
        def __init__(self) -> None:
            self.own = self

    gc.freeze()
    frozen = gc.get_freeze_count()
    garbage = weakref.ref(Knot())
    try:
        with Monitor(quiet).attach(*make()):
            found = garbage(), gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()

    assert (None, True) == found


def test_collections_of_young_objects_do_not_visit_those_of_attach(quiet: MonitorConfig) -> None:
    with Monitor(quiet).attach(*make()) as monitor:
        young = {id(item) for generation in (0, 1) for item in gc.get_objects(generation)}
        found = id(session_of(monitor)) in young

    assert not found


def test_skipped_step_has_its_gradients_and_a_skip_event(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        for step in range(1, 6):
            inputs, targets = batch(step)
            nn.functional.mse_loss(net(inputs), targets).backward()
            if step == 3:
                with torch.no_grad():
                    net.first.weight.grad[0, 0] = math.nan  # type: ignore[index]  # there is one after backward
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            monitor.log(grad_norm=norm)
        monitor.end_step()
        eventually(lambda: (found := read.rows()) and found[-1].step == 5)
        kinds = {step: {row.kind for row in read.rows() if row.step == step} for step in (3, 4)}

        assert {"grad_unreduced", "grad_reduced"} == kinds[3]
        assert {"param_before", "param_after", "exp_avg"} < kinds[4]
        assert [3] == [event["step"] for event in read.events() if event["type"] == "step_skipped"]
        norms = dict(read.scalars("grad_norm"))
        assert [True, True, False, True] == [math.isfinite(norms[step]) for step in (1, 2, 3, 4)]


def test_nan_gradient_is_counted_and_its_norm_covers_finite_elements(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 0], gradient[0, 1], gradient[0, 2] = math.nan, math.inf, 0.0
        return gradient

    handle = net.first.weight.register_hook(spoil)
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        inputs, targets = batch(1)
        nn.functional.mse_loss(net(inputs), targets).backward()
        gradient = net.first.weight.grad
        assert gradient is not None
        finite = gradient[torch.isfinite(gradient)].double()
        handle.remove()
        monitor.end_step()
        rows = eventually(read.rows)
        row = next(row for row in rows if (row.kind, row.tensor) == ("grad_unreduced", "first.weight"))
        events = [event for event in read.events() if event["type"] == "anomaly"]

    assert [1, 1] == [row.numbers["nans"], row.numbers["infs"]]
    assert row.numbers["zeros"] == int((gradient == 0).sum())
    assert row.numbers["norm"] == pytest.approx(finite.norm().item(), rel=RELATIVE)
    assert row.numbers["max"] == pytest.approx(finite.max().item(), rel=RELATIVE)
    assert {("AnomalyNan", "first.weight", "nans")} == {(e["rule"], e["tensor"], e["op"]) for e in events}
    assert {"grad_unreduced", "grad_reduced"} == {event["kind"] for event in events}


def test_micro_batches_accumulate_into_one_step(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        for step in range(2):
            for micro in range(3):
                inputs, targets = batch(10 * step + micro)
                nn.functional.mse_loss(net(inputs), targets).backward()
                monitor.log(tokens=8)
            total = net.last.bias.grad.detach().clone() if net.last.bias.grad is not None else torch.tensor(0.0)
            optimizer.step()
            optimizer.zero_grad()
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 2 and found)
        tokens = read.scalars("tokens_total")

    row = next(row for row in rows if (row.step, row.kind, row.tensor) == (2, "grad_unreduced", "last.bias"))
    assert row.numbers["norm"] == pytest.approx(total.double().norm().item(), rel=RELATIVE)
    assert {1, 2} == {row.step for row in rows}
    assert (2, 48.0) == tokens[-1]


def test_only_sampled_steps_are_measured_and_all_steps_are_logged(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    monitor = Monitor(replace(quiet, every=3))
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        for step in range(1, 8):
            monitor.log(loss=train_step(net, optimizer, step))
        monitor.end_step()
        eventually(lambda: len(read.scalars("loss")) == 7)

        assert {1, 4, 7} == {row.step for row in read.rows()}
        assert list(range(1, 8)) == [step for step, _ in read.scalars("loss")]


def test_logged_nan_inf_zero_and_absence_differ(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        train_step(net, optimizer, 1)
        monitor.log(a=math.nan, b=math.inf, c=0.0, d=None, loss={"lm": torch.tensor(2.5), "aux": 1})
        monitor.end_step()
        (record,) = eventually(read.records)
    scalars = {(item["name"], item["labels"]): item["value"] for item in record["scalars"]}

    assert math.isnan(scalars["a", None])
    assert math.inf == scalars["b", None]
    assert 0.0 == scalars["c", None]
    assert ("d", None) not in scalars
    assert (2.5, 1.0) == (scalars["loss", '{"loss":"lm"}'], scalars["loss", '{"loss":"aux"}'])
    assert 0.01 == pytest.approx(scalars["learning_rate", '{"group":"0"}'])


def test_logged_value_that_is_not_a_number_is_a_counted_fault(quiet: MonitorConfig) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        monitor.log(loss="high")
        monitor.log(loss=torch.ones(3))
        train_step(net, optimizer, 1)

        assert 2 == monitor.faults


def test_script_can_number_its_steps(quiet: MonitorConfig, reader: MakeReader, eventually: Eventually) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        for step in (100, 101, 50):
            monitor.log(loss=train_step(net, optimizer, 1), step=step)
        monitor.end_step()
        records = eventually(lambda: (found := read.records()) and len(found) == 3 and found)

    assert [100, 101, 50] == [record["step"] for record in records]
    assert [0, 1, 2] == [record["seq"] for record in records]


def test_quantity_that_raises_loses_only_its_rows(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken quantity")

    monkeypatch.setattr(Parameters, "on_optimizer_step_end", fail)
    with_fault, plain = make(), make()
    monitor = Monitor(quiet)
    with monitor.attach(*with_fault):
        read = reader(monitor)
        for step in range(1, 4):
            torch.manual_seed(step)
            train_step(*with_fault, step)
            torch.manual_seed(step)
            train_step(*plain, step)
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 3 and found)
        events = read.events()

    assert 3 == monitor.faults
    assert {"grad_reduced", "exp_avg", "param_before"} <= {row.kind for row in rows if row.step == 3}
    assert [] == [event for event in events if event["type"] == "step_skipped"]
    assert ["parameters (on_optimizer_step_end) failed, training continues: RuntimeError('broken quantity')"] == [
        event["message"] for event in events if event["type"] == "fault"
    ]
    assert all(torch.equal(a, b) for a, b in zip(with_fault[0].parameters(), plain[0].parameters(), strict=True))


def test_detach_leaves_no_trace(quiet: MonitorConfig) -> None:
    net, optimizer = make()
    hooks_before = count_hooks(net, optimizer)
    monitor = Monitor(quiet)
    monitor.attach(net, optimizer)
    train_step(net, optimizer, 1)
    attached = count_hooks(net, optimizer)
    monitor.detach()

    assert attached > hooks_before
    assert hooks_before == count_hooks(net, optimizer)
    assert monitor.address is None
    train_step(net, optimizer, 2)
    assert 0 == monitor.faults


def count_hooks(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    on_parameters = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in net.parameters())
    on_optimizer = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return on_parameters + on_optimizer + len(net._forward_pre_hooks)


def test_used_port_is_logged_once_and_training_continues(
    quiet: MonitorConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        net, optimizer = make()
        monitor = Monitor(replace(quiet, serve=ServeConfig(listen=f"127.0.0.1:{port}")))
        with monitor.attach(net, optimizer):
            train_step(net, optimizer, 1)

    assert 1 == monitor.faults
    assert [True] == [str(port) in record.getMessage() for record in caplog.records]


def test_a_disabled_monitor_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_DISABLED", "1")
    net, optimizer = make()
    monitor = Monitor()
    with monitor.attach(net, optimizer), monitor.phase("evaluation"):
        monitor.log(loss=1.0)
        monitor.event("note", "nothing happens")
        train_step(net, optimizer, 1)

    assert monitor.address is None
    assert 0 == count_hooks(net, optimizer)


def test_phase_of_another_thread_remains_when_a_training_phase_ends(quiet: MonitorConfig) -> None:
    """A checkpoint starts during an evaluation and ends after it."""
    shown: list[str | None] = []
    net, optimizer = make()
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizer):
        session = session_of(monitor)
        session.channel.set_phase = shown.append  # type: ignore[method-assign]
        evaluation, checkpoint = monitor.phase("evaluation"), monitor.phase("checkpoint")
        evaluation.__enter__()
        checkpoint.__enter__()
        evaluation.__exit__(None, None, None)
        checkpoint.__exit__(None, None, None)

    assert ["evaluation", "checkpoint", "checkpoint", None] == shown


def test_a_rule_fires_on_a_gradient_far_above_its_average(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    factor = 1.0
    net.last.weight.register_hook(lambda gradient: gradient * factor)
    rules = (AnomalyNan(), AnomalyTurbulence(threshold=10.0, kinds=("grad_unreduced",), ops=("norm",)))
    monitor = Monitor(replace(quiet, rules=rules))
    with monitor.attach(net, optimizer):
        read = reader(monitor)
        for step in range(1, 8):
            factor = 100.0 if step == 6 else 1.0
            train_step(net, optimizer, step)
        monitor.end_step()
        eventually(lambda: (found := read.rows()) and found[-1].step == 7)
        (event,) = [event for event in read.events() if event["type"] == "anomaly"]
        row = next(r for r in read.rows() if (r.step, r.kind, r.tensor) == (6, "grad_unreduced", "last.weight"))

    assert (6, "AnomalyTurbulence", "grad_unreduced", "last.weight", "norm") == tuple(
        event[key] for key in ("step", "rule", "kind", "tensor", "op")
    )
    assert row.numbers["norm_baseline"] == event["baseline"]
    assert row.numbers["norm"] == event["value"]


def test_an_exception_in_training_leaves_an_exit_record(quiet: MonitorConfig, caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = make()
    monitor = Monitor(quiet)
    published: list[Any] = []
    monitor.attach(net, optimizer)
    session = session_of(monitor)
    publish = session.publisher.publish
    session.publisher.publish = lambda record: published.append(record) or publish(record)  # type: ignore[func-returns-value]

    def fail() -> None:
        with monitor:
            train_step(net, optimizer, 1)
            raise ZeroDivisionError("training failed at \ud800")

    with pytest.raises(ZeroDivisionError):
        fail()
    exits = [event for record in published for event in record.events if event.type == "exit"]

    assert 1 == len(exits)
    assert '"reason": "exception"' in str(exits[0].details)
    assert '"last_step": 1' in str(exits[0].details)
    assert "training failed at" in str(exits[0].details)
    str(exits[0].details).encode()  # raises an error if the stream cannot represent it


def test_two_optimizers_step_as_one(quiet: MonitorConfig, reader: MakeReader, eventually: Eventually) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.Adam(net[0].parameters()), torch.optim.SGD(net[1].parameters(), lr=0.1, momentum=0.9)]
    monitor = Monitor(quiet)
    with monitor.attach(net, optimizers):
        read = reader(monitor)
        for _ in range(2):
            net(torch.randn(3, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 2 and found)

    assert {"0.weight", "0.bias"} == {row.tensor for row in rows if row.kind == "exp_avg"}
    assert {"1.weight", "1.bias"} == {row.tensor for row in rows if row.kind == "momentum"}
    before, after = (
        {row.tensor: row.numbers["norm"] for row in rows if (row.step, row.kind) == key}
        for key in ((2, "param_before"), (1, "param_after"))
    )
    assert before == after


def test_a_monitor_holds_no_reference_to_the_model_after_detach(quiet: MonitorConfig) -> None:
    net, optimizer = make()
    baseline = copy.deepcopy(net.state_dict())
    monitor = Monitor(quiet)
    monitor.attach(net, optimizer)
    monitor.detach()
    del optimizer
    gc.collect()
    holders = [item for item in gc.get_referrers(net) if type(item).__module__.startswith("rankscope")]

    assert [] == holders
    assert baseline.keys() == net.state_dict().keys()
