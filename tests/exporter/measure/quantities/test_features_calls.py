"""Tests of reading attention and router calls: all forms of arguments, masks and logits, and notices about others."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.measure.kernels.conftest import normal
from tests.exporter.measure.quantities.trainings import Composed, Feature, Run, measure
from torch import nn


class Gate(nn.Module):
    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        return self.answer(x @ self.weight.t())


def forms(answer: Callable[[torch.Tensor], Any], calls: int = 1) -> nn.Module:
    """Return a model with a gate that is called `calls` times, and one that is never called."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            net.gate(x)
        return x.sum() * net.gate.weight.sum()

    torch.manual_seed(0)
    return Composed(forward, gate=Gate(answer), never=Gate(answer))


def form_loss(model: nn.Module, _step: int) -> torch.Tensor:
    return model(torch.arange(8.0).view(2, 4))


@pytest.mark.parametrize(
    ("answer", "options", "measured"),
    [
        (lambda z: z, {"top_k": 1}, True),
        (lambda z: (z.argmax(-1), z), {"top_k": 1, "output": "tuple[2]:1"}, True),
        (lambda z: {"scores": z.sum(), "logits": z}, {"top_k": 1, "output": "dict:logits"}, True),
        (lambda z: z.argmax(-1), {"top_k": 1}, "router: gate: returns an output that is int64[2] and cannot be logits"),
        (lambda z: None, {"top_k": 1}, "router: gate: returns no 'tensor'"),
        (lambda z: z, {"output": "tuple[2]:1"}, "router: gate: returns no 'tuple[2]:1'"),
    ],
)  # fmt: skip
def test_logits_are_found_in_the_output_of_a_router(answer, options, measured):
    run = measure(forms(answer), form_loss, {"router": {"targets": ["gate"], **options}})
    if measured is not True:
        assert (0, {}, [measured]) == (run.faults, run.features, run.notices)
        return

    logits = torch.arange(8.0).view(2, 4) @ forms(answer).gate.weight.detach().t()
    rows = run.features[1]
    assert [0, 1, 2] == sorted(key.index for key in rows if key.kind == "router_load")
    assert 1 == pytest.approx(sum(value for key, value in rows.items() if key.kind == "router_load"))
    expected = float(torch.distributions.Categorical(logits=logits.double()).entropy().mean())
    assert expected == pytest.approx(rows[Feature("router_entropy", "gate", None, 0)], rel=1e-5)
    assert [] == run.notices


@pytest.mark.parametrize(("rows", "bias"), [(3, False), (3, True), (4, True)])
def test_logits_are_computed_for_a_router_that_returns_probabilities(rows, bias):
    """The weight is experts x width or width x experts; the argument is read before the module overwrites it."""

    def forward(gate: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.data.zero_()
        return torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)

    gate = Composed(forward)
    gate.wg, gate.topk = nn.Parameter(torch.randn(rows, 7 - rows)), 1
    gate.bias = nn.Parameter(torch.randn(3)) if bias else None
    model = Composed(lambda net, x: net.gate(x.clone())[0].sum() * net.other(x).sum(), gate=gate, other=nn.Linear(4, 1))
    run = measure(model, form_loss, {"router": {"targets": ["gate"], "logits": "computed"}}, steps=1)

    wide = model.gate.wg.detach().double()
    logits = torch.arange(8.0).double().view(2, 4) @ (wide.t() if rows == 3 else wide)
    logits = logits + model.gate.bias.detach() if bias else logits
    assert (0, []) == (run.faults, run.notices)
    found = run.features[1]
    expected = float(torch.distributions.Categorical(logits=logits).entropy().mean())
    assert expected == pytest.approx(found[Feature("router_entropy", "gate", None, 0)], rel=1e-5)
    loads = logits.argmax(-1).bincount(minlength=3) / 2
    assert loads.tolist() == [found[Feature("router_load", "gate", expert, 0)] for expert in range(3)]
    assert Feature("router_similarity", "gate") in found


