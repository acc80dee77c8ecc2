"""Clipped gradients, micro-batches, optimizer state and the update of Adam, compared with references."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.parts import Published, config_of, published
from torch import nn

from rankscope_exporter import Monitor

STEPS = 3
Found = dict[Any, Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batch(step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(10 * step + micro))


class Training:
    """A training with micro-batches, by default with Adam, which clips to the norm `longest` and calls `observe`."""

    make: Callable[[], Any] = staticmethod(net)

    def __init__(self, micros: int = 1, longest: float | None = None, optimizer: Any = torch.optim.Adam, **more: Any):
        self.micros, self.longest = micros, longest
        self.optimizer = lambda model: optimizer(model.parameters(), **{"lr": 0.05, **more})
        self.observe: Callable[..., None] = lambda *_: None

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, STEPS + 1):
            self.backward(step, model)
            if self.longest is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.longest)
            self.observe("before", step, model, optimizer)
            optimizer.step()
            self.observe("after", step, model, optimizer)
            optimizer.zero_grad()

    def backward(self, step: int, model: nn.Module) -> None:
        for micro in range(self.micros):
            model(batch(step, micro)).square().mean().backward()

    def watched(self, *quantities: str, **options: Any) -> Published:
        model = self.make()
        optimizer = self.optimizer(model)
        with Monitor(config_of(*quantities, options=options)).attach(model, optimizer) as monitor:
            self.train(model, optimizer)
            found = published(monitor)
            assert 0 == monitor.faults
            return found

    def observed(self, look: Callable[..., Found]) -> Found:
        """Run the same training without a monitor and return the results of `look`."""
        found: Found = {}
        twin = copy.copy(self)
        twin.observe = lambda *args: found.update(look(*args))
        model = self.make()
        twin.train(model, twin.optimizer(model))
        return found

    def moved(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return the movement of each parameter at each step of the same training, in float64."""
        before: dict[str, torch.Tensor] = {}

        def look(moment: str, step: int, model: nn.Module, _: Any) -> Found:
            now = {name: item.detach().double().clone() for name, item in model.named_parameters()}
            if moment == "after":
                return {(step, name): item - before[name] for name, item in now.items()}
            before.update(now)
            return {}

        return self.observed(look)


def close(expected: Found, found: Found) -> bool:
    assert expected.keys() == found.keys()
    return all(value == pytest.approx(found[key], rel=2e-6, abs=1e-12) for key, value in expected.items())


def of_parameters(model: nn.Module, step: int, value: Callable[[nn.Parameter], torch.Tensor]) -> Found:
    return {(step, name): float(value(item).double().norm()) for name, item in model.named_parameters()}


def clipped(moment: str, step: int, model: nn.Module, _: Any) -> Found:
    return of_parameters(model, step, lambda item: item.grad) if moment == "before" else {}


def features(found: Published) -> Found:
    return {(row["step"], row["module"]): row["value"] for row in found.of("features")}


def test_clipped_gradients_have_rows_only_where_they_differ_from_reduced():
    training = Training(longest=0.01)
    found = training.watched("gradients")

    assert close(training.observed(clipped), found.norms("grad_clipped"))
    assert found.norms("grad_clipped") != found.norms("grad_reduced")
    for same in (Training(longest=1e9), Training()):
        found = same.watched("gradients")
        assert {} == found.norms("grad_clipped")
        assert close(same.observed(clipped), found.norms("grad_reduced"))


def test_gradients_assigned_by_the_loop_are_measured():
    class Assigned(Training):
        """As in meta-learning, no backward pass accumulates gradients."""

        def backward(self, step: int, model: nn.Module) -> None:
            found = torch.autograd.grad(model(batch(step)).square().mean(), list(model.parameters()))
            for item, gradient in zip(model.parameters(), found, strict=True):
                item.grad = gradient

    training = Assigned()
    found = training.watched("gradients")

    assert close(training.observed(clipped), found.norms("grad_reduced"))
    assert found.norms("grad_reduced") == found.norms("grad_unreduced")
    assert {} == found.norms("grad_clipped")


