"""Hashes of all parameters of a model, for replicas that come apart: CPU time of one thread, against one read.

10 M parameters in 150 tensors. The floor is a plain `torch.sum` over the same bytes in one piece. What a step costs is
the hash and the norm together, made at every hundredth step.
"""

from __future__ import annotations

import torch
from _rows import Row, cpu_seconds, print_rows

from rankscope_exporter.measure.kernels.hashes import Hasher
from rankscope_exporter.measure.quantities.hashes import Measure

PARAMETERS = 10_000_000
TENSORS = 150
EVERY = 100
CPU = torch.device("cpu")
ROUNDS = 11


def run() -> list[Row]:
    torch.set_num_threads(1)
    return [row for dtype in (torch.float32, torch.bfloat16) for row in _of(dtype)]


def _of(dtype: torch.dtype) -> list[Row]:
    whole = torch.randn(PARAMETERS).to(dtype)
    # Sizes as models have them: a few large matrices hold nearly everything, most tensors are short vectors.
    large = PARAMETERS // (TENSORS // 3) - 512
    tensors = list(whole.split([large, 256, 256] * (TENSORS // 3)))
    hasher, measure = Hasher(CPU), Measure(CPU)
    floor = cpu_seconds(whole.view(torch.int64).sum, ROUNDS)
    hashes = cpu_seconds(lambda: hasher.partials(tensors), ROUNDS)
    both = cpu_seconds(lambda: measure.of(tensors), ROUNDS)
    size = PARAMETERS * dtype.itemsize / 1e9
    name = str(dtype).removeprefix("torch.")
    return [
        Row(f"10 M {name}, hash", hashes * 1e3, "ms", f"{size / hashes:.2g} GB/s, {hashes / floor:.1f} x the floor"),
        Row(f"10 M {name}, hash and norm", both * 1e3, "ms", f"{both / EVERY * 1e3:.2g} ms a step at every hundredth"),
        Row(f"10 M {name}, floor", floor * 1e3, "ms", f"{size / floor:.3g} GB/s"),
    ]


if __name__ == "__main__":
    print_rows(__doc__ or "", run())
