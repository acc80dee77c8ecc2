"""Features of modules in training, compared with an independent reference; training is bit-identical."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.measure.quantities.trainings import Composed, Feature, Run, equal_bits, measure, nothing
from torch import nn
from torch.utils.checkpoint import checkpoint

HEADS, GROUPS, WIDTH, EXPERTS = 4, 2, 4, 5
LONG, SHORT = 6, 4
Note = Callable[..., None]


class Core(nn.Module):
    """Attention over (sequence, batch, head, width), grouped heads; it writes over its inputs."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)
        with torch.no_grad():
            query.data.zero_()  # the hook must read the inputs before this write
        return out.permute(2, 0, 1, 3).flatten(2)


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        width = HEADS * WIDTH
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width // GROUPS * 2)
        self.core = Core()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, width) / 4)
        self.top_k = 2

    def forward(self, x: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None, note: Note) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH))
        k, v = (part.unflatten(-1, (HEADS // GROUPS, WIDTH)) for part in self.kv(other).chunk(2, -1))
        note("attention", f"{self.name}.core", q, k, mask)
        x = x + self.core(q.clone(), k, value=v, attn_mask=mask)
        logits = self.gate(x)
        note("router", f"{self.name}.gate", logits, self.gate.weight)
        return x + torch.softmax(logits, -1) @ self.experts


class Net(nn.Module):
    """Self-attention with a mask, then attention to a shorter sequence; optionally recomputed in the backward pass."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.embedding = nn.Embedding(11, HEADS * WIDTH)
        self.norm = nn.LayerNorm(HEADS * WIDTH)
        self.blocks = nn.ModuleList([Block("blocks.0"), Block("blocks.1")])

    def forward(self, ids: torch.Tensor, note: Note = nothing) -> torch.Tensor:
        x = self.norm(self.embedding(ids).transpose(0, 1))
        mask = torch.ones(LONG, LONG, dtype=torch.bool).tril()
        for block, other, hides in ((self.blocks[0], None, mask), (self.blocks[1], x[:SHORT], None)):
            arguments = (block, x, x if other is None else other, hides, note)
            if self.mode == "plain":
                x = block(*arguments[1:])
            else:
                x = checkpoint(*arguments, use_reentrant=self.mode == "reentrant")
        return x


def net(mode: str = "plain") -> Net:
    torch.manual_seed(1)
    return Net(mode)


def batch(step: int, micro: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, LONG), generator=torch.Generator().manual_seed(10 * step + micro))


def losses(note_of: Callable[[int], Note] = lambda _micro: nothing) -> list[Callable[[nn.Module, int], torch.Tensor]]:
    return [lambda model, step, m=micro: model(batch(step, m), note_of(m)).square().mean() for micro in range(2)]


ATTENTION: dict[str, Any] = {"targets": ["*.core"], "causal": False}
EVERYTHING: dict[str, dict[str, Any]] = {"attention": ATTENTION, "linear": {}, "router": {"targets": ["*.gate"]}}


class Seen:
    """The reference: features of complete matrices in float64, from tensors that the model records."""

    def __init__(self) -> None:
        self.rows: dict[Feature, float] = {}
        self.compared: set[str] = set()

    def of(self, micro: int) -> Note:
        def note(what: str, *args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                getattr(self, what)(micro, *args)

        return note

    def attention(self, micro: int, module: str, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> None:
        for head in range(HEADS):
            scores = torch.einsum("sbd,tbd->bst", q[:, :, head].double(), k[:, :, head // GROUPS].double()) / 2
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            weights = torch.softmax(scores.detach(), -1)
            entropy = -torch.special.xlogy(weights, weights).sum(-1).mean()
            self.rows[Feature("attention_entropy", module, head, micro)] = float(entropy)
            self.rows[Feature("softmax_max", module, head, micro)] = float(weights.amax(-1).mean())

    def router(self, micro: int, module: str, logits: torch.Tensor, weight: torch.Tensor) -> None:
        weights = torch.softmax(logits.detach().double(), -1)
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean()
        self.rows[Feature("router_entropy", module, None, micro)] = float(entropy)
        chosen = logits.topk(2, -1).indices.flatten().bincount(minlength=EXPERTS)
        for expert, count in enumerate(chosen.tolist()):
            self.rows[Feature("router_load", module, expert, micro)] = count / (3 * LONG)
        if module not in self.compared:
            self.compared.add(module)
            vectors = nn.functional.normalize(weight.detach().double(), dim=1)
            cosines = (vectors @ vectors.t())[*torch.triu_indices(EXPERTS, EXPERTS, 1)]
            self.rows[Feature("router_similarity", module)] = float(cosines.mean())

    def linear(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.endswith(".weight"):
                values = torch.linalg.svdvals(parameter.detach().double())
                module = name.removesuffix(".weight")
                self.rows[Feature("spectral_norm", module)] = float(values[0])
                self.rows[Feature("stable_rank", module)] = float(values.norm() / values[0])


@pytest.fixture(scope="module")
def alone() -> tuple[Run, dict[int, dict[Feature, float]]]:
    seen = {1: Seen(), 2: Seen()}

    def loss_of(micro: int) -> Callable[[nn.Module, int], torch.Tensor]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            if micro == 0:
                seen[step].linear(model)
            return model(batch(step, micro), seen[step].of(micro)).square().mean()

        return loss

    return measure(net(), [loss_of(0), loss_of(1)], None), {step: look.rows for step, look in seen.items()}


@pytest.mark.parametrize("mode", ["plain", "reentrant", "not reentrant"])
def test_features_equal_the_reference_and_training_is_bit_identical(mode, alone):
    """Separate micro-batches, real masks, recomputed calls measured once, inputs read before they are overwritten."""
    run = measure(net(mode), losses(), EVERYTHING)

    assert (0, []) == (run.faults, run.notices)
    for step, expected in alone[1].items():
        assert expected.keys() == run.features[step].keys()
        for key, value in expected.items():
            # The random weights here are small, so Lanczos is exact; the stated tolerance has a test of its own.
            assert value == pytest.approx(run.features[step][key], rel=2e-5, abs=1e-6), key
    assert equal_bits(run, alone[0] if mode == "plain" else measure(net(mode), losses(), None))


# Selection of modules.


def test_without_targets_only_linear_selects_modules():
    run = measure(net(), losses(), {"attention": {"targets": []}, "router": {}, "linear": {"targets": []}}, steps=1)

    assert {"stable_rank", "spectral_norm"} == {key.kind for key in run.features[1]}
    linear = {"embedding", *(f"blocks.{block}.{name}" for block in range(2) for name in ("q", "kv", "gate"))}
    assert linear == {key.module for key in run.features[1]}
    assert [
        "attention: targets names no module, so nothing is measured",
        "router: targets names no module, so nothing is measured",
    ] == sorted(run.notices)


def odd() -> nn.Module:
    """Return unusual modules: one has a parameter `wg`; weights are computed, empty, vectors, or zero."""
    router = Composed(lambda router, x: x @ router.wg)
    router.wg = nn.Parameter(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])))
    modules = {name: nn.Linear(4, 4) for name in ("first", "second", "zeros", "broken")}
    modules |= {"router": router, "norm": nn.LayerNorm(4), "empty": nn.Linear(0, 4)}
    modules["whole"] = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.norm(net.router(net.second(net.first(x))))
        return net.computed(x) + net.zeros(x) + net.empty(x[:, :0])

    model = Composed(forward, **modules)
    model.second.weight = model.first.weight
    model.computed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    nn.init.zeros_(model.zeros.weight)
    with torch.no_grad():
        model.broken.weight[1, 1] = math.nan
    return model


def test_unusual_weights_are_measured_or_reported():
    loss = lambda model, _step: model(torch.ones(2, 4)).square().sum()  # noqa: E731 - one for both
    run, other = measure(odd(), loss, {"linear": {}}), measure(odd(), loss, None)
    rows = run.features[1]

    assert 0 == run.faults
    assert {"first", "second", "router", "zeros", "broken"} == {key.module for key in rows}
    assert rows[Feature("spectral_norm", "first")] == rows[Feature("spectral_norm", "second")]
    assert pytest.approx(3) == rows[Feature("spectral_norm", "router")]
    assert pytest.approx(math.sqrt(14) / 3) == rows[Feature("stable_rank", "router")]
    assert 0 == rows[Feature("spectral_norm", "zeros")]
    assert Feature("stable_rank", "zeros") not in rows
    assert all(math.isnan(rows[Feature(kind, "broken")]) for kind in ("spectral_norm", "stable_rank"))
    assert [
        "linear: computed: has a weight that is computed, or none",
        "linear: whole: has a weight that is complex64[4, 4], not a matrix of floats",
    ] == sorted(run.notices)
    assert all(torch.equal(run.state[n], other.state[n]) for n in other.state if "broken" not in n)


def test_compiled_modules_are_reported_and_their_weights_measured():
    model = net()
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    run = measure(model, losses(), {"attention": {"targets": ["*.core"], "causal": False}, "linear": {}})

    assert {"spectral_norm", "stable_rank"} == {key.kind for key in run.features[2]}
    assert 0 == run.faults
    assert ["attention: blocks.0.core, blocks.1.core: is part of compiled code, so it is not measured"] == run.notices