def test_gradient_scaler_changes_grad_clipped_only():
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0)

    class Scaled(Training):
        def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            scaler.scale(model(batch(1)).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    found = Scaled().watched("gradients")

    scaled = {key: value * 256.0 for key, value in found.norms("grad_clipped").items()}
    assert close(scaled, found.norms("grad_reduced"))
    assert scaled


def test_micro_gradients_are_summands_and_no_running_sum():
    training = Training(micros=3)
    found = training.watched("gradients", "micro_gradients")
    expected: Found = {}

    def alone(moment: str, step: int, model: nn.Module, _: Any) -> Found:
        for micro in range(3) if moment == "before" else ():
            twin = copy.deepcopy(model).double()
            twin.zero_grad()
            twin(batch(step, micro).double()).square().mean().backward()
            expected.update({(step, name, micro): float(item.grad.norm()) for name, item in twin.named_parameters()})
        return clipped(moment, step, model, _)

    whole = training.observed(alone)
    rows = [row for row in found.rows if row.entry.kind == "grad_unreduced" and row.entry.micro_step is not None]
    summands = {(row.step, row.entry.tensor, row.entry.micro_step): row.numbers["norm"] for row in rows}

    assert close(whole, found.norms("grad_unreduced"))
    assert close(expected, summands)


@pytest.mark.parametrize(
    ("training", "names", "states"),
    [
        (Training(amsgrad=True), ["max_*"], {name: name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}),
        (Training(optimizer=torch.optim.SGD, momentum=0.9), None, {"momentum": "momentum_buffer"}),
        (Training(optimizer=torch.optim.Adagrad), ["*"], {"sum": "sum"}),
    ],
    ids=["Adam", "SGD", "Adagrad"],
)
def test_optimizer_state_is_selected_by_name(training, names, states):
    found = training.watched("optimizer_state", **({"optimizer_state": {"names": names}} if names else {}))

    def state(moment: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Found:
        if moment == "before":
            return {}
        return {
            (kind, *key): norm
            for kind, name in states.items()
            for key, norm in of_parameters(model, step, lambda item, name=name: optimizer.state[item][name]).items()
        }

    kinds = {row.entry.kind for row in found.rows}
    assert close(
        training.observed(state), {(kind, *key): norm for kind in kinds for key, norm in found.norms(kind).items()}
    )


@pytest.mark.parametrize("amsgrad", [False, True])
def test_histograms_of_adam_update_equal_the_parameter_movement(amsgrad):
    """The reference is the movement itself: (before - after) / lr, in float64."""
    training = Training(amsgrad=amsgrad)
    published = training.watched("adam_updates", adam_updates={"bins": 4, "low": -0.8, "high": 0.8})
    found = {(row["step"], row["tensor"], row["kind"]): row for row in published.of("histograms")}
    expected = {key: -movement.flatten() / 0.05 for key, movement in training.moved().items()}

    assert {(*key, kind) for key in expected for kind in ("adam_update", "adam_ratio")} == found.keys()
    for (step, name), movement in expected.items():
        row = found[step, name, "adam_update"]
        edges = torch.tensor([-0.8, -0.4, 0.0, 0.4, 0.8], dtype=torch.float64)
        assert (movement[:, None] - edges).abs().amin() > 1e-5  # no element is on an edge
        counts = torch.bincount(torch.bucketize(movement, edges), minlength=6).tolist()
        assert [row["below"], *row["counts"], row["above"]] == counts
        assert ("linear:-0.8:0.8:4", 0) == (row["scheme"], row["nonfinite"])


@pytest.mark.parametrize(
    "training",
    [
        Training(optimizer=torch.optim.AdamW, weight_decay=0.3),
        Training(optimizer=torch.optim.SGD, lr=0.5, momentum=0.9),
    ],
)
def test_update_norm_is_the_norm_of_the_parameter_movement(training):
    found = training.watched("parameters", parameters={"updates": True})

    assert {"update_norm"} == {row["kind"] for row in found.of("features")}
    assert close({key: movement.norm().item() for key, movement in training.moved().items()}, features(found))


def test_update_norm_covers_all_optimizers_of_a_step():
    class Two(Training):
        def train(self, model: nn.Module, optimizer: Any) -> None:
            model(batch(1)).square().mean().backward()
            for each in optimizer:
                each.step()

    training = Two()
    training.optimizer = lambda model: [torch.optim.SGD(model[i].parameters(), lr=2.0**i) for i in (0, 2)]
    found = training.watched("parameters", "gradients", parameters={"updates": True})
    model = net()
    model(batch(1)).square().mean().backward()

    norms = {name: item.grad.norm().item() for name, item in model.named_parameters()}
    assert close({(1, name): 2.0 ** int(name[0]) * norm for name, norm in norms.items()}, features(found))


def test_update_norm_is_off_by_default():
    assert [] == Training().watched("parameters").of("features")


def test_histograms_count_non_finite_values():
    class Dead(Training):
        def backward(self, step: int, model: nn.Module) -> None:
            model(batch(step)).square().mean().backward()
            model[0].weight.grad.fill_(float("nan"))
            model[0].bias.grad.zero_()  # 0 / 0 in the ratio, 0 in the update

    rows = [row for row in Dead().watched("adam_updates").of("histograms") if row["step"] == 1]
    found = {(row["tensor"], row["kind"]): row for row in rows}

    assert 54 == found["0.weight", "adam_update"]["nonfinite"]
    assert (0, 9) == (found["0.bias", "adam_update"]["nonfinite"], sum(found["0.bias", "adam_update"]["counts"]))
    assert 9 == found["0.bias", "adam_ratio"]["nonfinite"]


def test_direction_is_the_share_of_equal_signs():
    training = Training()

    def agreement(moment: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Found:
        if moment == "after" or step == 1:
            return {}
        shares = {}
        for name, item in model.named_parameters():
            pairs = zip(item.grad.flatten().tolist(), optimizer.state[item]["exp_avg"].flatten().tolist(), strict=True)
            votes = [1.0 if g * m > 0 else 0.0 if g * m < 0 else 0.5 for g, m in pairs]
            shares[step, name] = sum(votes) / len(votes)
        return shares

    assert close(training.observed(agreement), features(training.watched("direction")))


class Rotation(nn.Module):
    """Complex numbers, stored as such or as pairs of real numbers: Adam updates both equally."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        pairs = torch.randn(3, 4, 2, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
        self.weight = nn.Parameter(torch.view_as_complex(pairs) if whole else pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x[:, :3].to(weight.dtype) @ weight).abs()


@pytest.mark.parametrize(("quantity", "dataset"), [("direction", "features"), ("adam_updates", "histograms")])
def test_complex_number_counts_as_its_two_parts(quantity, dataset):
    found = []
    for whole in (True, False):
        training = Training()
        training.make = lambda whole=whole: Rotation(whole=whole)
        found.append(training.watched(quantity).of(dataset))

    assert found[0]
    assert found[0] == found[1]


def replaced_data(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data * 0.5


def through_numpy(gradient: torch.Tensor) -> None:
    gradient.numpy()[...] *= 0.5


SCALES: dict[str, Callable[[torch.Tensor], object]] = {
    "through data": lambda gradient: gradient.data.mul_(0.5),
    "replaced data": replaced_data,
    "by foreach": lambda gradient: torch._foreach_mul_([gradient.data], 0.5),
    "through numpy": through_numpy,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("clipped_steps", [{10, 11}, {2, 5}])
def test_clipping_without_a_new_version_is_found_at_each_step(scale, clipped_steps):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    reduced, clipped = {}, {}
    with Monitor(config_of("gradients")).attach(net, optimizer) as monitor:
        for step in range(1, 13):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).square().sum().backward()
            for name, parameter in net.named_parameters():
                reduced[step, name] = float(parameter.grad.double().norm())
                if step in clipped_steps:
                    SCALES[scale](parameter.grad)
                    clipped[step, name] = float(parameter.grad.double().norm())
            optimizer.step()
        found = published(monitor)

    assert pytest.approx(clipped, rel=1e-5) == found.norms("grad_clipped")
    assert pytest.approx(reduced, rel=1e-5) == found.norms("grad_reduced")
