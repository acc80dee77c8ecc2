"""The fault corpus: its table, and the first changes of each fault in a small training without a monitor."""

import functools

import pytest
import torch
from benchmarks.detection.__main__ import AT, judged
from benchmarks.detection.faults import RANK, Fault, corpus, every_fault, message_cases, slowdown
from benchmarks.detection.training import Training

FIRST, LAST = 3, 7
JOB = {"seed": 1, "at": FIRST, "scaler": False, "width": 8}
FAULTS = {one.name: one for one in (*corpus(), *message_cases(), *map(slowdown, range(6)))}
ONE_RANK = sorted(one.name for one in FAULTS.values() if one.rank is not None)


def test_corpus_has_66_faults_a_third_of_which_is_held_out():
    names = [one.name for one in corpus()]

    assert len(names) == len(set(names)) == 66
    assert sum(one.held_out for one in corpus()) == 22
    assert len(every_fault()) == 66 + len(message_cases()) + 120


def bits(tensors):
    return {name: tensor.detach().clone().view(torch.int32) for name, tensor in tensors}


def halve_gradient(parameter):
    parameter.grad.mul_(0.5)


@functools.cache
def trained(name, rank, *, scaler, clip):
    """Train with a fault, or without; return stages, seconds of sleep, and number of kept objects.

    A stage is (step, kind, tensors): weights and moments before a forward pass, gradients of an update, and weights
    after it. The gradient is half the local one, as the mean with a rank that contributes nothing.
    """
    stages, slept = [], []
    text = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    training = Training(JOB | {"scaler": scaler}, text, FAULTS.get(name), rank=rank)
    state, optimizer = training.state, training.optimizer
    state.clip, state.sleep = clip, slept.append
    parameters = list(training.model.named_parameters())

    def seen(what, tensors):
        stages.append((state.step, what, bits(tensors)))

    def before(*_):
        seen("weights", parameters)
        for key in ("exp_avg", "exp_avg_sq"):
            seen(key, [(own, optimizer.state[item][key]) for own, item in parameters if item in optimizer.state])

    for _, parameter in parameters:
        parameter.register_post_accumulate_grad_hook(halve_gradient)
    training.model.register_forward_pre_hook(before)
    optimizer.register_step_pre_hook(lambda *_: seen("gradients", [(own, item.grad) for own, item in parameters]))
    optimizer.register_step_post_hook(lambda *_: seen("weights", parameters))
    for number in range(1, LAST + 1):
        training.step(number)
    return stages, slept, len(state.kept)


def compared(name, rank):
    """Return the tensors that differ from the healthy twin at the first stage that differs, sleeps and kept objects."""
    options = {"scaler": FAULTS[name].has_scaler, "clip": 0.001 if name == "no clipping" else None}
    stages, slept, kept = trained(name, rank, **options)
    for one, twin in zip(stages, trained(None, rank, **options)[0], strict=False):
        if one[:2] != twin[:2]:
            return {"an update is skipped"}, slept, kept
        if changed := {own for own, value in one[2].items() if not torch.equal(value, twin[2][own])}:
            return changed, slept, kept
    return set(), slept, kept


@pytest.mark.parametrize("name", [name for name, one in FAULTS.items() if not one.is_slow])
def test_fault_changes_first_what_a_message_should_name(name):
    fault = FAULTS[name]
    changed, slept, kept = compared(name, RANK if fault.rank is None else fault.rank)

    if fault.of_time:
        assert changed == set()
        assert sum(slept) > 0
    elif name.startswith("leak"):
        assert changed == set()
        assert kept == LAST - FIRST + 1
    else:
        assert changed
        assert all(own.startswith(fault.tensor or "") for own in changed)


@pytest.mark.parametrize("name", ONE_RANK)
def test_fault_of_one_rank_changes_nothing_on_the_other(name):
    assert compared(name, 1 - FAULTS[name].rank)[:2] == (set(), [])


def message(rule, step, rank=RANK, tensor=None, op=None):
    return {"rule": rule, "step": step, "rank": rank, "tensor": tensor, "op": op}


TWIN = [message("LossSpike", AT + 3)]
VERDICTS = {
    "named": ([message("AdamBooks", AT, tensor="a.b")], 0, {"rank": True, "tensor": True}, 0),
    "other rank and tensor": ([message("AdamBooks", AT + 9, 0, "c")], 9, {"rank": False, "tensor": False}, 0),
    "no names": ([message("WeightDrift", AT + 30, None)], 30, {}, 0),
    "before the fault": ([message("AdamBooks", AT - 1, tensor="a.b")], None, {}, 1),
    "also in the twin": ([message("LossSpike", AT + 4)], None, {}, 0),
    "about time": ([message("SlowRank", AT, op="forward")], None, {}, 1),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_counts_only_messages_that_the_fault_explains(name):
    messages, after, is_right, false = VERDICTS[name]
    found = judged({"run": "r", "seed": 1}, messages, TWIN, Fault(name="one", rank=RANK, tensor="a."))

    assert found.get("after") == after
    assert found.get("is_right", {}) == is_right
    assert len(found["false"]) == false


def test_slow_rank_is_named_with_its_phase():
    fault = Fault(name="slow", rank=RANK, of_time=True, phase="forward")
    messages = [message("LossSpike", AT), message("SlowRank", AT + 1, op="backward")]
    found = judged({"run": "r", "seed": 1}, messages, [], fault)

    assert found["is_right"] == {"rank": True, "op": False}
    assert [one["rule"] for one in found["false"]] == ["LossSpike"]
