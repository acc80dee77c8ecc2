"""Training loops of users: the steps, and each number against the tensor that the loop itself has kept."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.parts import Watched, session_of
from tests.exporter.training.loops import STEPS, Loop, attached, detached
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.func import functional_call, functionalize, grad, grad_and_value, hessian, jvp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_map

from rankscope_exporter.adapters.base import WrappedModel

ONES = torch.ones(3, 4)


def with_duals(net: nn.Module) -> None:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(item, torch.ones_like(item)) for name, item in detached(net).items()}
        functional_call(net, duals, (ONES,))


FOREIGN: tuple[Callable[[nn.Module], object], ...] = (
    lambda net: grad(lambda own: functional_call(net, own, (ONES,)).sum())(detached(net)),
    lambda net: vmap(grad(lambda x: net(x).sum()))(ONES),
    lambda net: jvp(net, (ONES,), (ONES,)),
    lambda net: hessian(lambda x: net(x).sum())(ONES),
    lambda net: functionalize(net)(ONES),
    with_duals,
)


def test_foreign_forward_passes_between_steps_change_no_step():
    """Those of tracers are in the tests of `adapters.tracing`."""
    loop, optimizer = attached("activations")
    for step, foreign in enumerate(FOREIGN, 1):
        loop.step(step, optimizer)
        foreign(loop.net)
    loop.end(len(FOREIGN))

    assert {None, 0} == {micro_step for _, _, micro_step in loop.indices}
    assert (0, [], []) == (loop.faults, loop.skipped(), loop.messages("note"))


@pytest.mark.parametrize("logs_first", [True, False])
def test_loop_under_transforms_has_steps_by_its_updates(logs_first):
    loop, optimizer = attached("activations")
    own_loss = lambda own, x: functional_call(loop.net, own, (x[None],)).square().sum()  # noqa: E731
    per_sample = vmap(grad_and_value(own_loss), in_dims=(None, 0))
    for step in range(1, STEPS + 1):
        gradients, losses = per_sample(detached(loop.net), torch.randn(3, 4))
        loop.losses[step] = float(losses.mean())
        if logs_first:
            loop.monitor.log(loss=losses.mean())
        for name, parameter in loop.net.named_parameters():
            parameter.grad = gradients[name].mean(0)
        loop.note(step, "grad_reduced")
        optimizer.step()
        loop.note(step, "param_after")
        loop.note_state(step, "exp_avg", optimizer)
        if not logs_first:
            loop.monitor.log(loss=losses.mean())
    loop.end()

    assert not {kind for _, kind, _ in loop.indices if kind.startswith("act_")}
    assert 1 == len([text for text in loop.messages("note") if "torch.func" in text])
    assert 0 == loop.faults


def test_forward_pass_under_a_transform_is_a_sign_of_life():
    loop = Loop()
    loop.attach(loop.adam())
    watchdog = session_of(loop.monitor).watchdog
    before = watchdog.active_at
    vmap(loop.net)(torch.randn(3, 4))
    loop.monitor.detach()

    assert watchdog.active_at > before


def test_number_logged_inside_a_transform_is_published():
    loop, optimizer = attached()

    def objective(own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        loss = functional_call(loop.net, own, (x,)).square().sum()
        loop.monitor.log(loss=loss)
        return loss

    for step in range(1, STEPS + 1):
        gradients, loss = grad_and_value(objective)(detached(loop.net), torch.randn(3, 4))
        loop.losses[step] = float(loss)
        for name, parameter in loop.net.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    loop.end()

    assert 0 == loop.faults


def halves(net: nn.Module) -> None:
    """Train with the whole batch, and with its halves if it is too large."""
    batch = torch.randn(4, 4)
    try:
        net(batch).square().sum().backward()
    except torch.OutOfMemoryError:
        for half in batch.split(2):
            net(half).square().sum().backward()


def test_forward_pass_that_ran_out_of_memory_is_no_micro_batch():
    loop, optimizer = attached("activations", "structure")
    limit = [2]

    def too_large(_module: nn.Module, args: Any) -> None:
        if len(args[0]) > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    loop.net[2].register_forward_pre_hook(too_large)
    for step in range(1, STEPS + 1):
        limit[0] = 2 if step % 2 else 4
        optimizer.zero_grad()
        halves(loop.net)
        loop.note(step, "grad_reduced")
        optimizer.step()
    loop.end()

    expected = {(step, index) for step in range(1, STEPS + 1) for index in range(1 + step % 2)}
    assert expected == {(step, index) for step, kind, index in loop.indices if kind == "act_out"}
    modules = [row for record in loop.records for row in record.modules if record.step == 1]
    assert {(2, 4), (2, 8), (2, 2)} >= {tuple(item["shape"]) for row in modules for item in json.loads(row["inputs"])}
    assert 0 == loop.faults


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


Change = Callable[[nn.Module], object]


PARAMETRIZED: tuple[Change, Change] = (
    lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    lambda layer: parametrize.remove_parametrizations(layer, "weight"),
)


PRUNED: tuple[Change, Change] = (
    lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    lambda layer: prune.remove(layer, "weight"),
)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("changes", "first"), [(PRUNED, 3), (PARAMETRIZED, 3), (PARAMETRIZED, 0)])
def test_parameter_under_another_name_is_measured_further(changes, first, every):
    """The first change is before step 3, or before attach(); the second one undoes it three steps later."""
    loop = Loop("micro_gradients", every=every)
    if not first:
        changes[0](loop.net[2])
    optimizer = loop.adam()
    loop.attach(optimizer)
    own = dict(loop.net.named_parameters())
    for step in range(1, 8):
        for change, moment in zip(changes, (first, first + 3), strict=True):
            if step == moment:
                change(loop.net[2])
        optimizer.zero_grad()
        for _ in range(2):
            loop.net(torch.randn(3, 4)).square().sum().backward()
        if step % every == 1 % every:
            loop.note(step, "grad_reduced", {key: item.grad for key, item in own.items()})
        optimizer.step()
        if step % every == 1 % every:
            loop.note(step, "param_after", dict(own))
    loop.end(7)

    assert (0, []) == (loop.faults, loop.skipped())


class Root(nn.Module):
    """Its forward pass calls itself, and trains a part of it with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.fast, self.leave = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.inner = torch.optim.SGD(self.fast.parameters(), lr=0.05)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        if depth < 0:
            raise ArithmeticError
        if depth:
            with contextlib.suppress(ArithmeticError):
                self(x, -1)
            return self.leave(self(x, depth - 1))  # type: ignore[no-any-return]
        hidden: torch.Tensor = self.enter(x)
        with torch.enable_grad():
            (self.fast(hidden.detach()) - hidden.detach()).square().mean().backward()
        self.inner.step()
        self.inner.zero_grad()
        return hidden