@pytest.mark.parametrize(
    ("call", "notices"),
    [
        (lambda gate, x: gate(x.long()), "has an argument that is int64[2, 4] and cannot be logits"),
        (lambda gate, x: gate(x[:, :2]), "has a weight of shape [3, 4], which does not fit its argument"),
    ],
)
def test_logits_that_cannot_be_computed_are_reported(call, notices):
    core = Composed(lambda _core, x: x)
    core.weight = nn.Parameter(torch.randn(3, 4))
    model = called(core, call)
    run = measure(model, form_loss, {"router": {"targets": ["core"], "logits": "computed", "top_k": 1}}, steps=2)

    assert (0, {}, [f"router: core: {notices}"]) == (run.faults, run.features, run.notices)


def test_missing_router_features_are_reported_once():
    run = measure(forms(lambda z: z, calls=2), form_loss, {"router": {"targets": ["gate", "never", "gaet"]}}, steps=3)

    assert {"router_entropy", "router_similarity"} == {key.kind for key in run.features[3]}
    assert [
        "router: gate: has no router_load, because the number of experts per token is unknown: set top_k",
        "router: gate: is called more than once in a micro-batch, of which only the first call is measured",
        "router: never: was not called in a forward of the model, so it is not measured",
        "router: target 'gaet' matches no module; nearest: gate",
    ] == sorted(run.notices)
    assert 0 == run.faults


# Arguments of attention.


def called(core: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any]) -> nn.Module:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        call(net.core, x)
        return (x * net.scale).sum()

    model = Composed(forward, core=core)
    model.scale = nn.Parameter(torch.ones(1))
    return model


class Signature(nn.Module):
    def forward(
        self, q: Any, k: Any, v: Any = None, attention_mask: Any = None, is_causal: Any = None, **_: Any
    ) -> Any:
        return q


class OfMegatron(Signature):
    def __init__(self) -> None:
        super().__init__()
        self.attn_mask_type = type("AttnMaskType", (), {"name": "padding_causal"})()


OfMegatron.__module__ = "megatron.core.transformer.dot_product_attention"
X = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(3))  # b h s d
TRIL = torch.ones(5, 5, dtype=torch.bool).tril()


def entropies(scale: float = 0.5, hidden: torch.Tensor | None = None) -> list[float]:
    scores = X.double() @ X.double().transpose(2, 3) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.distributions.Categorical(logits=scores).entropy().mean((0, 2)).tolist()


WHOLE, MASKED = entropies(), entropies(hidden=~TRIL)
CALLS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], dict[str, Any], list[float]]] = {
    "by position": (lambda core, x: core(x, x), {}, WHOLE),
    "by keyword, meant by position": (lambda core, x: core(k=x, q=x), {}, WHOLE),
    "by position, meant by name": (lambda core, x: core(x, x), {"query": "q", "key": "k"}, WHOLE),
    "other arguments": (lambda core, x: core(x.sum(), None, x, key=x), {"query": 2, "key": "key"}, WHOLE),
    "mask by position": (lambda core, x: core(x, x, x, TRIL), {}, MASKED),
    "mask by keyword": (lambda core, x: core(x, x, attention_mask=TRIL), {}, MASKED),
    "mask of another name": (lambda core, x: core(x, x, m=TRIL), {"mask": "m"}, MASKED),
    "mask left out": (lambda core, x: core(x, x, x, TRIL), {"mask": "none"}, WHOLE),
    "mask that hides": (lambda core, x: core(x, x, x, ~TRIL), {"mask_true": "hides"}, MASKED),
    "causal flag": (lambda core, x: core(x, x, is_causal=True), {}, MASKED),
    "causal flag left out": (lambda core, x: core(x, x, is_causal=True), {"causal": False}, WHOLE),
    "causal by option": (lambda core, x: core(x, x), {"causal": True}, MASKED),
    "Megatron: causal by attribute": (lambda core, x: core(x, x), {}, MASKED),
    "Megatron: masks hide": (lambda core, x: core(x, x, x, ~TRIL), {"causal": False}, MASKED),
    "scale by argument": (lambda core, x: core(x, x, scale=2), {}, entropies(2.0)),
    "scale by option": (lambda core, x: core(x, x, scale=2), {"scale": 0.1}, entropies(0.1)),
    "batch first": (lambda core, x: core(*[x.transpose(1, 2)] * 2), {"order": "b,s,h,d"}, WHOLE),
    "sequence first": (lambda core, x: core(*[x.permute(2, 0, 1, 3)] * 2), {"order": "s, b, h, d"}, WHOLE),
}


