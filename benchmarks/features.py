"""Features of modules: attention against one plain softmax over the same scores, weights against their products.

All on one thread of a CPU, float32. Attention is per score: a query and a key of one head of one element of the batch.
"""

from __future__ import annotations

import torch
from _rows import Row, cpu_seconds

from rankscope_exporter.measure.formulas import Mask, attention_sums, lanczos_steps, norms, spectral_numbers

BATCH, HEADS, WIDTH = 2, 8, 64
SIZE = 1024
ROUNDS = 5


def run() -> list[Row]:
    torch.set_num_threads(1)
    return [*_attention(512), *_attention(2048), *_weights()]


def _attention(length: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(BATCH, HEADS, length, WIDTH, generator=generator) for _ in range(2))
    scores = BATCH * HEADS * length * length
    plain = cpu_seconds(lambda: torch.softmax(query @ key.transpose(2, 3) / WIDTH**0.5, -1), ROUNDS)
    ways = {
        "all rows": cpu_seconds(lambda: attention_sums(query, key, Mask()), ROUNDS),
        "causal": cpu_seconds(lambda: attention_sums(query, key, Mask(causal=True)), ROUNDS),
        "rows = 64": cpu_seconds(lambda: attention_sums(query, key, Mask(), rows=64), ROUNDS),
    }
    name = f"attention, {length:,} x {length:,}"
    return [
        Row(f"{name}, plain", plain / scores * 1e9, "ns per score", "product and softmax, whole in memory"),
        *(
            Row(f"{name}, {way}", taken / scores * 1e9, "ns per score", f"{taken / plain:.2f} x plain")
            for way, taken in ways.items()
        ),
    ]


def _weights() -> list[Row]:
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.svdvals(weight.double())[0])
    decomposed = cpu_seconds(lambda: torch.linalg.svdvals(weight), 1)
    rows = [Row(f"singular values of {SIZE:,} x {SIZE:,}", decomposed * 1e3, "ms", "torch.linalg.svdvals")]
    for tolerance in (0.1, 0.01, 0.001):
        taken = cpu_seconds(lambda tolerance=tolerance: spectral_numbers([weight], tolerance), 3)
        off = 1 - float(norms(spectral_numbers([weight], tolerance))[0][0]) / exact
        note = f"{lanczos_steps(SIZE, tolerance)} steps, {off:.1e} too low"
        rows.append(Row(f"spectral norm, tolerance {tolerance:g}", taken * 1e3, "ms", note))
    return rows