def test_calls_and_updates_inside_of_the_forward_pass_are_part_of_it():
    loop = Loop("activations", net=Root())
    optimizer = loop.adam(loop.net.enter, loop.net.leave)
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        for _ in range(2):
            loop.backward()
        for name in ("enter.weight", "leave.weight"):
            loop.note(step, "grad_reduced", {name: loop.net.get_parameter(name).grad})
        optimizer.step()
        optimizer.zero_grad()
        loop.net.eval()
        loop.net(torch.randn(3, 4))
        loop.net.train()
    loop.end()

    assert [] == loop.messages("note") + loop.skipped()
    assert {0, 1} == {row.entry.micro_step for row in loop.rows("act_out") if row.entry.tensor in ("enter", "leave")}
    assert 4 * STEPS == sum(row.entry.tensor in ("enter", "leave") for row in loop.rows("act_out"))
    assert {None} == {row.entry.call_seq for row in loop.rows("act_out") if (2,) == row.entry.shape[1:]}


@pytest.mark.parametrize("way", ["dropped", "kept", "last", "used"])
def test_forward_pass_without_a_backward_pass_is_no_micro_batch(way):
    """The script drops or keeps the result of one pass, or adds it to the loss."""
    loop = Loop("activations", "micro_gradients")
    optimizer = loop.adam()
    loop.attach(optimizer)
    kept = []
    for step in range(1, STEPS + 1):
        passes = [torch.full((3, 4), torch.nan if way != "used" and step == 2 else 1.0), torch.randn(3, 4)]
        results = [loop.net(x) for x in (passes[::-1] if way == "last" else passes)]
        used = results.pop(0 if way == "last" else 1)
        loop.right[step, "act_out", ""] = used.detach().clone()
        loss = used.square().sum() + (results[0].square().sum() if way == "used" else 0)
        kept += results if way == "kept" else []
        del results
        loss.backward()
        loop.note(step, "grad_reduced")
        optimizer.step()
        loop.note(step, "param_after")
        optimizer.zero_grad()
    loop.end()

    numbers = {row.entry.micro_step for row in loop.rows("act_out", "act_grad_in")}
    assert ({0, 1} if way == "used" else {0}) == numbers
    assert [] == loop.events("anomaly")