def attention_of(core: nn.Module, call: Callable[..., Any], *, steps: int, **options: Any) -> Run:
    settings = {"targets": ["core"], "order": "b,h,s,d", **options}
    return measure(called(core, call), lambda model, _step: model(X), {"attention": settings}, steps=steps)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usual(7)
def test_query_key_mask_and_scale_are_found_in_a_call(name):
    call, options, expected = CALLS[name]
    core = OfMegatron() if "Megatron" in name else Signature()
    unmasked = {} if "causal" in name or "mask" in name else {"causal": False}
    run = attention_of(core, call, steps=1, **unmasked, **options)

    assert (0, []) == (run.faults, run.notices)
    found = [run.features[1][Feature("attention_entropy", "core", head, 0)] for head in range(3)]
    assert expected == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "notices"),
    [
        (lambda core, x: core(x, None), "key is not a tensor argument"),
        (lambda core, x: core(x.flatten(2), x), "query is [2, 3, 20], not four dimensions of numbers: target the core"),
        (lambda core, x: core(x, x.long()), "key is [2, 3, 5, 4], not four dimensions of numbers: target the core"),
        (lambda core, x: core(x, x[:, :2]), "3 heads of the query are not a multiple of 2 heads of the key: see order"),
        (lambda core, x: core(x, x[..., :3]), "query [2, 3, 5, 4] and key [2, 3, 5, 3]"),
        (lambda core, x: core(x, x[:, :, :0]), "key has no elements"),
        (lambda core, x: core(x, x, x, TRIL[:4, :4]), "mask of shape [4, 4] does not fit the scores of its calls"),
        (lambda core, x: core(x, x.to("meta")), "key is a meta tensor"),
    ],
)  # fmt: skip
def test_unreadable_attention_call_is_reported_once_and_has_no_rows(call, notices):
    run = attention_of(Signature(), call, steps=2)

    assert (0, {}) == (run.faults, run.features)
    assert 1 == len(run.notices)
    assert run.notices[0].startswith(f"attention: core: {notices}")


