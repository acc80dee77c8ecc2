"""Tests of reading attention and router calls: all forms of arguments, masks and logits, and notices about others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.quantities.feature_runs import Feature, train
from torch import nn


class TensorSpec(nn.Module):
    """A module that returns a given result."""

    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        return self.answer(x @ self.weight.t())


class Forms(nn.Module):
    def __init__(self, answer: Callable[[torch.Tensor], Any], calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = TensorSpec(answer)
        self.never = TensorSpec(answer)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            self.gate(x)
        return x.sum() * self.gate.weight.sum()


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
    run = train(Forms(answer), [form_loss], {"router": {"targets": ["gate"], **options}})
    if measured is not True:
        assert (0, {}, [measured]) == (run.faults, run.rows, run.notices)
        return

    logits = torch.arange(8.0).view(2, 4) @ Forms(answer).gate.weight.detach().t()
    rows = run.rows[1]
    assert [0, 1, 2] == sorted(key.index for key in rows if key.kind == "router_load")
    assert 1 == pytest.approx(sum(value for key, value in rows.items() if key.kind == "router_load"))
    expected = float(torch.distributions.Categorical(logits=logits.double()).entropy().mean())
    assert expected == pytest.approx(rows[Feature("router_entropy", "gate", None, 0)], rel=1e-5)
    assert [] == run.notices


@pytest.mark.parametrize(("rows", "bias"), [(3, False), (3, True), (4, True)])
def test_logits_are_computed_for_a_router_that_returns_probabilities(rows, bias):
    """The weight is experts x width or width x experts; the argument is read before the module overwrites it."""

    class Probabilities(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wg = nn.Parameter(torch.randn(rows, 7 - rows))
            self.bias = nn.Parameter(torch.randn(3)) if bias else None
            self.topk = 1

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x.data.zero_()
            return torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)

    torch.manual_seed(0)
    model = Forms(lambda z: z)
    model.gate = Probabilities()
    model.forward = lambda x: model.gate(x.clone())[0].sum() * model.never.weight.sum()
    run = train(model, [form_loss], {"router": {"targets": ["gate"], "logits": "computed"}}, steps=1)

    wide = model.gate.wg.detach().double()
    logits = torch.arange(8.0).double().view(2, 4) @ (wide.t() if rows == 3 else wide)
    logits = logits + model.gate.bias.detach() if bias else logits
    assert (0, []) == (run.faults, run.notices)
    found = run.rows[1]
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
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Called(Router(), call)
    run = train(model, [form_loss], {"router": {"targets": ["core"], "logits": "computed", "top_k": 1}}, steps=2)

    assert (0, {}, [f"router: core: {notices}"]) == (run.faults, run.rows, run.notices)


def test_missing_router_features_are_reported_once():
    options = {"router": {"targets": ["gate", "never", "gaet"]}}
    run = train(Forms(lambda z: z, calls=2), [form_loss], options, steps=3)

    assert {"router_entropy", "router_similarity"} == {key.kind for key in run.rows[3]}
    assert [
        "router: gate: has no router_load, because the number of experts per token is unknown: set top_k",
        "router: gate: is called more than once in a micro-batch, of which only the first call is measured",
        "router: never: was not called in a forward of the model, so it is not measured",
        "router: target 'gaet' matches no module; nearest: gate",
    ] == sorted(run.notices)
    assert 0 == run.faults


# Arguments of attention.


class Called(nn.Module):
    """A module that calls a core in a given form."""

    def __init__(self, core: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.core, self.call = core, call
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call(self.core, x)
        return (x * self.scale).sum()


class Signature(nn.Module):
    """A core with the usual parameters; computes nothing."""

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


CALLS: dict[str, tuple[nn.Module, Callable[[nn.Module, torch.Tensor], Any], dict[str, Any], list[float]]] = {
    "by position": (Signature(), lambda core, x: core(x, x), {}, entropies()),
    "by keyword, meant by position": (Signature(), lambda core, x: core(k=x, q=x), {}, entropies()),
    "by position, meant by name": (Signature(), lambda core, x: core(x, x), {"query": "q", "key": "k"}, entropies()),
    "other arguments": (
        Signature(),
        lambda core, x: core(x.sum(), None, x, key=x),
        {"query": 2, "key": "key"},
        entropies(),
    ),
    "mask by position": (Signature(), lambda core, x: core(x, x, x, TRIL), {}, entropies(hidden=~TRIL)),
    "mask by keyword": (Signature(), lambda core, x: core(x, x, attention_mask=TRIL), {}, entropies(hidden=~TRIL)),
    "mask of another name": (Signature(), lambda core, x: core(x, x, m=TRIL), {"mask": "m"}, entropies(hidden=~TRIL)),
    "mask left out": (Signature(), lambda core, x: core(x, x, x, TRIL), {"mask": "none"}, entropies()),
    "mask that hides": (
        Signature(),
        lambda core, x: core(x, x, x, ~TRIL),
        {"mask_true": "hides"},
        entropies(hidden=~TRIL),
    ),
    "causal flag": (Signature(), lambda core, x: core(x, x, is_causal=True), {}, entropies(hidden=~TRIL)),
    "causal flag left out": (Signature(), lambda core, x: core(x, x, is_causal=True), {"causal": False}, entropies()),
    "causal by option": (Signature(), lambda core, x: core(x, x), {"causal": True}, entropies(hidden=~TRIL)),
    "causal by attribute": (OfMegatron(), lambda core, x: core(x, x), {}, entropies(hidden=~TRIL)),
    "Megatron's masks hide": (
        OfMegatron(),
        lambda core, x: core(x, x, x, ~TRIL),
        {"causal": False},
        entropies(hidden=~TRIL),
    ),
    "scale by argument": (Signature(), lambda core, x: core(x, x, scale=2), {}, entropies(2.0)),
    "scale by option": (Signature(), lambda core, x: core(x, x, scale=2), {"scale": 0.1}, entropies(0.1)),
    "batch first": (
        Signature(),
        lambda core, x: core(x.transpose(1, 2), x.transpose(1, 2)),
        {"order": "b,s,h,d"},
        entropies(),
    ),
    "sequence first": (
        Signature(),
        lambda core, x: core(x.permute(2, 0, 1, 3), x.permute(2, 0, 1, 3)),
        {"order": "s, b, h, d"},
        entropies(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usual(7)
def test_query_key_mask_and_scale_are_found_in_a_call(name):
    core, call, options, expected = CALLS[name]
    unmasked = {} if "causal" in name or "mask" in name.lower() else {"causal": False}
    settings = {"targets": ["core"], "order": "b,h,s,d", **unmasked, **options}
    run = train(Called(core, call), [lambda model, _step: model(X)], {"attention": settings}, steps=1)

    assert (0, []) == (run.faults, run.notices)
    found = [run.rows[1][Feature("attention_entropy", "core", head, 0)] for head in range(3)]
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
    settings = {"targets": ["core"], "order": "b,h,s,d"}
    run = train(Called(Signature(), call), [lambda model, _step: model(X)], {"attention": settings}, steps=2)

    assert (0, {}) == (run.faults, run.rows)
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
        ("sdpa", entropies()),
        ("sdpa causal", entropies(hidden=~TRIL)),
        ("sdpa window", None),
        ("softmax", entropies()),
        ("masked_fill", None),
    ],
)
def test_mask_inside_of_a_module_is_used_or_the_module_is_reported(way, expected):
    call = lambda core, x: core(x, x, x)  # noqa: E731 - as in CALLS
    settings = {"targets": ["core"], "order": "b,h,s,d"}
    run = train(Called(Inside(way), call), [lambda model, _step: model(X)], {"attention": settings}, steps=1)
    found = [run.rows.get(1, {}).get(Feature("attention_entropy", "core", head, 0)) for head in range(3)]

    assert 0 == run.faults
    if expected is None:
        assert [None] * 3 == found
        assert "attention: core: gets no mask, and may have one inside that cannot be seen" in run.notices[0]
    else:
        assert ([], pytest.approx(expected, rel=1e-5)) == (run.notices, found)
