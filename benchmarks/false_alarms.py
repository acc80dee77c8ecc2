"""Count false incidents of AnomalyTurbulence in healthy training, and injected spikes that it catches.

    python benchmarks/false_alarms.py [--seeds 10] [--steps 2000]

Trains a small, noisy byte-level GPT on the source of the standard library, with the gradients of two ranks, and records
the norm of each gradient before and after the reduction. The rule is then evaluated for these norms with several
settings. A spike is a norm of one tensor of rank 0 that is 50 times the healthy one, at every 25th step from step 200
on, in a different tensor each time.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sysconfig

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rankscope_contract.rules.curve import EMA_KEEP, EMA_TAKE

RANKS, WIDTH, CONTEXT, BATCH, WARM_UP = 2, 32, 32, 8, 60
QUIET_STEPS = 20  # default of the service
SPIKE, FIRST_SPIKE, SPIKE_EVERY, SPIKES = 50.0, 200, 25, 33
SETTINGS = ((10.0, 0), (10.0, 100), (20.0, 0), (20.0, 100), (25.0, 0), (25.0, 100))


class Block(nn.Module):
    """A block of attention and MLP without biases: six tensors."""

    def __init__(self) -> None:
        """Create the tensors."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block for `x`, [batch, context, width]."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def norms_of(tensors: list[torch.Tensor]) -> np.ndarray:
    """Return the norm of each tensor."""
    return torch.stack([tensor.norm() for tensor in tensors]).numpy()


def healthy_norms(seed: int, steps: int, text: torch.Tensor) -> np.ndarray:
    """Return the norms of a training, float32 [steps, RANKS + 1, tensors]: of each rank, then after the reduction."""
    torch.manual_seed(seed)
    embedding, positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
    body = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, 256, bias=False))
    parameters = [*embedding.parameters(), *positions.parameters(), *body.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * n / steps))
    )
    norms = np.empty((steps, RANKS + 1, len(parameters)), np.float32)
    for step in range(steps):
        gradients = []
        for rank in range(RANKS):
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
            sample = text[starts + torch.arange(CONTEXT + 1)].long()
            logits = body(embedding(sample[:, :-1]) + positions.weight)
            loss = functional.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())
            gradients.append(torch.autograd.grad(loss, parameters))
            norms[step, rank] = norms_of(gradients[-1])
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        norms[step, RANKS] = norms_of([p.grad for p in parameters])
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return norms


def ratios(norms: np.ndarray) -> np.ndarray:
    """Return each norm divided by its baseline before the step."""
    baseline, found = norms[0].astype(np.float64), np.ones_like(norms, np.float64)
    for step, values in enumerate(norms[1:], 1):
        found[step] = values / baseline
        baseline = EMA_KEEP * baseline + EMA_TAKE * values
    return found


def main() -> None:
    """Train, evaluate, and print one line for each setting of the rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    runs = [ratios(healthy_norms(seed, args.steps, text)) for seed in range(1, args.seeds + 1)]
    print(f"largest ratio in health: {max(run.max() for run in runs):.1f}")
    print("threshold  after_values  false incidents  spikes caught")
    for threshold, after in SETTINGS:
        fires = [(run > 1 + threshold).any((1, 2)) & (np.arange(args.steps) >= after) for run in runs]
        gaps = [np.diff(np.flatnonzero(steps), prepend=-math.inf) for steps in fires]
        spikes = [(FIRST_SPIKE + SPIKE_EVERY * n, n % runs[0].shape[2]) for n in range(SPIKES)]
        caught = sum(SPIKE * runs[0][step, 0, tensor] > 1 + threshold for step, tensor in spikes)
        false = sum(int((gap > QUIET_STEPS).sum()) for gap in gaps)
        print(f"{threshold:9g}  {after:12}  {false:15}  {caught} of {SPIKES}")


if __name__ == "__main__":
    main()
