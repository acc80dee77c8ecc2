"""count_flops compared with counts by hand, the state that it restores, and the forward passes of the user."""

import contextlib
import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rankscope
from rankscope_exporter import CountError, Monitor, MonitorConfig, count_flops
from rankscope_exporter.monitors.flop_counter import FlopCount

BATCH = 5
FIRST, SECOND = 8 * 16, 16 * 4
MLP = 2 * BATCH * (2 * FIRST + 3 * SECOND)
"""By hand: the first layer needs no gradient of its input."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.hidden(x))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.relu(self.first(x)))


def rows(**options: Any) -> torch.Tensor:
    return torch.ones(BATCH, 8, **options)


class Last(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return nn.functional.grouped_mm(x, self.matrices, offs=ends)


@dataclass
class Output:
    loss: torch.Tensor | None
    scores: torch.Tensor


class Custom(Mlp):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


plain = Mlp.forward


def with_loss(form: Callable[..., object]) -> Custom:
    loss = nn.functional.cross_entropy
    return Custom(lambda model, x, labels: form(loss=loss(plain(model, x), labels), scores=model.first(x)))


def attend(model: Mlp, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(*[x * model.last.bias[0]] * 3, is_causal=True)


def penalize(model: Mlp, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(nn.functional.linear(x, model.first.weight).square().sum(), x, create_graph=True)
    return slope.square().sum()


ATTENTION = 3 * 2 * 2 * 16 * (4 * 32 * 32 + 2 * 32 * 64 + 2 * 16 * 32) - 2 * 2 * 16 * 3 * 32**2
"""Two samples of 16 tokens, 32 wide with a hidden layer of 64; the backward pass counts as two forward passes."""
HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "args", "by_hand"),
    [
        (nn.Linear(8, 16), [rows()], 2 * 2 * BATCH * FIRST),
        (Mlp(), [rows(requires_grad=True)], 2 * 3 * BATCH * (FIRST + SECOND)),
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), [torch.zeros(2, 16, 32)], ATTENTION),
        (Custom(attend), [torch.zeros(2, 4, 16, 8)], 3 * 2 * (2 * 2 * 4 * 16 * 16 * 8)),
        (Last(8, 16, batch_first=True), [torch.zeros(BATCH, 5, 8)], 3 * 2 * BATCH * 5 * (8 + 16) * 4 * 16),
        (Grouped(), [torch.randn(24, 16, **HALF), torch.tensor([4, 8, 20, 24]).int()], 2 * 2 * 24 * 16 * 32),
        (with_loss(dict), [rows(), torch.zeros(BATCH).long()], MLP + 2 * BATCH * FIRST),
        (with_loss(Output), [rows(), torch.zeros(BATCH).long()], MLP + 2 * BATCH * FIRST),
        (
            *(Custom(lambda model, x: {"scores": [plain(model, x)], "more": (model.first(x), None, "text")}), [rows()]),
            MLP + 2 * 2 * BATCH * FIRST,
        ),
        # The layer, the slope at its input, and both of their backward passes with two products each.
        (Custom(penalize), [rows(requires_grad=True)], 6 * 2 * BATCH * FIRST),
    ],
    ids=[
        *("linear", "input with gradient", "attention", "fused attention", "recurrent", "grouped", "loss"),
        *("loss of an object", "no loss", "gradient penalty"),
    ],
)
def test_count_equals_that_by_hand(model, args, by_hand):
    assert by_hand == count_flops(model, *args)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_frozen_compiled_meta_scripted_and_nested_models_are_counted():
    frozen, in_place = Mlp(), Mlp()
    frozen.last.requires_grad_(requires_grad=False)
    in_place.compile()
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)))
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    of_nested = Custom(lambda model, x: model.first(x).values())

    assert 2 * BATCH * (2 * FIRST + 2 * SECOND) == count_flops(frozen, rows())
    assert [MLP, MLP] == [count_flops(model, rows()) for model in (torch.compile(Mlp()), in_place)]
    assert MLP == count_flops(Mlp().to("meta"), rows(device="meta"))
    assert [2 * 2 * 5 * FIRST] * 2 == [count_flops(scripted, rows()), count_flops(of_nested, nested)]
    assert 0 == scripted[1].num_batches_tracked


def keep_products(_context, operation, *_args, **_kwargs):
    kept = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_products)},
    ],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_recomputed_activations_count_once(options):
    model = Custom(lambda own, x: own.last(checkpoint(own.hidden, x, **options)))

    assert count_flops(Mlp(), rows(requires_grad=True)) == count_flops(model, rows(requires_grad=True))


def test_model_in_evaluation_mode_is_counted_in_training_mode():
    model = Custom(lambda own, x: plain(own, x) + (own.last(own.first(x)) if own.training else 0)).eval()

    assert MLP + 2 * BATCH * 2 * FIRST + 2 * BATCH * 3 * SECOND == count_flops(model, rows())
    assert not any(module.training for module in model.modules())


@torch.library.custom_op("rankscope_test::fused", mutates_args=())
def fused(x: torch.Tensor) -> torch.Tensor:
    return x * 2


fused.register_autograd(lambda _context, gradient: gradient * 2)


def test_operation_without_a_formula_is_named():
    with pytest.warns(UserWarning, match=r"no formula for rankscope_test\.fused"):
        count = count_flops(Custom(lambda model, x: fused(plain(model, x))), rows())

    assert (MLP, ("rankscope_test.fused",)) == (count, count.unknown)


TAKING = Custom(lambda model, *_args, **_kwargs: plain(model, rows()))
IDS = torch.zeros(3, 7, dtype=torch.long)


@pytest.mark.parametrize(
    ("args", "kwargs", "samples", "tokens"),
    [
        ([], {"attention_mask": IDS.bool(), "input_ids": IDS}, 3, 21),
        *(([{"labels": IDS[0], "input_ids": IDS}], {}, 3, 21), ([torch.zeros(4, 3, 32, 32)], {}, 4, None)),
        *(([SimpleNamespace(x=torch.ones(2))], {}, None, None), ([None], {}, None, None)),
    ],
)
def test_count_has_the_samples_and_tokens_of_the_arguments(args, kwargs, samples, tokens):
    count = count_flops(TAKING, *args, **kwargs)

    assert (samples, tokens) == (count.samples, count.tokens)


def test_count_is_divided_by_tokens_and_samples():
    count = count_flops(TAKING, IDS)

    assert (float(count) / 21, float(count) / 3) == (count.per_token(), count.per_sample())
    assert float(count) / 14 == count.per_token(14)
    with pytest.raises(CountError, match="number of tokens"):
        count_flops(TAKING, torch.zeros(4, 3, 32, 32)).per_token()


def test_result_is_accepted_by_the_configuration_and_can_be_pickled():
    config = MonitorConfig.from_mapping({"throughput": {"flops_per_sample": rankscope.count_flops(Mlp(), rows())}})
    other = FlopCount(12.0, 3, 2, ("a",))

    assert MLP == config.throughput.flops_per_sample
    for copied in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert (12.0, 3, 2, ("a",)) == (copied, copied.tokens, copied.samples, copied.unknown)


# Restored state.


class Lively(nn.Module):
    """Draws from every generator, changes and replaces buffers, and may then fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.norm, self.layer, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("gap", torch.tensor([math.nan, 1.0]).expand(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced = self.replaced + 1
        self.nothing = torch.ones(2)
        self.grown.resize_(4).zero_()
        self.register_buffer("made", torch.ones(1))
        scale = random.random() + np.random.rand() + torch.rand([])  # noqa: NPY002 - as models do
        self.drop.eval()
        if self.fails:
            raise RuntimeError("out of range")
        return self.layer(self.drop(self.norm(x))) * scale


def test_training_is_bit_identical_after_a_count():
    def trained(*, counts: bool) -> list[Any]:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - as above
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), Lively())
        optimizer = torch.optim.AdamW(model.parameters())
        if counts:
            count_flops(model, torch.ones(BATCH, 8))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(BATCH, 8)).square().sum().backward()
            optimizer.step()
        state = [*model.state_dict().values(), torch.get_rng_state()]
        return [tensor.nan_to_num().tolist() for tensor in state] + [random.getstate(), str(np.random.get_state())]  # noqa: NPY002

    assert trained(counts=False) == trained(counts=True)


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_gradients_and_modes_are_restored_also_after_an_error(fails):
    model = nn.Sequential(Lively(fails=fails), nn.Dropout())
    whole = nn.Sequential(model, nn.Linear(4, 1))
    model[1].eval()
    model[0].layer.weight.grad = gradient = torch.full((4, 8), 3.0)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    modes, generator = [module.training for module in model.modules()], torch.get_rng_state()

    with pytest.raises(RuntimeError, match="out of range") if fails else contextlib.nullcontext():
        count_flops(whole, rows())

    after = dict(model.named_buffers())
    assert (buffers.keys(), None) == (after.keys(), model[0].nothing)
    for name, (buffer, values) in buffers.items():
        assert buffer is after[name]
        assert torch.equal(values.nan_to_num(), buffer.nan_to_num())
    assert gradient is model[0].layer.weight.grad
    assert torch.equal(torch.full((4, 8), 3.0), gradient)
    assert model[0].layer.bias.grad is None
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(generator, torch.get_rng_state())


