"""Features of modules in training, compared with an independent reference; training is bit-identical."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.quantities.feature_runs import Feature, FeatureRun, equal_bits, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankscope_exporter import ConfigError, Monitor, MonitorConfig

HEADS, GROUPS, WIDTH, EXPERTS = 4, 2, 4, 5
LONG, SHORT = 6, 4

Note = Callable[..., None]


def nothing(*_: Any, **__: Any) -> None:
    """Record nothing, for the run with the monitor."""


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


EVERYTHING: dict[str, dict[str, Any]] = {
    "attention": {"targets": ["*.core"], "causal": False},
    "linear": {},
    "router": {"targets": ["*.gate"]},
}


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
def alone() -> tuple[FeatureRun, dict[int, dict[Feature, float]]]:
    """Return the results of a run without a monitor that records its own tensors."""
    model = net()
    seen = {1: Seen(), 2: Seen()}
    steps = []

    def loss_of(micro: int) -> Callable[[nn.Module, int], torch.Tensor]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            if micro == 0:
                seen[step].linear(model)
                steps.append(step)
            return model(batch(step, micro), seen[step].of(micro)).square().mean()

        return loss

    run = train(model, [loss_of(0), loss_of(1)], None)
    assert [1, 2] == steps
    return run, {step: look.rows for step, look in seen.items()}


@pytest.mark.parametrize("mode", ["plain", "reentrant", "not reentrant"])
def test_features_equal_the_reference_and_training_is_bit_identical(mode, alone):
    """Separate micro-batches, real masks, recomputed calls measured once, inputs read before they are overwritten."""
    run = train(net(mode), losses(), EVERYTHING)

    assert (0, []) == (run.faults, run.notices)
    for step, expected in alone[1].items():
        assert expected.keys() == run.rows[step].keys()
        for key, value in expected.items():
            # The random weights here are small, so Lanczos is exact; the stated tolerance has a test of its own.
            assert value == pytest.approx(run.rows[step][key], rel=2e-5, abs=1e-6), key
    assert equal_bits(run, alone[0] if mode == "plain" else train(net(mode), losses(), None))


def test_steps_that_are_not_sampled_have_no_features():
    options = {name: {**known, "every": 2, "start_step": 2} for name, known in EVERYTHING.items()}
    run = train(net(), losses(), options, steps=4)

    assert {2, 4} == set(run.rows)
    assert run.rows[2].keys() == run.rows[4].keys()


def test_autocast_does_not_change_the_formulas():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch(step, 0)).float().square().mean()

    model = net()
    expected = {
        name: float(torch.linalg.svdvals(weight.double())[0])
        for name, weight in (
            (name, module.weight.detach()) for name, module in model.named_modules() if name.endswith("q")
        )
    }
    run = train(model, [loss], EVERYTHING, steps=1)

    assert (0, []) == (run.faults, run.notices)
    for name, value in expected.items():
        assert value == pytest.approx(run.rows[1][Feature("spectral_norm", name)], rel=1e-5)
    assert equal_bits(run, train(net(), [loss], None, steps=1))


# Selection of modules.


def test_without_targets_only_linear_selects_modules():
    run = train(net(), losses(), {"attention": {"targets": []}, "router": {}, "linear": {"targets": []}}, steps=1)

    assert {"stable_rank", "spectral_norm"} == {key.kind for key in run.rows[1]}
    linear = {"embedding", *(f"blocks.{block}.{name}" for block in range(2) for name in ("q", "kv", "gate"))}
    assert linear == {key.module for key in run.rows[1]}
    assert [
        "attention: targets names no module, so nothing is measured",
        "router: targets names no module, so nothing is measured",
    ] == sorted(run.notices)


class Odd(nn.Module):
    """Unusual modules: one has a parameter `wg`; weights are computed, empty, vectors, or zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.router = nn.Module()
        self.router.wg = nn.Parameter(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])))
        self.router.forward = lambda x: x @ self.router.wg
        self.norm = nn.LayerNorm(4)
        self.computed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.zeros = nn.Linear(4, 4)
        nn.init.zeros_(self.zeros.weight)
        self.empty = nn.Linear(0, 4)
        self.whole = nn.Linear(4, 4, dtype=torch.complex64)
        self.broken = nn.Linear(4, 4)
        with torch.no_grad():
            self.broken.weight[1, 1] = math.nan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.router(self.second(self.first(x))))
        return self.computed(x) + self.zeros(x) + self.empty(x[:, :0])


