"""Tests of both argument orders, which are distinguished by type, and of the errors for wrong arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankscope_exporter import ConfigError
from rankscope_exporter.compat.msprobe.trainer_mon import Attachment, Construction, first_step, wrong_hints

NET = nn.Linear(2, 2)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
DATA, TENSOR = object(), object()


class Wrapper:
    """An optimizer around another one, as in DeepSpeed and Accelerate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.step = optimizer, optimizer.step


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
        ((NET, 8, SGD, DATA, TENSOR, 5), ()),
        ((NET, SGD, 8, TENSOR, DATA, 5), ()),
        ((NET, 8, SGD, DATA), ("tp_group", "start_iteration")),
        ((NET, 8), ("optimizer", "dp_group", "tp_group", "start_iteration")),
        ((), ("model", "optimizer", "grad_acc_steps", "dp_group", "tp_group", "start_iteration")),
    ],
)
def test_manual_and_code_argument_orders_are_equivalent(positional, named):
    given = Attachment.of("set_monitor", positional, {name: getattr(MEANT, name) for name in named})
    given.check("set_monitor")

    assert MEANT == given


@pytest.mark.parametrize("steps", [Index(8), torch.tensor(8), 8.0])
def test_any_number_type_decides_the_argument_order(steps):
    given = Attachment.of("set_monitor", (NET, steps, SGD), {})
    given.check("set_monitor")

    assert (SGD, steps) == (given.optimizer, given.grad_acc_steps)
    assert [] == hints(grad_acc_steps=Index(8), start_iteration=torch.tensor(3))


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


GROUP = SimpleNamespace(rank=lambda: 0)
OPT = "Megatron_DistributedOptimizer"


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((GROUP, False, OPT), {}),
        ((False, OPT), {"process_group": GROUP}),
        ((), {"process_group": GROUP, "param_have_main_grad": False, "opt_ty": OPT}),
    ],
)
def test_constructor_accepts_old_and_new_orders(positional, named):
    assert Construction(process_group=GROUP, params_have_main_grad=False, opt_ty=OPT) == Construction.of(
        positional, named
    )


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
    given = Attachment.of("set_monitor", (NET, SGD), {})

    assert (1, None, None, 0) == (given.grad_acc_steps, given.dp_group, given.tp_group, given.start_iteration)
    assert [] == hints()
    assert [] == hints(said=Construction(params_have_main_grad=False), grad_acc_steps=4, start_iteration=7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"said": Construction(opt_ty="adam")}, "opt_ty='adam' is none of Megatron_DistributedOptimizer"),
        ({"grad_acc_steps": 2.5}, "grad_acc_steps=2.5 is no number of micro-batches"),
        ({"start_iteration": "3"}, "start_iteration='3' is no number of a step"),
    ],
)
def test_wrong_hints_are_reported_without_an_error(given, words):
    (sentence,) = hints(**given)

    assert words in sentence


def test_hints_about_main_grad_and_wrapped_optimizers_are_compared():
    class DistributedOptimizer(Wrapper):
        pass

    wrapped, hint = Wrapper(DistributedOptimizer(SGD)), Construction(opt_ty="Megatron_DistributedOptimizer")
    net = nn.Linear(2, 2)
    net.weight.main_grad = torch.zeros(2, 2)  # type: ignore[assignment]  # as Megatron does

    assert [0, 1] == [len(hints(said=Construction(params_have_main_grad=has), model=[net])) for has in (True, False)]
    assert [] == hints(said=hint, optimizer=wrapped)


@pytest.mark.parametrize(
    ("given", "step"),
    [(0, 1), (41, 42), (torch.tensor(41), 42), (Index(41), 42), (-1, 1), (1.0, 1), (None, 1), (True, 1), (10**30, 1)],
)
def test_first_step_is_one_more_than_msprobes(given, step):
    assert step == first_step(Attachment(model=NET, start_iteration=given))
