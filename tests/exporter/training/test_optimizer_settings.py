"""Settings of parameter groups in the records of real trainings, and the steps that exact rules leave out."""

import math

import pytest
import torch
from tests.exporter.training.loops import Loop
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 4
OPTIM = torch.optim
DECAY = {"weight_decay": 0.1}
NO_BETAS = (None, None)


class Inherited(OPTIM.AdamW):
    """Has the step of its base class."""


class OwnStep(OPTIM.AdamW):
    def step(self, closure=None):
        return super().step(closure)


CLASSES = {  # optimizer: betas, is_adam, decays_gradient
    OPTIM.AdamW: ((0.9, 0.999), True, False),
    OPTIM.Adam: ((0.9, 0.999), True, True),
    OPTIM.NAdam: ((0.9, 0.999), True, True),
    OPTIM.RAdam: ((0.9, 0.999), True, True),
    Inherited: ((0.9, 0.999), True, False),
    OwnStep: ((0.9, 0.999), False, False),
    OPTIM.Adamax: ((0.9, 0.999), False, True),
    OPTIM.SGD: (NO_BETAS, False, True),
    OPTIM.RMSprop: (NO_BETAS, False, True),
    OPTIM.Adagrad: (NO_BETAS, False, True),
    OPTIM.Adadelta: (NO_BETAS, False, True),
    OPTIM.ASGD: (NO_BETAS, False, True),
}


def train(loop, optimizers, steps=STEPS, between=lambda step: None):
    """Train; `between` is called before each step with its number."""
    for step in range(1, steps + 1):
        between(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loop.backward()
        for optimizer in optimizers:
            optimizer.step()
        loop.monitor.end_step()


def ended(loop):
    """Return the record with the settings of each step."""
    loop.finish()
    assert loop.faults == 0
    return [record for record in loop.records if record.settings is not None]


def stored(loop, name):
    return [(r.step, s.labels["group"], s.value) for r in loop.records for s in r.scalars if s.name == name]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_settings_of_each_optimizer(kind):
    betas, is_adam, decays_gradient = CLASSES[kind]
    loop = Loop()
    optimizer = kind(loop.net.parameters(), lr=0.01, **DECAY)
    loop.attach(optimizer)
    train(loop, [optimizer])
    found = [record.settings for record in ended(loop)]

    assert [(*betas, 0.1)] == [(group.beta1, group.beta2, group.weight_decay) for group in found[-1].groups]
    assert (is_adam, decays_gradient, False) == found[-1].groups[0][4:]
    assert [0] * 4 == found[-1].group_of.tolist()
    assert [betas[0] is not None and kind is not OPTIM.Adamax] * 4 == found[-1].has_float32_moments.tolist()
    assert found[1] is found[-1]


@pytest.mark.parametrize("kind", [OPTIM.Adam, OPTIM.NAdam, OPTIM.RAdam])
def test_decoupled_decay_is_not_part_of_the_gradient(kind):
    loop = Loop()
    optimizer = kind(loop.net.parameters(), maximize=True, decoupled_weight_decay=True, **DECAY)
    loop.attach(optimizer)
    train(loop, [optimizer])

    assert (True, False, True) == ended(loop)[-1].settings.groups[0][4:]


ODD = {
    "no betas": (lambda group: group.pop("betas"), "beta1", None),
    "one beta": (lambda group: group.update(betas=(0.9,)), "beta1", None),
    "betas of tensors": (lambda group: group.update(betas=(torch.tensor(0.9), torch.tensor(0.99))), "beta2", None),
    "list": (lambda group: group.update(betas=[0.5, 0.75]), "beta2", 0.75),
    "decay without a value": (lambda group: group.update(weight_decay=None), "weight_decay", None),
    "decay of a tensor": (lambda group: group.update(weight_decay=torch.tensor(0.1)), "weight_decay", None),
    "integer": (lambda group: group.update(weight_decay=1), "weight_decay", 1.0),
    "NaN": (lambda group: group.update(eps=math.nan), "eps", math.nan),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_groups_do_not_disturb_training(name):
    change, setting, value = ODD[name]

    class Custom(OPTIM.Optimizer):
        def step(self):
            pass

    loop = Loop()
    optimizer = Custom(loop.net.parameters(), {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, **DECAY})
    change(optimizer.param_groups[0])
    loop.attach(optimizer)
    train(loop, [optimizer])
    (group,) = ended(loop)[-1].settings.groups

    assert pytest.approx(value, nan_ok=True) == getattr(group, setting)
    assert not group.is_adam


def test_numbers_are_stored_at_the_first_step_and_when_they_change():
    loop = Loop()
    first, *others = loop.net.parameters()
    groups = [{"params": [first], "betas": (0.5, 0.75)}, {"params": others, "weight_decay": 0.25}]
    optimizer = OPTIM.AdamW(groups, lr=torch.tensor(0.01), foreach=False, weight_decay=0.125)

    def between(step):
        if step == 3:
            optimizer.param_groups[0] |= {"betas": (0.5, 0.875), "eps": 1e-8}  # eps has the same value
        optimizer.param_groups[1]["lr"].fill_(step / 4)
        if step == 4:
            with torch.no_grad():
                optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "weight_decay": 0.5})

    loop.attach(optimizer)
    train(loop, [optimizer], between=between)
    settings = [record.settings for record in ended(loop)]

    assert [(1, "0", 0.5), (1, "1", 0.9), (4, "2", 0.9)] == stored(loop, "adam_beta1")
    assert [(1, "0", 0.75), (1, "1", 0.999), (3, "0", 0.875), (4, "2", 0.999)] == stored(loop, "adam_beta2")
    assert [(1, "0", 0.125), (1, "1", 0.25), (4, "2", 0.5)] == stored(loop, "weight_decay")
    assert [(1, "0", 1e-8), (1, "1", 1e-8), (4, "2", 1e-8)] == stored(loop, "adam_eps")
    assert [1.0] == [value for step, group, value in stored(loop, "learning_rate") if (step, group) == (4, "1")]
    assert [0, 1, 1, 1] == settings[-1].group_of.tolist()
    assert [[False] * 4, [True] * 4] == [one.has_float32_moments.tolist() for one in (settings[0], settings[-1])]


