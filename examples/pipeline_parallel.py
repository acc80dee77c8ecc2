"""Train a small GPT in two stages, one on each rank, with four micro-batches per step (1F1B).

    torchrun --standalone --nproc-per-node 2 examples/pipeline_parallel.py

The monitor receives the stage, which shows when the gradients of all micro-batches are summed and scaled.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from gpt_ddp import GPT, draw_batch, standard_library_text
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import rankscope

STAGES = 2


class First(GPT):
    """The embeddings and the first block."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.blocks = self.blocks[:1]
        self.norm, self.head = nn.Identity(), nn.Identity()


class Last(GPT):
    """The other blocks and the head, with the same names as in the complete model."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.tokens = self.positions = None
        self.blocks = nn.Sequential(OrderedDict({"1": self.blocks[1]}))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = (First if rank == 0 else Last)(width=96, layers=2, heads=4, context=64)
    stage = PipelineStage(model, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(
        1
    )  # equal data on both ranks: the first stage uses the inputs, the last one the targets
    with rankscope.Monitor(total_steps=steps).attach(stage, optimizer) as monitor:
        for _ in range(steps):
            inputs, targets = draw_batch(text, 8, 64, generator)
            if rank == 0:
                schedule.step(inputs)
            else:
                losses: list[Tensor] = []
                schedule.step(target=targets, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            if rank == STAGES - 1:
                monitor.log(loss=torch.stack(losses).mean(), tokens=inputs.numel())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
