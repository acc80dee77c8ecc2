"""Train a small GPT whose parameters, gradients and optimizer state are sharded over the ranks (FSDP2).

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

Each rank measures its own shards; the view `tensor_global` combines them.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from gpt_ddp import GPT, draw_batch, standard_library_text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import rankscope


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = GPT(width=96, layers=2, heads=4, context=64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with rankscope.Monitor(total_steps=steps).attach(model, optimizer) as monitor:
        for _ in range(steps):
            inputs, targets = draw_batch(text, 8, 64, generator)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, tokens=inputs.numel())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