def test_scheduled_beta_is_stored_at_each_step_and_others_once():
    loop = Loop()
    optimizer = loop.adam()
    scheduler = OPTIM.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    loop.attach(optimizer)
    train(loop, [optimizer], between=lambda step: step > 1 and scheduler.step())
    records = ended(loop)

    assert [1, 2, 3, 4] == [step for step, *_ in stored(loop, "adam_beta1")]
    assert [1] == [step for step, *_ in stored(loop, "adam_beta2")]
    assert [record.settings.groups[0].beta1 for record in records] == [v for *_, v in stored(loop, "adam_beta1")]


LOADS = {
    "model": lambda net, optimizer: net.load_state_dict(net.state_dict()),
    "part of the model": lambda net, optimizer: net[2].load_state_dict(net[2].state_dict()),
    "optimizer": lambda net, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "parameters that replace": lambda net, optimizer: net[0].load_state_dict(net[0].state_dict(), assign=True),
}


@pytest.mark.parametrize("name", LOADS)
def test_step_after_a_load_is_marked(name):
    loop = Loop()
    optimizer = loop.adam()
    loop.attach(optimizer)
    train(loop, [optimizer], between=lambda step: step == 3 and LOADS[name](loop.net, optimizer))
    records = ended(loop)
    LOADS[name](loop.net, optimizer)  # no hook is left

    assert [3] == [record.step for record in records if record.is_loaded]
    assert [] == [hook for module in loop.net.modules() for hook in module._load_state_dict_post_hooks.values()]


def test_moments_of_another_dtype_after_a_load_are_noticed():
    loop = Loop()
    optimizer = loop.adam()

    def between(step):
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            loop.net[0].weight.requires_grad_(False)  # Adam itself would refuse to update it
            optimizer.state[loop.net[0].weight]["exp_avg"] = torch.zeros(8, 4, dtype=torch.bfloat16)

    loop.attach(optimizer)
    train(loop, [optimizer], between=between)

    assert [False, True, True, True] == ended(loop)[-1].settings.has_float32_moments.tolist()


def test_compiled_script_module_refuses_hooks_on_loads():
    loop = Loop(net=torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))))
    optimizer = loop.adam()
    loop.attach(optimizer)
    train(loop, [optimizer])

    assert [] == [record.step for record in ended(loop) if record.is_loaded]


def test_new_optimizer_begins_without_the_state_of_the_last_one():
    loop = Loop()
    optimizers = [loop.adam()]
    loop.attach(*optimizers)

    def between(step):
        if step == 3:
            optimizers[:] = [loop.adam()]

    train(loop, optimizers, between=between)

    assert [3] == [record.step for record in ended(loop) if record.is_loaded]


@pytest.mark.parametrize("updates", [(1, 1), (2, 1), (1, 0)])
def test_only_groups_that_were_updated_once_are_judged(updates):
    """The gradients of the second layer exist, also if its optimizer does not step."""
    loop = Loop(explicit=True)
    optimizers = [loop.adam(loop.net[0]), loop.adam(loop.net[2])]
    loop.attach(*optimizers)
    for _ in range(STEPS):
        for number in range(max(updates)):
            loop.backward()
            for optimizer, count in zip(optimizers, updates, strict=True):
                if number < count:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        loop.monitor.end_step()
    records = ended(loop)

    assert [() if updates == (1, 1) else updates] * STEPS == [record.updates for record in records]
    assert [] == loop.events("anomaly")
    judged = {s.labels["tensor"][0] for r in records for s in r.scalars if s.labels.get("rule") == "AdamBooks"}
    assert {str(2 * number) for number, count in enumerate(updates) if count == 1} >= judged != set()


@pytest.mark.parametrize("wrapper", ["fully_shard", "ZeroRedundancyOptimizer"])
def test_settings_with_divided_state(wrapper, group):
    loop = Loop()
    if wrapper == "fully_shard":
        fully_shard(loop.net, mesh=init_device_mesh("cpu", (1,)))
        optimizer = OPTIM.AdamW(loop.net.parameters(), betas=(0.5, 0.75))
    else:
        optimizer = ZeroRedundancyOptimizer(loop.net.parameters(), OPTIM.AdamW, lr=0.01, betas=(0.5, 0.75))
    loop.attach(optimizer)
    train(loop, [optimizer], between=lambda step: step == 3 and loop.net.load_state_dict(loop.net.state_dict()))
    records = ended(loop)

    assert [(0.5, 0.75)] == [one[:2] for one in records[-1].settings.groups]
    assert [0] * 4 == records[-1].settings.group_of.tolist()
    assert (wrapper == "fully_shard") == records[-1].settings.groups[0].is_adam
    assert [3] == [record.step for record in records if record.is_loaded]