class Inside(nn.Module):
    """A core that gets query, key and value only. `way` names the mask that it has inside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q * self.weight
        if self.way.startswith("sdpa"):
            mask = {"attn_mask": TRIL[0].expand(5, 5)} if self.way == "sdpa window" else {}
            causal = self.way == "sdpa causal"
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **mask).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) / 2
        if self.way == "masked_fill":
            scores = scores.masked_fill(~TRIL, -math.inf)
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        *(("sdpa", entropies()), ("sdpa causal", entropies(hidden=~TRIL)), ("sdpa window", None)),
        *(("softmax", entropies()), ("masked_fill", None)),
    ],
)
def test_mask_inside_of_a_module_is_used_or_the_module_is_reported(way, expected):
    run = attention_of(Inside(way), lambda core, x: core(x, x, x), steps=1)
    found = [run.features.get(1, {}).get(Feature("attention_entropy", "core", head, 0)) for head in range(3)]

    assert 0 == run.faults
    if expected is None:
        assert [None] * 3 == found
        assert "attention: core: gets no mask, and may have one inside that cannot be seen" in run.notices[0]
    else:
        assert ([], pytest.approx(expected, rel=1e-5)) == (run.notices, found)


# torch's own attention module: entropy and maximum equal those of its returned weights.

BATCH, HEADS, WIDTH, QUERIES, KEYS = 3, 2, 8, 5, 6


A, B = normal(BATCH, QUERIES, WIDTH), normal(BATCH, KEYS, WIDTH, seed=1)
HIDES = normal(QUERIES, KEYS, seed=2) > 0.3
BY_HEAD = normal(BATCH * HEADS, QUERIES, KEYS, seed=4)
LATER = ~torch.ones(5, 5).tril().bool()
PADDING = torch.arange(KEYS) >= torch.tensor([6, 4, 5])[:, None]


def added(mask: torch.Tensor, other: float = 0.0) -> torch.Tensor:
    return torch.full(mask.shape, other).masked_fill(mask, float("-inf"))


Call = Callable[..., Any]
MULTIHEAD: dict[str, tuple[dict[str, Any], Call]] = {
    "itself": ({"batch_first": True}, lambda m, **k: m(A, A, A, **k)),
    "sequence first": ({}, lambda m, **k: m(A.transpose(0, 1), B.transpose(0, 1), B.transpose(0, 1), **k)),
    "by keyword": ({"batch_first": True}, lambda m, **k: m(value=B, key=B, query=A, **k)),
    "no batch": ({"batch_first": True}, lambda m, **k: m(A[0], B[0], B[0], attn_mask=HIDES, **k)),
    "other widths": ({"batch_first": True, "kdim": 4, "vdim": 5}, lambda m, **k: m(A, B[..., :4], B[..., :5], **k)),
    "no bias": ({"batch_first": True, "bias": False}, lambda m, **k: m(A, B, B, **k)),
    "mask": ({"batch_first": True}, lambda m, **k: m(A, B, B, attn_mask=HIDES, **k)),
    "mask by head": ({"batch_first": True}, lambda m, **k: m(A, B, B, attn_mask=BY_HEAD, **k)),
    "padding": ({"batch_first": True}, lambda m, **k: m(A, B, B, PADDING, **k)),
    "both": ({"batch_first": True}, lambda m, **k: m(A, B, B, attn_mask=HIDES, key_padding_mask=PADDING, **k)),
    "both added": ({"batch_first": True}, lambda m, **k: m(A, B, B, added(PADDING), attn_mask=added(HIDES, 0.5), **k)),
    "causal": ({"batch_first": True}, lambda m, **k: m(A, A, A, attn_mask=LATER, is_causal=True, **k)),
}


def multihead(call: Call, **options: Any) -> nn.Module:
    model = Composed(lambda net: call(net.attention)[0], attention=nn.MultiheadAttention(WIDTH, HEADS, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return model


def whole_loss(model: nn.Module, _step: int) -> torch.Tensor:
    return model().square().mean()


@pytest.mark.parametrize("case", MULTIHEAD)
def test_features_equal_those_of_the_returned_attention_weights(case):
    options, call = MULTIHEAD[case]
    model = multihead(call, **options)
    _, weights = call(model.attention, need_weights=True, average_attn_weights=False)
    weights = weights.detach().double().reshape(-1, HEADS, *weights.shape[-2:])
    known = ~weights.isnan().any(-1).transpose(0, 1)  # a query that attends to no key has NaN here
    entropy = -torch.special.xlogy(weights, weights).sum(-1).transpose(0, 1)
    largest = weights.amax(-1).transpose(0, 1)
    run = measure(model, whole_loss, {"attention": {"targets": ["attention"]}}, steps=1)

    assert (0, []) == (run.faults, run.notices)
    for head in range(HEADS):
        for kind, expected in (("attention_entropy", entropy), ("softmax_max", largest)):
            found = run.features[1][Feature(kind, "attention", head, 0)]
            assert float(expected[head][known[head]].mean()) == pytest.approx(found, rel=1e-5), (kind, head)


def test_module_that_adds_its_own_keys_is_reported():
    model = multihead(MULTIHEAD["itself"][1], batch_first=True, add_bias_kv=True)
    run = measure(model, whole_loss, {"attention": {"targets": ["attention"]}})

    assert (0, {}) == (run.faults, run.features)
    assert ["attention: attention: adds its own keys (bias_k, add_zero_attn)"] == run.notices
