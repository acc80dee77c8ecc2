"""Train a small byte-level GPT on the sources of the Python standard library, with torchrun and DDP.

    torchrun --standalone --nproc-per-node 2 examples/gpt_ddp.py

An ordinary training script: Rankscope needs only the lines marked [rankscope]. By default the script causes faults
(`--nan-step`, `--scale-step`) to show their effects; `--no-faults` trains without them.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import rankscope  # [rankscope] 1 of 3

BYTES = 256


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # Without bias: the gradient of a key bias is zero except for rounding, and the average of noise is meaningless.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2, layers that add to the residual stream start smaller if there are more of them.
                into_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(positions))))


def standard_library_text(limit: int = 16_000_000) -> Tensor:
    """Return the sources of the standard library as bytes, equal on all ranks."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def draw_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int, steps: int, peak: float, warmup: int = 20) -> float:
    if step <= warmup:
        return peak * step / warmup
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


class Fault:
    """Multiplies the local gradient of one tensor before DDP averages it, at one step of one rank."""

    def __init__(self, parameter: nn.Parameter, at_step: int, factor: float) -> None:
        self.at_step, self.factor, self.step = at_step, factor, 0
        parameter.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor if self.step == self.at_step else gradient


def faults_of(args: argparse.Namespace, model: GPT, rank: int) -> list[Fault]:
    planned = [
        (args.nan_rank, args.nan_step, "blocks.2.mlp.0.weight", math.nan),
        (args.scale_rank, args.scale_step, "positions.weight", args.scale_factor),
    ]
    parameters = dict(model.named_parameters())
    if args.no_faults:
        return []
    return [Fault(parameters[name], step, factor) for who, step, name, factor in planned if who == rank]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=144)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nan-step", type=int, default=60, help="step at which a local gradient becomes NaN")
    parser.add_argument("--nan-rank", type=int, default=1)
    parser.add_argument("--scale-step", type=int, default=120, help="step of a scaled local gradient, at least 101")
    parser.add_argument("--scale-rank", type=int, default=0)
    parser.add_argument("--scale-factor", type=float, default=50.0)
    parser.add_argument("--no-faults", action="store_true", help="break nothing")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.heads, args.context)
    faults = faults_of(args, model, rank)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, betas=(0.9, 0.95))

    text = standard_library_text()
    if rank == 0:
        tensors = list(model.parameters())
        print(f"model: {len(tensors)} tensors, {sum(p.numel() for p in tensors):,} elements; text: {len(text):,} bytes")
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)

    monitor = rankscope.Monitor(total_steps=args.steps)  # [rankscope] 2 of 3
    monitor.attach(ddp, optimizer)
    with monitor:
        for step in range(1, args.steps + 1):
            for fault in faults:
                fault.step = step
            rate = learning_rate(step, args.steps, args.lr)
            for group in optimizer.param_groups:
                group["lr"] = rate

            inputs, targets = draw_batch(text, args.batch, args.context, generator)
            loss = functional.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            grad_norm = clip_grad_norm_(ddp.parameters(), 1.0)
            if torch.isfinite(grad_norm):  # like real trainings: an optimizer step with non-finite gradients is skipped
                optimizer.step()
            optimizer.zero_grad()

            monitor.log(loss=loss, grad_norm=grad_norm, tokens=inputs.numel(), learning_rate=rate)  # [rankscope] 3 of 3
            if rank == 0 and (step % 20 == 0 or step == 1):
                print(f"step {step}/{args.steps}  loss {loss.item():.4f}  grad norm {grad_norm.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
