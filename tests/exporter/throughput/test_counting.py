"""FLOPs counted on a meta copy, against counts by hand and by torch's own counter, and without a trace in training."""

from __future__ import annotations

import contextlib
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rankscope_exporter.throughput.captured import Inputs, NotCapturedError
from rankscope_exporter.throughput.counting import NotCountedError, count

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


def counted(model: nn.Module, *args: Any, **kwargs: Any) -> float:
    before = states()
    try:
        return count(model, Inputs.of(args or (torch.zeros(BATCH, 8),), kwargs))
    finally:
        assert before == states(), "training would draw other numbers"


def by_torch(model: nn.Module, *args: Any) -> float:
    """Return what torch's own counter says of the model itself; attention on its plain path, which it knows."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args).sum().backward()
    return counter.get_total_flops()


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002 - the process's own numbers


def test_linear_layer():
    assert 2 * 2 * BATCH * FIRST == counted(nn.Linear(8, 16))


def test_mlp():
    assert MLP == counted(Mlp())


def test_frozen_layers_need_no_gradient_of_their_weights():
    model = Mlp()
    model.last.requires_grad_(requires_grad=False)

    assert 2 * BATCH * (2 * FIRST + 2 * SECOND) == counted(model)


def test_an_input_that_needs_a_gradient_as_in_a_later_stage_of_a_pipeline():
    assert 2 * 3 * BATCH * (FIRST + SECOND) == counted(Mlp(), torch.zeros(BATCH, 8, requires_grad=True))


def test_transformer_layer():
    batch, sequence, hidden, between = 2, 16, 32, 64
    layer = nn.TransformerEncoderLayer(hidden, 4, between, batch_first=True)
    projections = 4 * hidden * hidden + 2 * hidden * between
    by_hand = 3 * 2 * batch * sequence * (projections + 2 * sequence * hidden) - 2 * batch * sequence * 3 * hidden**2

    assert by_hand == counted(layer, torch.zeros(batch, sequence, hidden))
    assert by_hand == by_torch(layer, torch.zeros(batch, sequence, hidden))


def test_convolution():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    images = torch.zeros(2, 3, 16, 16)

    assert by_torch(model, images) == counted(model, images)


def test_recurrent_layer():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    steps, width, gates = 5, 16, 4 * 16
    inputs, states = 2 * BATCH * steps * 8 * gates, 2 * BATCH * steps * width * gates
    by_hand = 2 * (inputs + states) + states * (steps - 1) / steps  # the first state needs no gradient

    assert by_hand == counted(Last(8, width, batch_first=True), torch.zeros(BATCH, steps, 8))


def test_a_loss_among_the_outputs_is_where_the_backward_begins():
    class WithLoss(Mlp):
        def forward(self, x, labels):
            scores = super().forward(x)
            return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores, "first": self.first(x)}

    model = WithLoss()

    assert MLP + 2 * BATCH * FIRST == counted(model, torch.zeros(BATCH, 8), labels=torch.zeros(BATCH).long())


def test_wrappers_and_hooks_are_left_out_of_the_copy_and_shards_are_whole():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = Mlp()
        fully_shard(sharded.first)
        fully_shard(sharded)
        compiled = torch.compile(Mlp())

        assert MLP == counted(sharded)
        assert MLP == counted(compiled)
        assert "FSDP" in type(sharded).__name__
    finally:
        dist.destroy_process_group()


def test_no_hook_of_the_model_runs_and_nothing_in_it_changes():
    model, called = Mlp(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append("forward"))
        module.register_full_backward_hook(lambda *_: called.append("backward"))
    model.calls = []
    model.first.register_forward_pre_hook(lambda *_: called.append("before"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    counted(model)

    assert [] == called == model.calls
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_the_forward_keeps_is_kept_by_the_copy():
    class Keeping(Mlp):
        def __init__(self):
            super().__init__()
            self.seen, self.steps = [], 0
            self.register_buffer("sums", torch.zeros(4))

        def forward(self, x):
            self.seen.append(x)
            self.steps += 1
            scores = super().forward(x)
            self.sums += scores.detach().sum(0)
            return scores

    model = Keeping()

    assert MLP == counted(model)
    assert ([], 0, 0) == (model.seen, model.steps, model.sums.sum())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_checkpointed_count_once(reentrant):
    class Checkpointing(Mlp):
        def forward(self, x):
            return self.last(checkpoint(self.hidden, x, use_reentrant=reentrant))

    # Counted forward, and the backward taken for twice of it.
    assert 3 * 2 * BATCH * (FIRST + SECOND) == counted(Checkpointing(), torch.zeros(BATCH, 8, requires_grad=True))


def test_what_is_checkpointed_in_training_alone_is_counted_exactly():
    class Checkpointing(Mlp):
        def forward(self, x):
            hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.training else self.hidden(x)
            return self.last(hidden)

    assert MLP == counted(Checkpointing())


def test_a_model_that_drops_layers_at_random_is_counted_with_all_of_them():
    class Dropping(Mlp):
        def forward(self, x):
            if self.training and torch.rand([]) < 0.5:
                return x
            return super().forward(x)

    assert MLP == counted(Dropping())


class Drawing(Mlp):
    def forward(self, x):
        random.random()
        return super().forward(x)


class DrawingFromNumpy(Mlp):
    def forward(self, x):
        np.random.rand()  # noqa: NPY002 - what models do
        return super().forward(x)


class DrawingFromTorch(Mlp):
    def forward(self, x):
        return super().forward(x) + torch.rand(4)


class Forking(Mlp):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            return super().forward(x)


class Seeding(Mlp):
    def forward(self, x):
        torch.manual_seed(0)
        return super().forward(x)


class Reducing(Mlp):
    def forward(self, x):
        dist.all_reduce(torch.zeros(1))
        return super().forward(x)


class Waiting(Mlp):
    def forward(self, x):
        dist.barrier()
        return super().forward(x)


class Deciding(Mlp):
    def forward(self, x):
        scores = super().forward(x)
        return scores if scores.sum().item() > 0 else -scores


class Unknown(Mlp):
    def forward(self, x):
        return super().forward(x) + torch.ops.rankscope_test.fused(x, self.first.weight).sum()


class Endless(Mlp):
    def forward(self, x):
        while True:
            x = x.relu()


class Compiled(Mlp):
    def forward(self, x):
        return compiled_relu(super().forward(x))


class LeadingBack(Mlp):
    def __init__(self):
        super().__init__()
        self.again = lambda x: self.first(x)  # noqa: PLW0108 - it leads back to this very model
        self.first.register_forward_pre_hook(lambda *_: pytest.fail("a hook of the model ran"))

    def forward(self, x):
        return self.last(self.again(x))


compiled_relu = torch.compile(torch.relu)


@torch.library.custom_op("rankscope_test::fused", mutates_args=())
def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


@fused.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Drawing, "random numbers"),
        (DrawingFromNumpy, "random numbers"),
        (DrawingFromTorch, "random numbers"),
        (Forking, "random numbers"),
        (Seeding, "random numbers"),
        (Reducing, "communicates"),
        (Waiting, "communicates"),
        (Deciding, "meta"),
        (Unknown, "nobody says what rankscope_test.fused"),
        (LeadingBack, "calls the model that is trained"),
        (Compiled, "compiled"),
    ],
)
def test_a_model_that_would_leave_a_trace_or_cannot_be_known_is_not_counted(cls, why):
    model = cls()
    if cls in (Reducing, Waiting):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotCountedError, match=why):
            counted(model)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_model_that_holds_its_data_is_not_copied_with_it():
    model = Mlp()
    model.data = np.zeros((1 << 26) + 1, dtype=np.uint8)

    with pytest.raises(NotCountedError, match="large array"):
        counted(model)


class Trained(Mlp):
    """Knows who trains it, as Lightning's modules do: somebody who holds the model in a wrapper."""

    def __init__(self):
        super().__init__()
        self.trainer = SimpleNamespace(strategy=SimpleNamespace(model=Wrapper(self)), data=range(10), names=["a"])
        self.scale = SimpleNamespace(value=1.0, layers=[self.first])

    def forward(self, x):
        return super().forward(x) * self.scale.value


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def __setstate__(self, state):
        pytest.fail("the wrapper was copied")


