"""Clipped gradients, micro-batches, optimizer state, Adam's update and direction, compared with plain formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]
STEPS = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batch(step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(10 * step + micro))


def watched(reader: Any, eventually: Any, quantities: tuple[str, ...], loop: Any, **options: Any) -> Any:
    """Train with a monitor; return the rows and records of the reader after all steps were published."""
    model = net()
    optimizer = loop.optimizer(model)
    config = MonitorConfig(quantities=quantities, options=options, console=False, exit_wait_seconds=0)
    with Monitor(config).attach(model, optimizer) as monitor:
        read = reader(monitor)
        loop.train(model, optimizer)
        monitor.end_step()
        monitor.event("all done")
        eventually(lambda: any(event["type"] == "all done" for event in read.events()))
        assert 0 == monitor.faults
        return read.rows(), read.records()


class Training:
    """A training step: micro-batches, clipping to the norm `longest` if given, and the update. It calls `observe`."""

    def __init__(self, micros: int = 1, longest: float | None = None, make: Any = None) -> None:
        self.micros, self.longest = micros, longest
        self.optimizer = make or (lambda model: torch.optim.Adam(model.parameters(), lr=0.05))
        self.observe: Callable[..., None] = lambda *_: None

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, STEPS + 1):
            for micro in range(self.micros):
                model(batch(step, micro)).square().mean().backward()
            if self.longest is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.longest)
            self.observe("before", step, model, optimizer)
            optimizer.step()
            self.observe("after", step, model, optimizer)
            optimizer.zero_grad()


def observed(training: Training, look: Callable[..., dict[Any, Any]]) -> dict[Any, Any]:
    """Run the same training without a monitor and return the results of `look`."""
    found: dict[Any, Any] = {}
    twin = copy.copy(training)
    twin.observe = lambda *args: found.update(look(*args))
    model = net()
    twin.train(model, twin.optimizer(model))
    return found


def norms(rows: list[Any], kind: str, *, micro: bool = False) -> dict[Any, float]:
    return {
        (row.step, row.tensor, *((row.micro_step,) if micro else ())): row.numbers["norm"]
        for row in rows
        if row.kind == kind and (row.micro_step is not None) == micro
    }


def close(expected: dict[Any, float], found: dict[Any, float]) -> bool:
    assert expected.keys() == found.keys()
    return all(value == pytest.approx(found[key], rel=2e-6, abs=1e-12) for key, value in expected.items())


def of_parameters(model: nn.Module, step: int, value: Callable[[nn.Parameter], torch.Tensor]) -> dict[Any, float]:
    return {(step, name): float(value(item).double().norm()) for name, item in model.named_parameters()}


def test_clipped_gradients_have_rows_only_where_they_differ_from_reduced(reader, eventually):
    def clipped(moment: str, step: int, model: nn.Module, _: Any) -> dict[Any, float]:
        return of_parameters(model, step, lambda item: item.grad) if moment == "before" else {}

    training = Training(longest=0.01)
    rows, _ = watched(reader, eventually, ("gradients",), training)

    assert close(observed(training, clipped), norms(rows, "grad_clipped"))
    assert norms(rows, "grad_clipped") != norms(rows, "grad_reduced")
    for same in (Training(longest=1e9), Training()):
        rows, _ = watched(reader, eventually, ("gradients",), same)
        assert {} == norms(rows, "grad_clipped")
        assert close(observed(same, clipped), norms(rows, "grad_reduced"))


def test_gradients_assigned_by_the_loop_are_measured(reader, eventually):
    class Assigned(Training):
        """As in meta-learning, no backward pass accumulates gradients."""

        def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for step in range(1, STEPS + 1):
                found = torch.autograd.grad(model(batch(step)).square().mean(), list(model.parameters()))
                for item, gradient in zip(model.parameters(), found, strict=True):
                    item.grad = gradient
                self.observe("before", step, model, optimizer)
                optimizer.step()
                optimizer.zero_grad()

    def given(_: str, step: int, model: nn.Module, __: Any) -> dict[Any, float]:
        return of_parameters(model, step, lambda item: item.grad)

    training = Assigned()
    rows, _ = watched(reader, eventually, ("gradients",), training)

    assert close(observed(training, given), norms(rows, "grad_reduced"))
    assert norms(rows, "grad_reduced") == norms(rows, "grad_unreduced")
    assert {} == norms(rows, "grad_clipped")


def test_gradient_scaler_changes_grad_clipped_only(reader, eventually):
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0)

    class Scaled(Training):
        def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            scaler.scale(model(batch(1)).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    rows, _ = watched(reader, eventually, ("gradients",), Scaled())
    scaled, seen = norms(rows, "grad_reduced"), norms(rows, "grad_clipped")

    assert close({key: value * 256.0 for key, value in seen.items()}, scaled)


def test_micro_gradients_are_summands_and_no_running_sum(reader, eventually):
    training = Training(micros=3)
    rows, _ = watched(reader, eventually, ("gradients", "micro_gradients"), training)
    expected = {}

    def alone(moment: str, step: int, model: nn.Module, _: Any) -> dict[Any, float]:
        if moment == "before":
            for micro in range(3):
                twin = copy.deepcopy(model).double()
                twin.zero_grad()
                twin(batch(step, micro).double()).square().mean().backward()
                expected.update(
                    {(step, name, micro): float(item.grad.norm()) for name, item in twin.named_parameters()}
                )
        return of_parameters(model, step, lambda item: item.grad) if moment == "before" else {}

    whole = observed(training, alone)
    assert close(expected, norms(rows, "grad_unreduced", micro=True))
    assert close(whole, norms(rows, "grad_unreduced"))


def test_optimizer_state_is_selected_by_name(reader, eventually):
    def state(key: str) -> Callable[..., dict[Any, float]]:
        return lambda moment, step, model, optimizer: (
            of_parameters(model, step, lambda item: optimizer.state[item][key]) if moment == "after" else {}
        )

    amsgrad = Training(make=lambda model: torch.optim.Adam(model.parameters(), amsgrad=True))
    rows, _ = watched(reader, eventually, ("optimizer_state",), amsgrad, optimizer_state={"names": ["max_*"]})
    assert {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} == {row.kind for row in rows}
    for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert close(observed(amsgrad, state(kind)), norms(rows, kind))

    momentum = Training(make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows, _ = watched(reader, eventually, ("optimizer_state",), momentum)
    assert {"momentum"} == {row.kind for row in rows}
    assert close(observed(momentum, state("momentum_buffer")), norms(rows, "momentum"))

    adagrad = Training(make=lambda model: torch.optim.Adagrad(model.parameters()))
    rows, _ = watched(reader, eventually, ("optimizer_state",), adagrad, optimizer_state={"names": ["*"]})
    assert {"sum"} == {row.kind for row in rows}
    assert close(observed(adagrad, state("sum")), norms(rows, "sum"))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_histograms_of_adam_update_equal_the_parameter_movement(reader, eventually, amsgrad):
    """The reference is the movement itself: (before - after) / lr, in float64."""
    rate = 0.05
    training = Training(make=lambda model: torch.optim.Adam(model.parameters(), lr=rate, amsgrad=amsgrad))
    before: dict[str, torch.Tensor] = {}

    def moved(moment: str, step: int, model: nn.Module, _: Any) -> dict[Any, torch.Tensor]:
        if moment == "before":
            before.update({name: item.detach().double().clone() for name, item in model.named_parameters()})
            return {}
        return {(step, n): (before[n] - item.detach().double()) / rate for n, item in model.named_parameters()}

    expected = observed(training, moved)
    bins = {"bins": 4, "low": -0.8, "high": 0.8}
    _, records = watched(reader, eventually, ("adam_updates",), training, adam_updates=bins)
    found = {
        (record["step"], row["tensor"], row["kind"]): row for record in records for row in record["histograms"] or ()
    }

    assert {(*key, kind) for key in expected for kind in ("adam_update", "adam_ratio")} == found.keys()
    for (step, name), movement in expected.items():
        row = found[step, name, "adam_update"]
        edges = torch.tensor([-0.8, -0.4, 0.0, 0.4, 0.8], dtype=torch.float64)
        near = (movement.flatten()[:, None] - edges).abs().amin() > 1e-5  # no element is on an edge
        assert near
        places = torch.bucketize(movement.flatten(), edges)
        counts = torch.bincount(places, minlength=6).tolist()
        assert [row["below"], *row["counts"], row["above"]] == counts
        assert ("linear:-0.8:0.8:4", 0) == (row["scheme"], row["nonfinite"])


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    ],
)
def test_update_norm_is_the_norm_of_the_parameter_movement(reader, eventually, make):
    before: dict[str, torch.Tensor] = {}

    def moved(moment: str, step: int, model: nn.Module, _: Any) -> dict[Any, float]:
        if moment == "before":
            before.update({name: item.detach().double().clone() for name, item in model.named_parameters()})
            return {}
        return {(step, n): (item.detach().double() - before[n]).norm().item() for n, item in model.named_parameters()}

    training = Training(make=make)
    _, records = watched(reader, eventually, ("parameters",), training, parameters={"updates": True})
    found = {(record["step"], row["module"]): row["value"] for record in records for row in record["features"] or ()}

    assert {"update_norm"} == {row["kind"] for record in records for row in record["features"] or ()}
    assert close(observed(training, moved), found)


def test_update_norm_covers_all_optimizers_of_a_step(reader, eventually):
    class Two(Training):
        def train(self, model: nn.Module, _: Any) -> None:
            model(batch(1)).square().mean().backward()
            for optimizer in self.both:
                optimizer.step()

    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        training.both = [torch.optim.SGD(model[place].parameters(), lr=2.0**place) for place in (0, 2)]
        return training.both

    training = Two(make=both)
    _, records = watched(reader, eventually, ("parameters", "gradients"), training, parameters={"updates": True})
    model = net()
    model(batch(1)).square().mean().backward()

    assert close(
        {name: 2.0 ** int(name[0]) * item.grad.norm().item() for name, item in model.named_parameters()},
        {row["module"]: row["value"] for record in records for row in record["features"] or ()},
    )


def test_update_norm_is_off_by_default(reader, eventually):
    _, records = watched(reader, eventually, ("parameters",), Training())

    assert [] == [row for record in records for row in record["features"] or ()]


def test_histograms_count_non_finite_values(reader, eventually):
    class Dead(Training):
        def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model(batch(1)).square().mean().backward()
            model[0].weight.grad.fill_(float("nan"))
            model[0].bias.grad.zero_()  # 0 / 0 in the ratio, 0 in the update
            optimizer.step()

    _, records = watched(reader, eventually, ("adam_updates",), Dead())
    found = {(row["tensor"], row["kind"]): row for record in records for row in record["histograms"] or ()}

    assert 54 == found["0.weight", "adam_update"]["nonfinite"]
    assert (0, 9) == (found["0.bias", "adam_update"]["nonfinite"], sum(found["0.bias", "adam_update"]["counts"]))
    assert 9 == found["0.bias", "adam_ratio"]["nonfinite"]


def test_direction_is_the_share_of_equal_signs(reader, eventually):
    training = Training()

    def agreement(moment: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, float]:
        if moment == "after" or step == 1:
            return {}
        shares = {}
        for name, item in model.named_parameters():
            pairs = zip(item.grad.flatten().tolist(), optimizer.state[item]["exp_avg"].flatten().tolist(), strict=True)
            votes = [1.0 if g * m > 0 else 0.0 if g * m < 0 else 0.5 for g, m in pairs]
            shares[step, name] = sum(votes) / len(votes)
        return shares

    _, records = watched(reader, eventually, ("direction",), training)
    found = {(record["step"], row["module"]): row["value"] for record in records for row in record["features"] or ()}
    assert close(observed(training, agreement), found)


class Rotation(nn.Module):
    """Complex numbers, stored as such or as pairs of real numbers: Adam updates both equally."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        pairs = torch.randn(3, 4, 2, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
        self.weight = nn.Parameter(torch.view_as_complex(pairs) if whole else pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x[:, :3].to(weight.dtype) @ weight).abs()


@pytest.mark.parametrize("quantity", ["direction", "adam_updates"])
def test_complex_number_counts_as_its_two_parts(reader, eventually, monkeypatch, quantity):
    found = []
    for whole in (True, False):
        monkeypatch.setitem(globals(), "net", lambda whole=whole: Rotation(whole=whole))
        _, records = watched(reader, eventually, (quantity,), Training())
        dataset = "features" if quantity == "direction" else "histograms"
        found.append([(record["step"], row) for record in records for row in record[dataset] or ()])

    assert found[0]
    assert found[0] == found[1]
