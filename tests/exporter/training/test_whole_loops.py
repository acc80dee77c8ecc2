"""Training loops of users: the steps, and each number against the tensor that the loop itself has kept."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.parts import Watched, session_of
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.func import functional_call, functionalize, grad, grad_and_value, hessian, jvp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_map

from rankscope_exporter.adapters.base import WrappedModel
from rankscope_exporter.api.attachment import ReplicaDedup
from rankscope_exporter.monitors.throughput import ThroughputConfig

STEPS = 4
PLAIN = ("parameters", "gradients", "optimizer_state")
Key = tuple[int, str, str]


class Loop(Watched):
    def __init__(self, *more: str, net: nn.Module | None = None, explicit: bool = False, every: int = 1) -> None:
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.right: dict[Key, torch.Tensor | None] = {}
        self.losses: dict[int, float] = {}
        self.settings: dict[str, Any] = {
            "quantities": (*PLAIN, *more),
            "every": every,
            "steps": "explicit" if explicit else "auto",
            "throughput": ThroughputConfig(method="off"),  # on a GPU, its absence would be one more notice
        }

    def adam(self, *modules: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for module in modules or (self.net,) for p in module.parameters()], lr=0.01)

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__(self.net, optimizers, **self.settings)

    def note(self, step: int, kind: str, tensors: dict[str, torch.Tensor | None] | None = None) -> None:
        """Keep the tensors of the model that `kind` names, or `tensors`."""
        for name, parameter in self.net.named_parameters():
            own = parameter.grad if kind.startswith("grad") else parameter
            if tensors is None and own is not None:
                self.right[step, kind, name] = own.detach().clone()
        for name, tensor in (tensors or {}).items():
            self.right[step, kind, name] = None if tensor is None else tensor.detach().clone()

    def note_state(self, step: int, kind: str, optimizer: torch.optim.Optimizer, key: str | None = None) -> None:
        self.note(step, kind, {n: optimizer.state[p][key or kind] for n, p in self.net.named_parameters()})

    def backward(self) -> float:
        loss = self.net(torch.randn(3, 4)).square().sum()
        loss.backward()
        return loss.item()

    def step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.losses[step] = self.backward()
        self.note(step, "grad_reduced")
        optimizer.step()
        self.note(step, "param_after")
        self.monitor.log(loss=self.losses[step])

    def end(self, steps: int | None = STEPS) -> None:
        """End the training, and compare its records with the tensors of the loop and the number of its steps."""
        self.finish()
        rows = self.rows()
        self.indices = {(row.step, row.entry.kind, row.entry.micro_step) for row in rows}
        numbers = {(row.step, row.entry.kind, row.entry.tensor): row.numbers for row in rows}
        assert self.losses == pytest.approx(dict(self.scalars("loss")), rel=1e-5)
        for key, tensor in self.right.items():
            if tensor is None:
                assert key not in numbers
            else:
                found = numbers[key]["norm"], numbers[key]["numel"]
                assert pytest.approx((float(tensor.double().norm()), tensor.numel()), rel=1e-5, abs=1e-6) == found, key
        if steps is not None:
            assert list(range(1, steps + 1)) == list(dict.fromkeys(r.step for r in self.records if r.step is not None))


def attached(*more: str, **options: Any) -> tuple[Loop, torch.optim.Optimizer]:
    loop = Loop(*more, **options)
    optimizer = loop.adam()
    loop.attach(optimizer)
    return loop, optimizer


ONES = torch.ones(3, 4)


def detached(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


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


# Optimizers and parameters.


def test_optimizer_made_after_attach_is_observed():
    loop = Loop()
    loop.attach()
    optimizer = loop.adam()
    for step in range(1, STEPS + 1):
        loop.step(step, optimizer)
        loop.note_state(step, "exp_avg_sq", optimizer)
    loop.end()

    assert ["an optimizer unknown to attach() stepped: the monitor now observes AdamW"] == loop.messages("note")


@pytest.mark.parametrize("case", ["new", "two", "old", "one_layer"])
def test_steps_continue_after_an_assigned_state_dict(case):
    loop = Loop()
    parts = (loop.net[0], loop.net[2])
    optimizers = [loop.adam()] if case in ("new", "old") else [loop.adam(part) for part in parts]
    loop.attach(*optimizers)
    state = {name: tensor.clone() for name, tensor in loop.net.state_dict().items()}
    for step in range(1, 2 * STEPS):
        if step in (STEPS, STEPS + 2):
            names = ("2.weight", "2.bias") if case == "one_layer" else tuple(state)
            loop.net.load_state_dict({name: state[name].clone() for name in names}, strict=False, assign=True)
            if case != "old":
                kept = optimizers[:1] if case == "one_layer" else []
                made = {"new": (loop.net,), "two": parts, "one_layer": parts[1:]}[case]
                optimizers = [*kept, *(loop.adam(part) for part in made)]
        loop.net.zero_grad()
        loop.losses[step] = loop.backward()
        for optimizer in optimizers:
            optimizer.step()
        loop.monitor.log(loss=loop.losses[step])
    loop.end(2 * STEPS - 1)

    assert [] == loop.skipped()


def test_replaced_optimizer_is_not_reported_as_absent():
    """The old one is freed before the sampled step at which a training without an optimizer is reported."""
    loop, optimizer = attached()
    for step in range(1, STEPS + 1):
        if step == 4:
            loop.optimizer = optimizer = loop.adam()
        loop.step(step, optimizer)
        loop.note_state(step, "exp_avg_sq", optimizer)
    loop.end()

    assert ["the optimizer was replaced after attach(): the monitor now observes AdamW"] == loop.messages("note")


def test_optimizer_that_steps_again_after_its_replacement_is_measured():
    loop = Loop()
    optimizers = [torch.optim.SGD(loop.net.parameters(), lr=0.01, momentum=0.9), loop.adam()]
    loop.attach(optimizers[0])
    for step in range(1, 2 * STEPS):
        loop.step(step, optimizers[step % 2 == 0])
        kind, key = ("exp_avg", "exp_avg") if step % 2 == 0 else ("momentum", "momentum_buffer")
        loop.note_state(step, kind, optimizers[step % 2 == 0], key)
    loop.end(2 * STEPS - 1)

    assert 1 == len(loop.messages("note"))


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


# Gradients and the optimizers to which they belong.


@pytest.mark.parametrize(("order", "critic_steps"), [("DG", 1), ("GD", 1), ("DG", 5)])
def test_rows_of_a_gan_have_the_gradients_that_the_optimizers_received(order, critic_steps):
    generator, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    loop = Loop("micro_gradients", net=nn.ModuleDict({"G": generator, "D": critic}), explicit=True)
    of_generator, of_critic = loop.adam(generator), loop.adam(critic)
    loop.attach(of_generator, of_critic)

    def update(step: int, name: str, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        own = {f"{name}.{key}": item for key, item in loop.net[name].named_parameters()}
        loop.note(step, "grad_reduced", {key: item.grad for key, item in own.items()})
        torch.nn.utils.clip_grad_norm_(own.values(), 0.01)
        loop.note(step, "grad_clipped", {key: item.grad for key, item in own.items()})
        optimizer.step()

    noise = torch.randn(5, 4)
    for step in range(1, STEPS + 1):
        loop.note(step, "param_before")
        for name in order:
            for _ in range(critic_steps if name == "D" else 1):
                if name == "D":
                    fake = generator(noise).detach()
                    update(step, "D", of_critic, lambda fake=fake: critic(fake).square().mean() - critic(fake).mean())
                elif step % 3:
                    update(step, "G", of_generator, lambda: (critic(generator(noise)) - 1).square().mean())
                else:  # gradients of the step before, and of no loss of this step
                    loop.note(step, "grad_reduced", dict.fromkeys(("G.weight", "G.bias")))
        loop.note(step, "param_after")
        loop.monitor.end_step()
    loop.end()

    assert [] == loop.messages("note")


@pytest.mark.parametrize(("is_known", "is_registered_first"), [(True, True), (True, False), (False, True)])
def test_update_inside_the_backward_pass_belongs_to_this_pass(is_known, is_registered_first):
    loop = Loop("activations", "direction")
    names = {parameter: name for name, parameter in loop.net.named_parameters()}
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in names}
    step = 1

    def update(parameter: torch.Tensor) -> None:
        loop.note(step, "grad_reduced", {names[parameter]: parameter.grad})
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        loop.note(step, "param_after", {names[parameter]: parameter})

    def register() -> None:
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(update)

    for task in (register, lambda: loop.attach(*optimizers.values() if is_known else ()))[
        :: 1 - 2 * (not is_registered_first)
    ]:
        task()
    for step in range(1, STEPS + 1):
        if step > 1 or is_known:
            loop.note(step, "param_before")
        loop.losses[step] = loop.backward()
        loop.monitor.log(loss=loop.losses[step])
    loop.end()

    assert (0 if is_known else 1) == len(loop.messages("note"))
    assert [] == loop.skipped()


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


def test_step_that_creates_the_state_of_a_checkpoint_is_no_update():
    loop = Loop()
    optimizer = torch.optim.SGD(loop.net.parameters(), lr=0.05)  # its state is empty
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        loop.backward()
        optimizer.step()
        loop.note(step, "param_after")
        optimizer.zero_grad()
        get_state_dict(loop.net, optimizer)
    loop.end()

    assert {0.05} == {rate for _, rate in loop.scalars("learning_rate")}


def test_update_that_raises_ends_its_step():
    loop = Loop()
    optimizer = loop.adam()
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        loop.backward()
        loop.note(step, "grad_reduced")
        if step == STEPS - 1:
            optimizer.param_groups[0]["betas"] = None
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        else:
            optimizer.step()
            loop.note(step, "param_after")
        optimizer.zero_grad()
    loop.end()

    assert [STEPS - 1] == loop.skipped()
    assert STEPS - 1 not in loop.steps("param_after")


@pytest.mark.parametrize("of_all", [True, False])
def test_parameters_copied_from_the_optimizer_are_read_after_the_copy(of_all):
    loop = Loop()
    own = [parameter for parameter in loop.net.parameters() if of_all or parameter.dim() == 2]
    others = [parameter for parameter in loop.net.parameters() if not (of_all or parameter.dim() == 2)]
    copies = [parameter.detach().clone().requires_grad_() for parameter in own]
    optimizer = torch.optim.Adam([*copies, *others], lr=0.05)
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        loop.note(step, "param_before")
        optimizer.zero_grad()
        loop.backward()
        for copy, parameter in zip(copies, own, strict=True):
            copy.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, own, strict=True):
                parameter.copy_(copy)
        loop.note(step, "param_after")
    loop.end()

    assert 1 == len([text for text in loop.messages("note") if "are in no optimizer" in text])


class OwnGradients(torch.optim.SGD):
    """Computes gradients inside of its step: of another loss, which it does not keep, or those of the update."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), lr=0.05)
        self.net = [net]

    def step(self, batch: Any) -> None:
        loss = self.net[0](batch).square().sum()
        torch.autograd.grad(loss * 3, [*self.net[0].parameters()], retain_graph=True)
        if self.param_groups[0]["params"][0].grad is None:
            (loss * 2).backward()
            self.zero_grad()
            self.net[0](batch).sum().backward()
        super().step()