def test_who_trains_the_model_is_not_copied_with_it():
    assert MLP == counted(Trained())


def test_what_takes_too_long_is_given_up():
    with pytest.raises(NotCountedError, match="takes too long"):
        count(Endless(), Inputs.of((torch.zeros(BATCH, 8),), {}), most_seconds=0.05)


def test_hooks_on_all_modules_of_the_process_are_not_run_for_a_copy():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: pytest.fail("a hook on all modules ran"))
    try:
        with pytest.raises(NotCountedError, match="hooks on all modules"):
            counted(Mlp())
    finally:
        handle.remove()


def test_the_thread_is_as_it_was_afterwards():
    for model in (Mlp(), Deciding()):
        with contextlib.suppress(NotCountedError):
            counted(model)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert torch.is_grad_enabled()
        assert sys.getprofile() is None


def test_inputs_are_known_by_shape_and_no_tensor_is_held():
    ids = torch.zeros(3, 7, dtype=torch.long)
    inputs = Inputs.of((), {"input_ids": ids, "attention_mask": ids.bool(), "extra": [{"a": torch.ones(2)}, None, 3]})

    assert (3, 21, 21, 7) == (inputs.samples, inputs.tokens, inputs.rows, inputs.sequence)
    assert "tensor(" not in repr(inputs)
    made = inputs.made()[1]
    assert made["input_ids"].is_meta
    assert (3, 7) == tuple(made["input_ids"].shape)
    assert [(2,), None, 3] == [tuple(made["extra"][0]["a"].shape), *made["extra"][1:]]


def test_images_have_samples_and_no_tokens():
    inputs = Inputs.of((torch.zeros(4, 3, 32, 32),), {})

    assert (4, None, None) == (inputs.samples, inputs.tokens, inputs.rows)


def test_an_argument_that_cannot_be_made_again_is_named():
    with pytest.raises(NotCapturedError, match="Generator"):
        Inputs.of((torch.Generator(),), {})