def test_random_states_of_all_devices_in_use_are_restored(monkeypatch):
    """No accelerator is needed: its generators are a double."""
    put = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: put.append(args))

    count_flops(Mlp(), rows())

    assert [("state of 0", 0), ("state of 1", 1)] == put


def test_arguments_and_their_graph_are_unchanged():
    def in_place(model, x, more):
        more["mask"].zero_()
        return plain(model, x)

    leaf = torch.ones(BATCH, 8, requires_grad=True)
    x, mask = leaf * 2, torch.ones(3)

    count_flops(Custom(in_place), x, {"mask": mask})
    x.sum().backward()

    assert torch.equal(torch.ones(3), mask)
    assert torch.equal(torch.full((BATCH, 8), 2.0), leaf.grad)


def test_count_works_in_no_grad_and_inference_mode():
    with torch.no_grad():
        first = count_flops(Mlp(), rows())
    with torch.inference_mode():
        second = count_flops(Mlp_outside, rows())
        assert torch.is_inference_mode_enabled()

    assert [MLP, MLP] == [first, second]
    assert torch.is_grad_enabled()


Mlp_outside = Mlp()


# Refused models.


def test_wrapped_and_divided_models_are_refused(group):
    copied, sharded = DistributedDataParallel(Mlp()), Mlp()
    fully_shard(sharded.first)

    for model in (copied, nn.Sequential(copied), nn.DataParallel(Mlp()), sharded):
        with pytest.raises(CountError, match="wrapped or divided"):
            count_flops(model, rows())