@pytest.mark.parametrize("computes", [True, False])
def test_gradients_that_an_optimizer_computes_inside_of_its_step(computes):
    """Without an earlier backward pass, the gradients of the update are the last ones."""
    loop = Loop("activations")
    optimizer = OwnGradients(loop.net)
    loop.attach(optimizer)
    for step in range(1, STEPS + 1):
        batch = torch.randn(3, 4)
        optimizer.zero_grad()
        if not computes:
            result = loop.net(batch)
            result.square().sum().backward()
            loop.right[step, "act_grad_out", ""] = 2 * result.detach()
        optimizer.step(batch)
        loop.note(step, "grad_reduced")
        loop.note(step, "param_after")
    loop.end()

    assert computes == (loop.steps("act_grad_out") == [])


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


@pytest.mark.parametrize("deletes", [True, False])
def test_updates_by_hand_end_steps(deletes):
    loop = Loop()
    loop.attach()
    for step in range(1, STEPS + 1):
        for _ in range(2):
            loss = loop.backward()
        loop.note(step, "grad_reduced")
        loop.losses[step] = loss
        loop.monitor.log(loss=loss)
        with torch.no_grad():
            for parameter in loop.net.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
                if deletes:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()
    loop.end()

    assert [] == loop.skipped()


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


def test_update_inside_the_backward_pass_of_fsdp2_has_reduced_gradients(group, monkeypatch):
    """A parameter of which another rank publishes the rows has no rows."""
    dedup = ReplicaDedup(frozenset([0]))
    monkeypatch.setattr("rankscope_exporter.api.attachment.find_replica_dedup", lambda *_: dedup)
    loop = Loop()
    fully_shard(loop.net, mesh=init_device_mesh("cpu", (1,)))
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in loop.net.parameters()}
    names = {parameter: name for name, parameter in loop.net.named_parameters()}

    def note(kind: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        loop.note(step, kind, {names[parameter]: None if names[parameter] == "0.weight" else tensor.to_local()})

    def update(parameter: torch.Tensor) -> None:
        note("grad_reduced", parameter, parameter.grad)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        note("param_after", parameter, parameter)

    for parameter in loop.net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    loop.attach(*optimizers.values())
    for step in range(1, STEPS + 1):  # noqa: B007 - read by the hook
        loop.backward()
    loop.end()

    assert [] == loop.messages("note")


def test_gradients_deleted_inside_the_backward_pass_are_an_update():
    loop = Loop()

    def update(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.01)
        parameter.grad = None

    for parameter in loop.net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    loop.attach(loop.adam())
    for step in range(1, STEPS + 1):
        loop.losses[step] = loop.backward()
        loop.note(step, "param_after")
        loop.monitor.log(loss=loop.losses[step])
    loop.end()

    assert [] == loop.skipped()
    assert 1 == len([text for text in loop.messages("note") if "gradients are deleted before" in text])


@pytest.mark.parametrize("tasks", [2, 3])
def test_gradient_surgery_is_one_step(tasks):
    loop, optimizer = attached()
    for step in range(1, STEPS + 1):
        output, found = loop.net(torch.randn(3, 4)), []
        for task in range(tasks):
            optimizer.zero_grad()
            (output - task).square().sum().backward(retain_graph=True)
            found.append([parameter.grad.clone() for parameter in loop.net.parameters()])
        for parameter, *gradients in zip(loop.net.parameters(), *found, strict=True):
            parameter.grad = sum(gradients) - 0.1 * gradients[0] * gradients[-1].sign()
        loop.note(step, "grad_clipped")
        optimizer.step()
        loop.note(step, "param_after")
    loop.end()

    assert ([], []) == (loop.skipped(), loop.messages("note"))


def sam(loop: Loop, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loop.backward()
    moved = [0.01 * parameter.grad for parameter in loop.net.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(loop.net.parameters()), moved)
    optimizer.zero_grad()
    loop.backward()
    with torch.no_grad():
        torch._foreach_sub_(list(loop.net.parameters()), moved)
    optimizer.step()


def lookahead(loop: Loop, optimizer: torch.optim.Optimizer) -> None:
    slow = detached(loop.net)
    for _ in range(2):
        optimizer.zero_grad()
        loop.backward()
        optimizer.step()
    with torch.no_grad():
        for name, parameter in loop.net.named_parameters():
            parameter.lerp_(slow[name], 0.5)


@pytest.mark.parametrize(("update", "is_named"), [(sam, True), (lookahead, False)])
def test_passes_of_one_update_are_no_skipped_steps_and_are_named_once(update, is_named):
    loop, optimizer = attached()
    for _ in range(2 * STEPS):
        update(loop, optimizer)
    loop.end(None)

    assert is_named == len([text for text in loop.messages("note") if 'steps="explicit"' in text])
    assert [] == loop.skipped()


def test_loop_without_an_optimizer_has_no_skipped_steps():
    loop = Loop()
    loop.attach()
    for step in range(1, STEPS + 1):
        loop.net.zero_grad()
        loop.losses[step] = loop.backward()
        with torch.no_grad():
            torch._foreach_sub_([*loop.net.parameters()], [0.01 * item.grad for item in loop.net.parameters()])
        loop.monitor.log(loss=loop.losses[step])
    loop.end()

    assert [] == loop.skipped()


@pytest.mark.parametrize("every", [1, 100])
def test_updates_that_the_loop_leaves_out_are_reported_as_skipped(every):
    loop, optimizer = attached(every=every)
    skipped = {1, 4, 5, 8}
    for step in range(1, 9):
        optimizer.zero_grad()
        loop.backward()
        if step not in skipped:
            optimizer.step()
    optimizer.zero_grad()
    loop.monitor.end_step(skipped=True)
    loop.end(8)

    assert sorted(skipped) == loop.skipped()
