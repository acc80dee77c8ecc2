"""Optimizers that update flat copies, group after group, and the replaced methods of an optimizer."""

import copy
import pickle
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.exporter.adapters.expectations import ALL, GRADIENTS, LOCAL, check
from tests.exporter.adapters.loops import SKIPPED, Loop
from tests.exporter.adapters.observation import Outcome, watched
from tests.exporter.adapters.training import ADAM, CLIP, STEPS, Net, batch, loss_of, truths
from tests.exporter.parts import Watched

from rankscope_exporter.adapters import Framework, framework_of
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod
from rankscope_exporter.adapters.partitioned_optimizer import ParameterPartition, PartitionedOptimizer
from rankscope_exporter.process.errors import ConfigError


class Flattened:
    """An optimizer with one flat tensor per group, which shows its inner optimizer one group at a time."""

    def __init__(self, model: Net) -> None:
        parameters = list(model.parameters())
        self.groups = [parameters[::2], parameters[1::2]]
        self.flats = [torch.cat([item.detach().reshape(-1) for item in group]) for group in self.groups]
        self.optimizer = torch.optim.Adam([{"params": [flat]} for flat in self.flats], **ADAM)

    def places(self) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
        """Return each parameter with its group and its start there."""
        for number, group in enumerate(self.groups):
            start = 0
            for parameter in group:
                yield parameter, number, start
                start += parameter.numel()

    @torch.no_grad()
    def step(self) -> None:
        if all(bool(item.grad.isfinite().all()) for group in self.groups for item in group):
            groups = self.optimizer.param_groups
            for number, flat in enumerate(self.flats):
                flat.grad = CLIP * torch.cat([item.grad.reshape(-1) for item in self.groups[number]])
                self.optimizer.param_groups = [groups[number]]
                self.optimizer.step()
                flat.grad = None
            self.optimizer.param_groups = groups
        for parameter, number, start in self.places():
            parameter.copy_(self.flats[number][start : start + parameter.numel()].view(parameter.shape))
            parameter.grad = None


class OfFlattened(PartitionedOptimizer):
    def __init__(self, model: Net, flattened: Flattened) -> None:
        super().__init__(model)
        self.flattened = flattened
        flats, inner = flattened.flats, flattened.optimizer
        self.parts = {
            id(item): ParameterPartition(flats[group], inner, group, start, item.numel())
            for item, group, start in flattened.places()
        }

    def reduced_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def earlier_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def install(self, hooking: Any) -> None:
        self.watch(self.flattened, "step", hooking)


class FlatLoop(Loop):
    def train(self, optimizer: Any) -> list[Any]:
        losses = []
        for step in range(1, STEPS + 1):
            losses.append(self.backward(step))
            self.attached.flattened.step()
        return losses

    def optimizer(self) -> Any:
        return self.attached.flattened


def flat_loop(*, infinite: bool = False, micros: int = 1) -> FlatLoop:
    model = Net()

    def backward(step: int) -> torch.Tensor:
        for micro in range(micros):
            loss = loss_of(model(batch(0, step, micro))) * (float("inf") if infinite and step == SKIPPED else 1.0)
            loss.backward()
        return loss.detach()

    return FlatLoop(OfFlattened(model, Flattened(model)), model, backward)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return watched(lambda _rank: flat_loop(micros=2), 0)


def test_training_is_bit_identical_and_the_method_is_restored():
    loops: list[FlatLoop] = []

    def make(_rank: int) -> FlatLoop:
        loops.append(flat_loop())
        return loops[-1]

    outcome = watched(make, 0)

    assert ([], 0, []) == (outcome.unequal, outcome.faults, outcome.left)
    assert "step" not in vars(loops[-1].attached.flattened)


def test_every_kind_is_combined_from_the_parts_of_all_groups(outcome):
    """Each micro-batch has its own gradients."""
    for step, truth in enumerate(truths((0,), 2), 1):
        for kind in ALL:
            rows = [row for row in outcome.rows if (str(row.kind), row.step, row.micro_step) == (kind, step, None)]
            check(rows, truth.local(0) if kind == LOCAL else truth.shared[kind], 1e-4)
        for micro in range(2):
            rows = [row for row in outcome.rows if (row.kind, row.step, row.micro_step) == (LOCAL, step, micro)]
            check(rows, truth.micro[0][micro], 1e-4)