def test_communication_with_other_ranks_is_refused_before_it_happens(group, monkeypatch):
    def reduce(model, x):
        calls.append(x)
        dist.all_reduce(x)
        calls.append(x)
        return plain(model, x)

    calls: list[Any] = []
    assert MLP == count_flops(Custom(reduce), rows())

    calls.clear()
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(CountError, match="communicates with other ranks"):
        count_flops(Custom(reduce), rows())

    assert 1 == len(calls)


def test_monitored_model_and_optimizer_in_the_backward_pass_are_refused(quiet):
    model = Mlp()
    with Monitor(quiet).attach(model), pytest.raises(CountError, match=r"before attach\(\)"):
        count_flops(model, rows())
    assert MLP == count_flops(model, rows())

    before = model.first.weight.detach().clone()
    optimizer = torch.optim.SGD([model.first.weight], lr=1.0)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(CountError, match=r"first\.weight has a hook"):
        count_flops(model, rows())
    assert torch.equal(before, model.first.weight)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.LazyLinear(4), "has no shape yet"),
        (nn.Linear(8, 4).requires_grad_(requires_grad=False), "no output of the model needs a gradient"),
        (lambda x: x, "takes a torch.nn.Module"),
    ],
)
def test_models_without_a_backward_pass_or_a_shape_are_refused(model, why):
    with pytest.raises(CountError, match=why):
        count_flops(model, rows())


def test_fake_tensors_are_counted_and_their_mode_is_refused():
    with FakeTensorMode():
        model, x = Mlp(), rows()
        with pytest.raises(CountError, match="meta device"):
            count_flops(model, x)

    assert MLP == count_flops(model, x)


STEPS = 4


class Tokens(nn.Module):
    """A token model that fits a formula, with a different result at each call and a loss in an outside list."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        super().__init__()
        self.table = parametrizations.spectral_norm(nn.Embedding(10, 4))
        self.head = nn.Linear(4, 10)
        self.calls, self.losses = 0, losses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.head(self.table(x)) * self.calls
        self.losses.append(torch.softmax(out, -1).mean(0).square().sum())
        return out


def trained(
    attach: Callable[[nn.Module, torch.optim.Optimizer], object], between: Callable[[int], object] = lambda _: None
) -> list[Any]:
    """Return losses, state, number of calls and random state; `between` runs after each forward pass."""
    torch.manual_seed(0)
    appended: list[torch.Tensor] = []
    model = Tokens(appended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach(model, optimizer)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        out = model(torch.randint(0, 10, (3, 4)))
        between(step)
        loss = out.square().sum() + sum(appended)
        losses.append((loss.item(), len(appended)))
        appended.clear()
        loss.backward()
        optimizer.step()
    state = [tensor.tolist() for tensor in model.state_dict().values()]
    return [losses, state, model.calls, torch.get_rng_state().tolist()]


@pytest.mark.parametrize("anomaly_mode", [False, True], ids=["", "anomaly mode"])
def test_forward_runs_as_often_as_without_a_monitor(anomaly_mode, reader, eventually):
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(anomaly_mode):
        warnings.simplefilter("always")
        alone = trained(lambda *_: None)
        warned = len(caught)
        with Monitor({"console": False, "exit_wait_seconds": 0}) as monitor:

            def earlier_steps_are_published(step: int) -> None:
                eventually(lambda: len(reader(monitor).scalars("step_seconds")) >= step - 1)

            watched = trained(monitor.attach, earlier_steps_are_published)
            faults = monitor.faults

    assert alone == watched
    assert (STEPS, 0, 2 * warned) == (watched[2], faults, len(caught))
