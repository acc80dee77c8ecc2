"""torch's own attention module as a target: entropy and maximum equal those of its returned weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.quantities.feature_runs import Feature, train
from torch import nn

BATCH, HEADS, WIDTH, QUERIES, KEYS = 3, 2, 8, 5, 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y = normal(BATCH, QUERIES, WIDTH), normal(BATCH, KEYS, WIDTH, seed=1)
HIDES = normal(QUERIES, KEYS, seed=2) > 0.3
PADDING = torch.arange(KEYS) >= torch.tensor([6, 4, 5])[:, None]


def added(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


Call = Callable[..., Any]
CASES: dict[str, tuple[dict[str, Any], Call]] = {
    "itself": ({"batch_first": True}, lambda m, **k: m(X, X, X, **k)),
    "sequence first": ({}, lambda m, **k: m(X.transpose(0, 1), Y.transpose(0, 1), Y.transpose(0, 1), **k)),
    "by keyword": ({"batch_first": True}, lambda m, **k: m(value=Y, key=Y, query=X, **k)),
    "no batch": ({"batch_first": True}, lambda m, **k: m(X[0], Y[0], Y[0], attn_mask=HIDES, **k)),
    "other widths": ({"batch_first": True, "kdim": 4, "vdim": 5}, lambda m, **k: m(X, Y[..., :4], Y[..., :5], **k)),
    "no bias": ({"batch_first": True, "bias": False}, lambda m, **k: m(X, Y, Y, **k)),
    "mask": ({"batch_first": True}, lambda m, **k: m(X, Y, Y, attn_mask=HIDES, **k)),
    "mask by head": (
        {"batch_first": True},
        lambda m, **k: m(X, Y, Y, attn_mask=normal(BATCH * HEADS, QUERIES, KEYS, seed=4), **k),
    ),
    "padding": ({"batch_first": True}, lambda m, **k: m(X, Y, Y, PADDING, **k)),
    "both": ({"batch_first": True}, lambda m, **k: m(X, Y, Y, attn_mask=HIDES, key_padding_mask=PADDING, **k)),
    "both added": (
        {"batch_first": True},
        lambda m, **k: m(X, Y, Y, attn_mask=added(HIDES) + HIDES * 0.5, key_padding_mask=added(PADDING), **k),
    ),
    "causal": (
        {"batch_first": True},
        lambda m, **k: m(X, X, X, attn_mask=~torch.ones(5, 5).tril().bool(), is_causal=True, **k),
    ),
}


class Net(nn.Module):
    def __init__(self, call: Call, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        with torch.no_grad():
            for name, parameter in self.attention.named_parameters():
                if "bias" in name:
                    parameter.normal_()
        self.call = call

    def forward(self, *_: Any) -> torch.Tensor:
        return self.call(self.attention)[0]


def loss(model: nn.Module, _step: int) -> torch.Tensor:
    return model().square().mean()


@pytest.mark.parametrize("case", CASES)
def test_features_equal_those_of_the_returned_attention_weights(case):
    options, call = CASES[case]
    model = Net(call, **options)
    _, weights = call(model.attention, need_weights=True, average_attn_weights=False)
    weights = weights.detach().double().reshape(-1, HEADS, *weights.shape[-2:])
    known = ~weights.isnan().any(-1).transpose(0, 1)  # a query that attends to no key has NaN here
    entropy = -torch.special.xlogy(weights, weights).sum(-1).transpose(0, 1)
    largest = weights.amax(-1).transpose(0, 1)
    run = train(model, [loss], {"attention": {"targets": ["attention"]}}, steps=1)

    assert (0, []) == (run.faults, run.notices)
    for head in range(HEADS):
        for kind, expected in (("attention_entropy", entropy), ("softmax_max", largest)):
            found = run.rows[1][Feature(kind, "attention", head, 0)]
            assert float(expected[head][known[head]].mean()) == pytest.approx(found, rel=1e-5), (kind, head)


def test_module_that_adds_its_own_keys_is_reported():
    call = CASES["itself"][1]
    run = train(Net(call, batch_first=True, add_bias_kv=True), [loss], {"attention": {"targets": ["attention"]}})

    assert (0, {}) == (run.faults, run.rows)
    assert ["attention: attention: adds its own keys (bias_k, add_zero_attn)"] == run.notices
