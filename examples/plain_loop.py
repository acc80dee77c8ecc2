"""Train a small GPT in one process. Each option adds a technique of large trainings.

python examples/plain_loop.py --accumulate 4 --scaler --checkpointing --compile
"""

from __future__ import annotations

import argparse
import os

import torch
from gpt_ddp import GPT, draw_batch, standard_library_text
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import rankscope


class Checkpointed(nn.Sequential):
    """Keeps only the input of each block, and computes its activations again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches to a step")
    parser.add_argument("--scaler", action="store_true", help="scale the loss, as float16 needs it")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1)
    model: nn.Module = GPT(width=96, layers=2, heads=4, context=64)
    if args.checkpointing:
        model.blocks = Checkpointed(*model.blocks)
    if args.compile:
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=args.scaler, init_scale=256.0)

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(1)
    with rankscope.Monitor(total_steps=args.steps).attach(model, optimizer) as monitor:
        for _ in range(args.steps):
            total = torch.zeros(())
            for _micro in range(args.accumulate):
                inputs, targets = draw_batch(text, 4, 64, generator)
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / args.accumulate
                scaler.scale(loss).backward()
                total += loss.detach()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # does not update if a gradient is not finite: the step is then marked as skipped
            scaler.update()
            optimizer.zero_grad()
            monitor.log(loss=total, tokens=args.accumulate * inputs.numel())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
