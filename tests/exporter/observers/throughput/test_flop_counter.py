"""count_flops compared with counts by hand and by torch, and the state that it restores."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.exporter.observers.throughput import small_models
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import rankscope
from rankscope_exporter import ConfigError, CountError, Monitor, MonitorConfig, count_flops
from rankscope_exporter.observers.throughput import FlopCount
from rankscope_exporter.observers.throughput.costs import Inputs

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


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Counts.


def by_torch(model: nn.Module, *args: Any) -> float:
    """Return the count of FlopCounterMode for a copy, with attention as single products, for which it has formulas."""
    model = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "make",
    [small_models.gpt, small_models.llama, small_models.mixture_of_experts, small_models.frozen_with_adapters],
)
def test_decoders_are_within_a_tenth_of_flop_counter_mode(make):
    model, ids = make(), torch.randint(0, small_models.VOCABULARY, (2, 32))

    assert by_torch(model, ids) == pytest.approx(count_flops(model, ids), rel=0.1)


@pytest.mark.parametrize("make", [small_models.Vit, small_models.resnet])
def test_vision_models_are_within_a_tenth_of_flop_counter_mode(make):
    model, images = make(), torch.randn(2, 3, 32, 32)

    assert by_torch(model, images) == pytest.approx(count_flops(model, images), rel=0.1)


def test_linear_layer_matches_a_count_by_hand():
    assert 2 * 2 * BATCH * FIRST == count_flops(nn.Linear(8, 16), rows())


def test_frozen_layer_does_not_count_its_weight_gradient():
    model = Mlp()
    model.last.requires_grad_(requires_grad=False)

    assert 2 * BATCH * (2 * FIRST + 2 * SECOND) == count_flops(model, rows())


def test_input_with_gradient_counts_one_more_product():
    assert 2 * 3 * BATCH * (FIRST + SECOND) == count_flops(Mlp(), rows(requires_grad=True))


def test_fused_attention_counts_its_backward_pass_as_twice_its_forward_pass():
    batch, sequence, hidden, between = 2, 16, 32, 64
    layer = nn.TransformerEncoderLayer(hidden, 4, between, batch_first=True)
    projections = 4 * hidden * hidden + 2 * hidden * between
    by_hand = 3 * 2 * batch * sequence * (projections + 2 * sequence * hidden) - 2 * batch * sequence * 3 * hidden**2

    assert by_hand == count_flops(layer, torch.zeros(batch, sequence, hidden))


def test_recurrent_layer_matches_a_count_by_hand():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    steps, width, gates = 5, 16, 4 * 16
    by_hand = 3 * 2 * BATCH * steps * (8 + width) * gates

    assert by_hand == count_flops(Last(8, width, batch_first=True), torch.zeros(BATCH, steps, 8))


def test_grouped_products_count_each_row_once():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, x, ends):
            return nn.functional.grouped_mm(x, self.matrices, offs=ends)

    x, ends = torch.randn(24, 16, dtype=torch.bfloat16), torch.tensor([4, 8, 20, 24], dtype=torch.int32)

    assert 2 * 2 * 24 * 16 * 32 == count_flops(Grouped(), x, ends)


@dataclass
class Output:
    loss: torch.Tensor | None
    scores: torch.Tensor


@pytest.mark.parametrize("form", [dict, Output])
def test_backward_pass_begins_at_the_loss(form):
    class WithLoss(Mlp):
        def forward(self, x, labels):
            loss = nn.functional.cross_entropy(super().forward(x), labels)
            return form(loss=loss, scores=self.first(x))

    count = count_flops(WithLoss(), rows(), labels=torch.zeros(BATCH).long())

    assert MLP + 2 * BATCH * FIRST == count


def test_backward_pass_begins_at_all_outputs_without_a_loss():
    class Two(Mlp):
        def forward(self, x):
            return {"scores": [super().forward(x)], "more": (self.first(x), None, "text")}

    assert MLP + 2 * 2 * BATCH * FIRST == count_flops(Two(), rows())


def keep_products(_context, operation, *_args, **_kwargs):
    kept = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {
            "use_reentrant": False,
            "context_fn": functools.partial(create_selective_checkpoint_contexts, keep_products),
        },
    ],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_recomputed_activations_count_once(options):
    class Checkpointing(Mlp):
        def forward(self, x):
            return self.last(checkpoint(self.hidden, x, **options))

    assert count_flops(Mlp(), rows(requires_grad=True)) == count_flops(Checkpointing(), rows(requires_grad=True))


def test_gradient_penalty_in_the_forward_pass_counts():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 16, bias=False)

        def forward(self, x):
            (slope,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
            return slope.square().sum()

    # The layer, the slope at its input, and both of their backward passes with two products each.
    assert 6 * 2 * BATCH * FIRST == count_flops(Penalty(), rows(requires_grad=True))


def test_compiled_model_counts_like_the_uncompiled_one():
    model = torch.compile(Mlp())
    in_place = Mlp()
    in_place.compile()

    assert [MLP, MLP] == [count_flops(model, rows()), count_flops(in_place, rows())]


def test_model_on_the_meta_device_is_counted():
    with torch.device("meta"):
        model = Mlp()

    assert MLP == count_flops(model, rows(device="meta"))


def test_model_in_evaluation_mode_is_counted_in_training_mode():
    class Auxiliary(Mlp):
        def forward(self, x):
            return super().forward(x) + (self.last(self.first(x)) if self.training else 0)

    model = Auxiliary().eval()

    assert MLP + 2 * BATCH * 2 * FIRST + 2 * BATCH * 3 * SECOND == count_flops(model, rows())
    assert not any(module.training for module in model.modules())


@torch.library.custom_op("rankscope_test::fused", mutates_args=())
def fused(x: torch.Tensor) -> torch.Tensor:
    return x * 2


fused.register_autograd(lambda _context, gradient: gradient * 2)


def test_operation_without_a_formula_is_named():
    class Unknown(Mlp):
        def forward(self, x):
            return fused(super().forward(x))

    with pytest.warns(UserWarning, match=r"no formula for rankscope_test\.fused"):
        count = count_flops(Unknown(), rows())

    assert (MLP, ("rankscope_test.fused",)) == (count, count.unknown)


# The result.


def test_count_of_token_ids_is_divided_by_tokens_and_samples():
    model, ids = small_models.gpt(), torch.zeros(3, 7, dtype=torch.long)
    count = count_flops(model, ids)

    assert (21, 3) == (count.tokens, count.samples)
    assert (float(count) / 21, float(count) / 3) == (count.per_token(), count.per_sample())
    assert float(count) / 14 == count.per_token(14)


def test_count_of_images_has_no_tokens():
    count = count_flops(small_models.Vit(), torch.randn(2, 3, 32, 32))

    assert float(count) / 2 == count.per_sample()
    with pytest.raises(CountError, match="number of tokens"):
        count.per_token()


def test_result_is_accepted_by_the_configuration():
    count = rankscope.count_flops(Mlp(), rows())
    config = MonitorConfig.from_mapping({"throughput": {"flops_per_sample": count}})

    assert MLP == config.throughput.flops_per_sample


def test_result_can_be_copied_and_pickled():
    count = FlopCount(12.0, 3, 2, ("a",))

    for other in (copy.copy(count), copy.deepcopy(count), pickle.loads(pickle.dumps(count))):
        assert (12.0, 3, 2, ("a",)) == (other, other.tokens, other.samples, other.unknown)


# Restored state.


class Lively(nn.Module):
    """Draws from every generator, and changes and replaces buffers."""

    def __init__(self) -> None:
        super().__init__()
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


def test_buffers_are_the_same_tensors_with_the_same_values():
    model = Lively()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}

    count_flops(model, rows())

    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert model.nothing is None
    for name, (buffer, values) in before.items():
        assert buffer is after[name]
        assert torch.equal(values.nan_to_num(), buffer.nan_to_num())


def test_gradients_are_the_same_tensors_with_the_same_values():
    model = Mlp()
    model.first.weight.grad = gradient = torch.full((16, 8), 3.0)

    count_flops(model, rows())

    assert gradient is model.first.weight.grad
    assert torch.equal(torch.full((16, 8), 3.0), gradient)
    assert model.last.weight.grad is None


def test_training_mode_of_each_module_is_restored():
    model = nn.Sequential(Lively(), nn.Dropout())
    model[1].eval()
    before = [module.training for module in model.modules()]

    count_flops(nn.Sequential(model, nn.Linear(4, 1)), rows())

    assert before == [module.training for module in model.modules()]


def test_state_is_restored_after_an_error_of_the_model():
    class Failing(Lively):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("out of range")

    model = Failing()
    model.layer.weight.grad = gradient = torch.ones(4, 8)
    random_before, modes = torch.get_rng_state(), [module.training for module in model.modules()]

    with pytest.raises(RuntimeError, match="out of range"):
        count_flops(model, rows())

    assert torch.equal(random_before, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert gradient is model.layer.weight.grad
    assert 0 == model.norm.num_batches_tracked


def test_random_states_of_all_devices_in_use_are_restored(monkeypatch):
    """No accelerator is needed: its generators are a double."""
    states, put = [torch.ones(1), torch.zeros(1)], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put.append)

    count_flops(Mlp(), rows())

    assert [states] == put


def test_arguments_and_their_graph_are_unchanged():
    class InPlace(Mlp):
        def forward(self, x, more):
            more["mask"].zero_()
            return super().forward(x)

    leaf = torch.ones(BATCH, 8, requires_grad=True)
    x, mask = leaf * 2, torch.ones(3)

    count_flops(InPlace(), x, {"mask": mask})
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


def test_no_hook_on_all_modules_is_used():
    seen = []

    class Looking(Mlp):
        def forward(self, x):
            own = sys.modules["torch.nn.modules.module"]
            seen.extend([*own._global_forward_hooks, *own._global_forward_pre_hooks])
            return super().forward(x)

    count_flops(Looking(), rows())

    assert [] == seen


# Refused models.


def test_wrapped_and_divided_models_are_refused(group):
    copied, sharded = DistributedDataParallel(Mlp()), Mlp()
    fully_shard(sharded.first)

    for model in (copied, nn.Sequential(copied), nn.DataParallel(Mlp()), sharded):
        with pytest.raises(CountError, match="wrapped or divided"):
            count_flops(model, rows())


def test_communication_with_other_ranks_is_refused_before_it_happens(group, monkeypatch):
    class Reducing(Mlp):
        def forward(self, x):
            calls.append(x)
            dist.all_reduce(x)
            calls.append(x)
            return super().forward(x)

    calls: list[Any] = []
    assert MLP == count_flops(Reducing(), rows())

    calls.clear()
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(CountError, match="communicates with other ranks"):
        count_flops(Reducing(), rows())

    assert 1 == len(calls)


def test_monitored_model_is_refused(quiet):
    model = Mlp()
    with Monitor(quiet).attach(model), pytest.raises(CountError, match=r"before attach\(\)"):
        count_flops(model, rows())

    assert MLP == count_flops(model, rows())


def test_optimizer_in_the_backward_pass_is_refused_and_does_not_step():
    model = Mlp()
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


def test_scripted_and_nested_tensors_are_counted():
    class Rows(Mlp):
        def forward(self, x):
            return self.first(x).values()

    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)))
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)

    assert [2 * 2 * 5 * FIRST] * 2 == [count_flops(scripted, rows()), count_flops(Rows(), nested)]
    assert 0 == scripted[1].num_batches_tracked


def test_error_for_the_old_method_names_count_flops():
    with pytest.raises(ConfigError, match=r"rankscope\.count_flops\(\)"):
        Monitor({"throughput": {"method": "counted"}})


# Amounts of a batch.


def test_batch_of_token_ids_has_tokens_and_samples():
    ids = torch.zeros(3, 7, dtype=torch.long)
    inputs = Inputs.of((), {"attention_mask": ids.bool(), "input_ids": ids})

    assert (3, 21, 7) == (inputs.samples, inputs.tokens, inputs.sequence)
    assert inputs == Inputs.of(({"labels": ids[0], "input_ids": ids},), {})


def test_images_have_samples_and_no_tokens():
    inputs = Inputs.of((torch.zeros(4, 3, 32, 32),), {})

    assert (4, None, False) == (inputs.samples, inputs.tokens, inputs.are_embeddings)


def test_arguments_without_a_tensor_have_no_amount():
    endless: list[Any] = []
    endless.append(endless)

    for value in (endless, SimpleNamespace(x=torch.ones(2)), None):
        inputs = Inputs.of((value,), {})
        assert (None, None) == (inputs.samples, inputs.tokens)