def odd_loss(model: nn.Module, _step: int) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().sum()


def test_unusual_weights_are_measured_or_reported():
    def odd() -> Odd:
        torch.manual_seed(2)
        return Odd()

    run = train(odd(), [odd_loss], {"linear": {}})
    rows = run.rows[1]

    assert 0 == run.faults
    assert {"first", "second", "router", "zeros", "broken"} == {key.module for key in rows}
    assert rows[Feature("spectral_norm", "first")] == rows[Feature("spectral_norm", "second")]
    assert pytest.approx(3) == rows[Feature("spectral_norm", "router")]
    assert pytest.approx(math.sqrt(14) / 3) == rows[Feature("stable_rank", "router")]
    assert 0 == rows[Feature("spectral_norm", "zeros")]
    assert Feature("stable_rank", "zeros") not in rows
    assert all(math.isnan(rows[Feature(kind, "broken")]) for kind in ("spectral_norm", "stable_rank"))
    assert {
        "linear: computed: has a weight that is computed, or none",
        "linear: whole: has a weight that is complex64[4, 4], not a matrix of floats",
    } == set(run.notices)
    assert 2 == len(run.notices)
    other = train(odd(), [odd_loss], None)
    assert all(torch.equal(run.state[n], other.state[n]) for n in other.state if "broken" not in n)


def test_compiled_modules_are_reported_and_their_weights_measured():
    model = net()
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    run = train(model, losses(), {"attention": {"targets": ["*.core"], "causal": False}, "linear": {}}, steps=2)

    assert {"spectral_norm", "stable_rank"} == {key.kind for key in run.rows[2]}
    assert 0 == run.faults
    assert ["attention: blocks.0.core, blocks.1.core: is part of compiled code, so it is not measured"] == run.notices


def test_failing_hook_loses_only_its_own_features(monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("rankscope_exporter.quantities.attention.attention_sums", fails)
    run = train(net(), losses(), EVERYTHING, steps=2)

    assert {"stable_rank", "spectral_norm", "router_entropy", "router_load", "router_similarity"} == {
        key.kind for key in run.rows[2]
    }
    assert run.faults == 8
    assert 1 == len(run.notices)
    assert equal_bits(run, train(net(), losses(), None, steps=2))


@pytest.mark.parametrize(
    ("quantity", "options", "text"),
    [
        ("attention", {"order": "s,b,d"}, "order must be 's,b,h,d' or these letters in another order, not 's,b,d'"),
        ("attention", {"query": -1}, "query must be the position or the name of an argument"),
        ("attention", {"mask": True}, "mask must be the position or the name of an argument"),
        ("attention", {"mask_true": True}, "mask_true must be 'auto', 'attends' or 'hides'"),
        ("attention", {"causal": "yes"}, "causal must be true, false or 'auto'"),
        ("attention", {"scale": "big"}, "scale must be a finite number"),
        ("attention", {"rows": 0}, "rows must be a whole number of at least 1"),
        ("linear", {"tolerance": 0}, "tolerance must be a number of at least 1e-05 and below 1"),
        ("linear", {"tolerance": 1.0}, "tolerance must be a number of at least 1e-05 and below 1"),
        ("router", {"top_k": 0}, "top_k must be a whole number of at least 1"),
        ("router", {"logits": "guessed"}, "logits must be 'returned' or 'computed', not 'guessed'"),
        ("router", {"output": "second"}, "'second' does not select an element of an argument or result"),
    ],
)  # fmt: skip
def test_invalid_options_are_rejected(quantity, options, text):
    with pytest.raises(ConfigError, match="options"):
        MonitorConfig(quantities=(quantity,), options={quantity: options})
    with pytest.raises(ConfigError) as raised:
        MonitorConfig(quantities=(quantity,), options={quantity: options})
    assert text in str(raised.value)


def test_detach_leaves_no_hook():
    model = net()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    config = MonitorConfig(quantities=tuple(EVERYTHING), options=EVERYTHING, console=False, exit_wait_seconds=0)
    monitor = Monitor(config).attach(model)
    assert hooks < sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    monitor.detach()

    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert 0 == monitor.faults