CALLS: list[Any] = []


class Counted(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS.append(func)
        own = lambda item: item.inner if isinstance(item, Wrapped) else item  # noqa: E731
        found = func(*tree_map(own, args), **tree_map(own, kwargs or {}))
        return tree_map(lambda item: Wrapped(item) if isinstance(item, torch.Tensor) else item, found)


def calls_of_subclass(place: str, *, watched: bool) -> list[str]:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    loop = Loop("activations", "micro_gradients", "structure", "linear", net=net)
    if place == "parameter":
        net[0].weight = nn.Parameter(net[0].weight.detach().as_subclass(Counted))
    optimizer = loop.adam()
    CALLS.clear()
    if watched:
        loop.attach(optimizer)
    for _ in range(STEPS):
        batch = torch.randn(3, 4)
        made = {"input": lambda x: x.as_subclass(Counted), "wrapper": Wrapped, "parameter": lambda x: x}[place](batch)
        net(made).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if watched:
        loop.finish()
        measured = {row.entry.tensor for row in loop.rows("param_after", "act_out")}
        assert {"", "0.weight"} - ({""} if place == "wrapper" else set()) <= measured
        assert any("class Wrapped" in text for text in loop.messages("note")) == (place == "wrapper")
    return [str(call) for call in CALLS]


@pytest.mark.parametrize("place", ["input", "parameter", "wrapper"])
def test_tensor_classes_of_the_script_see_no_call_of_the_monitor(place):
    assert calls_of_subclass(place, watched=False) == calls_of_subclass(place, watched=True) != []


@pytest.mark.parametrize("sums", [True, None])
@pytest.mark.parametrize("hook", ["after accumulation", "before attach", "after attach"])
def test_gradients_with_hooks_of_the_script_are_not_those_of_this_rank(monkeypatch, hook, sums):
    """Such hooks may reduce gradients, and the rank is one of two."""
    monkeypatch.setattr(WrappedModel, "copies", lambda *_: 2)
    loop, is_before = Loop("micro_gradients"), hook != "after accumulation"
    loop.settings["options"] = {"gradients": {"sum_micro_batches": sums}}
    optimizer, weight = loop.adam(), loop.net[0].weight
    if hook == "after accumulation":
        weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad / 2))
    elif hook == "before attach":
        weight.register_hook(lambda gradient: gradient / 2)
    loop.attach(optimizer)
    if hook == "after attach":
        weight.register_hook(lambda gradient: gradient / 2)
    for step in range(1, STEPS + 1):
        loop.backward()
        loop.note(step, "grad_reduced")
        optimizer.step()
        optimizer.zero_grad()
    loop.end()

    rows = {(row.entry.tensor, row.entry.micro_step) for row in loop.rows("grad_unreduced")}
    assert {("0.bias", None), ("0.bias", 0)} <= rows
    expected = set() if is_before else {0, None} if sums else {0}
    assert expected == {micro_step for tensor, micro_step in rows if tensor == "0.weight"}
    assert (is_before or not sums) == any("hooks of other code" in text for text in loop.messages("note"))


