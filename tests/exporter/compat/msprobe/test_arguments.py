"""Tests of both argument orders, which are distinguished by type, and of the errors for wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankscope_exporter import ConfigError
from rankscope_exporter.compat.msprobe.trainer_mon import Attachment, Construction, first_step, wrong_hints

NET = nn.Linear(2, 2)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
DATA, TENSOR = object(), object()


class Group:
    """A process group with the methods that the check calls."""

    def rank(self) -> int:
        return 0


class Wrapper:
    """An optimizer around another one, as in DeepSpeed and Accelerate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Index:
    """An integer type other than int, as in numpy."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


MEANT = Attachment(model=NET, optimizer=SGD, grad_acc_steps=8, dp_group=DATA, tp_group=TENSOR, start_iteration=5)


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((NET, 8, SGD, DATA, TENSOR, 5), {}),
        ((NET, SGD, 8, TENSOR, DATA, 5), {}),
        ((NET, 8), {"optimizer": SGD, "dp_group": DATA, "tp_group": TENSOR, "start_iteration": 5}),
        ((NET, SGD), {"grad_acc_steps": 8, "tp_group": TENSOR, "dp_group": DATA, "start_iteration": 5}),
        ((NET, 8, SGD, DATA), {"tp_group": TENSOR, "start_iteration": 5}),
        ((NET,), {"optimizer": SGD, "grad_acc_steps": 8, "dp_group": DATA, "tp_group": TENSOR, "start_iteration": 5}),
        ((), {"model": NET, "optimizer": SGD, "grad_acc_steps": 8, "dp_group": DATA, "tp_group": TENSOR,
              "start_iteration": 5}),
    ],
)  # fmt: skip
def test_manual_and_code_argument_orders_are_equivalent(positional, named):
    given = Attachment.of("set_monitor", positional, named)
    given.check("set_monitor")

    assert MEANT == given


@pytest.mark.parametrize("steps", [Index(8), torch.tensor(8), 8.0])
def test_any_number_type_decides_the_argument_order(steps):
    given = Attachment.of("set_monitor", (NET, steps, SGD), {})
    given.check("set_monitor")

    assert (SGD, steps) == (given.optimizer, given.grad_acc_steps)
    assert [] == hints(grad_acc_steps=Index(8), start_iteration=torch.tensor(3))


def test_missing_arguments_have_msprobes_defaults():
    given = Attachment.of("set_monitor", (NET, SGD), {})

    assert (1, None, None, 0) == (given.grad_acc_steps, given.dp_group, given.tp_group, given.start_iteration)


@pytest.mark.parametrize(
    ("positional", "named", "words"),
    [
        ((NET,), {}, "needs the optimizer"),
        ((), {"optimizer": SGD}, "needs the model"),
        ((SGD, NET), {}, "are exchanged"),
        ((5, SGD), {}, "model must be a torch module or a list of its chunks, not a int"),
        (([NET, 3], SGD), {}, "model must be a torch module or a list of its chunks, not a list of Linear, int"),
        (([], SGD), {}, "a list of nothing"),
        ((NET, "adam"), {}, "optimizer must be a torch optimizer or wrap one, not a str"),
        ((NET, SGD), {"optimizer": SGD}, "optimizer is given by position and by name"),
        ((NET, SGD), {"grad_acc": 4}, "no argument 'grad_acc'; its arguments are model, optimizer, grad_acc_steps"),
        ((NET, 8, SGD, None, None, 0, 1), {}, "takes 6 arguments by position, not 7"),
    ],
)
def test_wrong_argument_is_rejected_with_the_correct_form(positional, named, words):
    with pytest.raises(ConfigError, match=words):
        Attachment.of("set_monitor", positional, named).check("set_monitor")


GROUP = Group()


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((GROUP, False, "Megatron_DistributedOptimizer"), {}),
        ((GROUP,), {"params_have_main_grad": False, "opt_ty": "Megatron_DistributedOptimizer"}),
        ((False, "Megatron_DistributedOptimizer"), {"process_group": GROUP}),
        ((), {"process_group": GROUP, "param_have_main_grad": False, "opt_ty": "Megatron_DistributedOptimizer"}),
    ],
)
def test_constructor_accepts_old_and_new_orders(positional, named):
    meant = Construction(process_group=GROUP, params_have_main_grad=False, opt_ty="Megatron_DistributedOptimizer")

    assert meant == Construction.of(positional, named)


@pytest.mark.parametrize(
    ("positional", "named", "words"),
    [
        ((7,), {}, "process_group must be the process group of the pipeline or None, not 7"),
        ((), {"params_have_main_grad": "no"}, "params_have_main_grad must be True or False, not 'no'"),
        ((), {"main_grad": True}, "no argument 'main_grad'; its arguments are process_group"),
        ((None, True, "x", 4), {}, "TrainerMon takes config_file_path, process_group"),
        ((True,), {"params_have_main_grad": True}, "by position and by name"),
    ],
)
def test_wrong_constructor_argument_is_rejected(positional, named, words):
    with pytest.raises(ConfigError, match=words):
        Construction.of(positional, named)


def hints(*, said: Construction | None = None, **given: Any) -> list[str]:
    return list(wrong_hints(said or Construction(), Attachment(**{"model": NET, "optimizer": SGD, **given})))


def test_correct_and_missing_hints_are_not_reported():
    assert [] == hints()
    assert [] == hints(said=Construction(params_have_main_grad=False), grad_acc_steps=4, start_iteration=7)


def test_wrong_hints_are_reported_without_an_error():
    assert ["params_have_main_grad=True, but no parameter has a main_grad: gradients are read from .grad"] == hints(
        said=Construction(params_have_main_grad=True)
    )
    assert ["opt_ty='Megatron_DistributedOptimizer', but the optimizer is a SGD, and is read as one"] == hints(
        said=Construction(opt_ty="Megatron_DistributedOptimizer")
    )
    assert "opt_ty='adam' is none of Megatron_DistributedOptimizer" in hints(said=Construction(opt_ty="adam"))[0]
    assert "grad_acc_steps=2.5 is no number of micro-batches" in hints(grad_acc_steps=2.5)[0]
    assert "start_iteration='3' is no number of a step" in hints(start_iteration="3")[0]


def test_hint_that_denies_an_existing_main_grad_is_reported():
    net = nn.Linear(2, 2)
    net.weight.main_grad = torch.zeros(2, 2)  # type: ignore[assignment]  # as Megatron does

    assert [] == hints(said=Construction(params_have_main_grad=True), model=[net])
    assert 1 == len(hints(said=Construction(params_have_main_grad=False), model=[net]))


def test_wrapped_optimizer_class_is_found():
    class DistributedOptimizer(Wrapper):
        pass

    assert [] == hints(
        said=Construction(opt_ty="Megatron_DistributedOptimizer"), optimizer=Wrapper(DistributedOptimizer(SGD))
    )


@pytest.mark.parametrize(
    ("given", "step"),
    [(0, 1), (41, 42), (torch.tensor(41), 42), (Index(41), 42), (-1, 1), (1.0, 1), (None, 1), (True, 1), (10**30, 1)],
)
def test_first_step_is_one_more_than_msprobes(given, step):
    assert step == first_step(Attachment(model=NET, start_iteration=given))
