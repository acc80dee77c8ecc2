"""The exact rules in real trainings of one process: silent in correct ones, and at the step of each fault."""

import copy

import pytest
import torch
from tests.exporter.parts import Watched
from torch import nn

EXACT = {"ParamMovedBetween", "AdamBooks", "ClipCap"}
FAULT = 26
STEPS = 40
NOT_JUDGED = "AdamBooks is not judged for 7 tensors: "


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Embedding(64, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 64)
    return nn.Sequential(*layers).to(dtype)


def adamw(net, **options):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, **options)


def of_groups(net):
    first, *others = net.parameters()
    groups = [{"params": [first], "betas": (0.8, 0.95)}, {"params": others, "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=1e-3)


def nothing(net, optimizer, number):
    pass


def trained(
    net, optimizer, *, before=nothing, after=nothing, scale=None, passes=1, clip=None, autocast=False, **settings
):
    """Train for STEPS steps; return (step, rule, tensor) of each event of an exact rule, and the records.

    `before` and `after` get net, optimizer and the number of the step. A negative `clip` ends at the fault.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=10, enabled=scale is not None)
    with Watched(net, (optimizer,), quantities=["parameters", "gradients", "optimizer_state"], **settings) as seen:
        for number in range(1, STEPS + 1):
            before(net, optimizer, number)
            for _ in range(passes):
                inputs = torch.randint(0, 64, (8, 6))
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = net(inputs).transpose(1, 2).float()
                scaler.scale(nn.functional.cross_entropy(output, (inputs * 7 + 3) % 64)).backward()
            if clip is not None and not (clip < 0 and number >= FAULT):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), abs(clip))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after(net, optimizer, number)
    events = [event for record in seen.records for event in record.events if event.rule in EXACT]
    steps = [record.step for record in seen.records for event in record.events if event.rule in EXACT]
    return [(step, event.rule, event.tensor) for step, event in zip(steps, events, strict=True)], seen


def averaged(net, optimizer, number):
    """Put the average of the weights in for an evaluation, and the weights back."""
    kept = [item.detach().clone() for item in net.parameters()]
    with torch.no_grad():
        for item in net.parameters():
            item.mul_(0.5)
        net(torch.randint(0, 64, (2, 6)))
        for item, value in zip(net.parameters(), kept, strict=True):
            item.copy_(value)


def loaded(net, optimizer, number):
    if number == FAULT:
        state = copy.deepcopy(net.state_dict())
        for value in state.values():
            value.mul_(0.9)
        net.load_state_dict(state)
        state = copy.deepcopy(optimizer.state_dict())
        for moments in state["state"].values():
            moments["exp_avg"].mul_(3.0)
        optimizer.load_state_dict(state)


def other_settings(net, optimizer, number):
    if number == FAULT:
        optimizer.param_groups[0] |= {"lr": 1e-4, "betas": (0.5, 0.9)}


CORRECT = {
    "plain": (lambda net: adamw(net, foreach=False), {}, None),
    "foreach": (lambda net: adamw(net, foreach=True), {}, None),
    "fused": (lambda net: adamw(net, fused=True), {}, None),
    "amsgrad": (lambda net: adamw(net, amsgrad=True), {}, None),
    "tensor as learning rate": (
        lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3), foreach=False),
        {},
        None,
    ),
    "groups": (of_groups, {}, None),
    "NAdam": (lambda net: torch.optim.NAdam(net.parameters(), lr=1e-3), {}, None),
    "RAdam": (lambda net: torch.optim.RAdam(net.parameters(), lr=1e-3), {}, None),
    "SGD": (lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1), {}, None),
    "Adagrad": (lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-2), {}, None),
    "decay in the gradient": (
        lambda net: torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=0.1),
        {},
        "weight decay is part of the",
    ),
    "maximize": (lambda net: adamw(net, maximize=True), {}, "the optimizer maximizes"),
    "autocast": (adamw, {"autocast": True}, None),
    "accumulation and clipping": (adamw, {"passes": 4, "clip": 0.3}, None),
    "scaler": (adamw, {"scale": 2.0**14}, None),
    "scaler and clipping": (adamw, {"scale": 2.0**14, "clip": 0.3}, None),
    "scaler, fused": (lambda net: adamw(net, fused=True), {"scale": 2.0**14}, "divides the gradient by the loss scale"),
    "every fifth step": (adamw, {"every": 5}, None),
    "averaged weights": (adamw, {"after": averaged}, None),
    "loaded state": (adamw, {"before": loaded}, None),
    "other betas": (adamw, {"before": other_settings}, None),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_training_has_no_event_of_an_exact_rule(name):
    make, settings, reason = CORRECT[name]
    net = network()
    found, seen = trained(net, make(net), **settings)

    assert found == []
    assert seen.faults == 0
    told = [text for text in seen.messages("note") if "is not judged" in text]
    assert [reason in text and text.startswith(NOT_JUDGED) for text in told] == [True] * (reason is not None)


def test_moments_in_bfloat16_are_not_judged():
    net = network(torch.bfloat16)
    found, seen = trained(net, adamw(net))

    assert found == []
    assert f"{NOT_JUDGED}the moments of the optimizer are not float32" in seen.messages("note")


def test_script_that_writes_weights_before_each_step_has_one_event():
    def writes(net, optimizer, number):
        with torch.no_grad():
            for item in net.parameters():
                item.mul_(0.999)

    net = network()
    found, _ = trained(net, adamw(net), before=writes)

    assert {(step, rule) for step, rule, _ in found} == {(2, "ParamMovedBetween")}


def at_fault(change):
    def before(net, optimizer, number):
        if number == FAULT:
            with torch.no_grad():
                change(net, optimizer)

    return before


def bit(net, _):
    net[1].weight.view(torch.int32)[3, 3] ^= 1 << 25


def moment(net, optimizer, key="exp_avg"):
    optimizer.state[net[1].weight][key].mul_(2.0)


FAULTS = {
    "dead units": (lambda net, _: net[1].weight[:3].zero_(), "ParamMovedBetween", "1.weight"),
    "flipped bit": (bit, "ParamMovedBetween", "1.weight"),
    "logits": (lambda net, _: net[4].weight.mul_(3.0), "ParamMovedBetween", "4.weight"),
    "embedding row": (lambda net, _: net[0].weight[5].mul_(3.0), "ParamMovedBetween", "0.weight"),
    "first moment": (moment, "AdamBooks", "1.weight"),
    "second moment": (lambda net, opt: moment(net, opt, "exp_avg_sq"), "AdamBooks", "1.weight"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_at_its_step_with_its_tensor(name):
    change, rule, tensor = FAULTS[name]
    net = network()
    found, _ = trained(net, adamw(net), before=at_fault(change), clip=0.1)

    assert found == [(FAULT, rule, tensor)]


def test_clipping_that_ends_is_found():
    net = network()
    found, _ = trained(net, adamw(net), clip=-0.05)

    assert found[:1] == [(FAULT, "ClipCap", None)]