class OfScattered(OfFlattened):
    traits = replace(PartitionedOptimizer.traits, reduces_each_micro_batch=None)


def test_missing_sum_over_micro_batches_is_kept_after_it_was_detected():
    def make(_rank: int) -> FlatLoop:
        loop = flat_loop(micros=2)
        loop.attached = OfScattered(loop.model, loop.attached.flattened)
        return loop

    outcome = watched(make, 0)

    assert {(step, micro) for step in range(1, STEPS + 1) for micro in (0, 1, None)} - {(1, None)} == {
        (row.step, row.micro_step) for row in outcome.rows if row.kind == LOCAL
    }
    for step, truth in list(enumerate(truths((0,), 2), 1))[1:]:
        check(
            [row for row in outcome.rows if row.kind == LOCAL and row.step == step and row.micro_step is None],
            truth.local(0),
            1e-4,
        )
    assert ([], 0) == (outcome.unequal, outcome.faults)


def test_update_without_an_optimizer_step_is_a_skipped_step():
    outcome = watched(lambda _rank: flat_loop(infinite=True), 0)

    assert (SKIPPED, "step_skipped") in outcome.events
    assert set(GRADIENTS[:2]) == {row.kind for row in outcome.rows if row.step == SKIPPED and row.kind in ALL}
    assert {1, 2, 3} == {row.step for row in outcome.rows}


def test_learning_rates_of_all_groups_are_logged():
    """A wrapper around the replaced method remains."""
    loop = flat_loop()
    flattened = loop.attached.flattened
    flattened.optimizer.param_groups[1]["lr"] = 0.5
    with Watched(loop.attached, flattened) as attached:
        ours = flattened.step
        flattened.step = lambda: ours()  # noqa: PLW0108 - another's wrapper
        loop.train(None)
        theirs = flattened.step

    assert {ADAM["lr"], 0.5} == {rate for _, rate in attached.scalars("learning_rate")}
    assert theirs is flattened.step
    loop.train(None)


def test_list_of_independent_models_is_rejected():
    with pytest.raises(ConfigError, match="attach a monitor to each model"):
        framework_of([Net(), Net()])

    assert Framework is type(framework_of([Net()]))


class Engine:
    def __init__(self) -> None:
        self.updates = 0

    def update(self, by: int = 1) -> int:
        self.updates += by
        return self.updates


class Passing:
    inner = Engine()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Seen(list[int]):
    def around(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.append(result)
        return result


def test_method_of_an_object_that_forwards_attributes_is_called():
    proxy, seen = Passing(), Seen()
    PatchedMethod(proxy, "update", seen.around)

    assert (2, [2]) == (proxy.update(2), seen)


@pytest.mark.parametrize("removed", [False, True])
def test_copy_of_the_object_is_not_intercepted(removed):
    engine, seen = Engine(), Seen()
    replaced = PatchedMethod(engine, "update", seen.around)
    engine.update()
    file = pickle.dumps(engine)
    copies = (copy.deepcopy(engine), pickle.loads(file))
    if removed:
        replaced.remove()

    assert b"rankscope" not in file
    assert [(2, 3)] * 2 == [(copied.update(), copied.update()) for copied in copies]
    assert (1, [1]) == (engine.updates, seen)


def test_replacement_is_a_method_that_can_be_wrapped_and_bound_again():
    """A learning-rate scheduler of torch reads the function and wraps it in its own method."""
    engine, seen = Engine(), Seen()
    replaced = PatchedMethod(engine, "update", seen.around)
    function = engine.update.__func__
    engine.update = types.MethodType(lambda owner, by: function.__get__(owner, Engine)(by), engine)  # type: ignore[method-assign]
    engine.update(4)
    replaced.remove()

    assert (5, [4]) == (engine.update(1), seen)


def test_method_in_the_instance_is_called_and_restored():
    engine, seen = Engine(), Seen()
    engine.update = types.MethodType(lambda owner, by: Engine.update(owner, 10 * by), engine)  # type: ignore[method-assign]
    before = engine.update
    replaced = PatchedMethod(engine, "update", seen.around)

    assert (10, [10]) == (engine.update(1), seen)
    assert (20, 10, [10]) == (copy.deepcopy(engine).update(1), engine.updates, seen)

    replaced.remove()

    assert before is engine.update