def test_scripted_model_has_steps_and_gradients():
    loop = Loop("activations", net=torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))))
    optimizer = loop.adam()
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        loop.backward()
        loop.note(step, "grad_reduced")
        optimizer.step()
        loop.note(step, "param_after")
        optimizer.zero_grad()
    loop.end()

    assert "torch.jit.script" in loop.messages("note")[0]


def test_numbers_of_epochs_do_not_replace_numbers_of_steps():
    loop = Loop()
    optimizer = loop.adam()
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        loop.backward()
        optimizer.step()
        loop.monitor.log(own=step)
        if step % 2 == 0:
            loop.monitor.log(accuracy=step, step=step // 2)
    loop.end()

    assert [(step, step) for step in range(1, STEPS + 1)] == loop.scalars("own")
    assert [(1, 2), (2, 4)] == loop.scalars("accuracy")
    assert 1 == len(loop.messages("note"))


def test_numbers_logged_without_a_training_step_are_published():
    loop = Loop()
    loop.attach()
    for step in range(1, 6):
        loop.monitor.log(reward=step, step=step)
    loop.finish()

    assert [(step, step) for step in range(1, 6)] == loop.scalars("reward")


def test_steps_continue_with_a_process_group_and_ddp_that_are_made_again(group):
    """A direct call of the module between two steps is no forward pass of a step."""
    loop = Loop("activations")
    optimizer = loop.adam()
    net, wrapper = loop.net, DistributedDataParallel(loop.net)
    Watched.__init__(loop, wrapper, optimizer, **loop.settings)
    loop.net = net
    for step in range(1, STEPS + 1):
        if step == STEPS - 1:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            wrapper = DistributedDataParallel(net, gradient_as_bucket_view=True)
        wrapper(torch.randn(3, 4)).square().sum().backward()
        loop.note(step, "grad_reduced")
        optimizer.step()
        loop.note(step, "param_after")
        optimizer.zero_grad()
        net(torch.randn(3, 4))
    loop.end()

    assert not loop.session.monitored.framework.traits.local_until_backward_ends  # its gradients are in the buckets
    assert {(step, 0) for step in range(1, STEPS + 1)} == {
        (row.step, row.entry.micro_step) for row in loop.rows("act_out") if row.entry.tensor == "0"
    }


@pytest.mark.parametrize("enabled", [True, False])
def test_evaluation_of_a_pipeline_changes_no_row_of_a_finished_update(group, enabled):
    """Torch divides the gradients again: before the update, those that the optimizer gets."""
    loop = Loop("activations")
    optimizer, net, stage = loop.adam(), loop.net, PipelineStage(loop.net, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    Watched.__init__(loop, stage, optimizer, **loop.settings)
    loop.net = net
    with torch.set_grad_enabled(mode=enabled):
        for step in range(1, STEPS + 1):
            with torch.enable_grad():
                schedule.step(torch.randn(4, 4), target=torch.randn(4, 2))
            if step % 2:
                schedule.eval(torch.randn(4, 4), target=torch.randn(4, 2))
            loop.note(step, "grad_reduced")
            optimizer.step()
            loop.note(step, "param_after")
            schedule.eval(torch.randn(4, 4), target=torch.randn(4, 2))
            optimizer.zero_grad()
    loop.end()

    assert [1, 2, 3, 4] == loop.steps("grad_unreduced")
    assert {0, 1} == {row.entry.micro_step for row in loop.rows("act_out")}
