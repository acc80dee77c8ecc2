"""Updates of optimizers, of wrappers and by hand: the steps, and each number against the tensor of the loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.training.loops import STEPS, Loop, attached, detached
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rankscope_exporter.api.attachment import ReplicaDedup


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
