"""Small models of common kinds, written only with torch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own examples have it

WIDTH, HEADS, VOCABULARY = 64, 4, 200


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank product (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Causal attention, optionally with fewer heads for keys and values."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // HEADS * kv_heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.unflatten(-1, (count, -1)).transpose(1, 2)

        query, key, value = heads(self.q_proj(x), HEADS), heads(self.k_proj(x), self.kv_heads), self.v_proj(x)
        mixed = F.scaled_dot_product_attention(
            query, key, heads(value, self.kv_heads), is_causal=True, enable_gqa=self.kv_heads != HEADS
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self, between: int = 160) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, between, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(between, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """A router that sends each token to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = F.softmax(self.router(rows), -1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]) * shares[row, place, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A token decoder, optionally described by `config`."""

    def __init__(self, *layers: nn.Module, **config: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.config = SimpleNamespace(**config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def dense_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def gpt() -> Decoder:
    return Decoder(*(Layer(Attention(), dense_mlp()) for _ in range(2)))


def llama() -> Decoder:
    return Decoder(*(Layer(Attention(kv_heads=2), Gated()) for _ in range(2)))


def mixture_of_experts() -> Decoder:
    return Decoder(*(Layer(Attention(), Experts()) for _ in range(2)))


def frozen_with_adapters() -> Decoder:
    model = llama().requires_grad_(requires_grad=False)
    for layer in model.layers:
        layer.attention.q_proj = Adapted(layer.attention.q_proj)
        layer.attention.v_proj = Adapted(layer.attention.v_proj)
    return model


class Vit(nn.Module):
    """A vision transformer over 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.positions = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.layers = nn.Sequential(*(Layer(Attention(), dense_mlp()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(x).mean(1))


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.way(x) + self.short(x))


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(stem, Block(8, 16, 1), Block(16, 32, 2), head)
