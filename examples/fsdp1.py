"""Train a small GPT wrapped in FullyShardedDataParallel (FSDP1), with two micro-batches per step.

    torchrun --standalone --nproc-per-node 2 examples/fsdp1.py

`use_orig_params=True` keeps the names of the parameters. Without it, only flat parameters have names.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from gpt_ddp import GPT, Block, draw_batch, standard_library_text
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

import rankscope

MICRO_BATCHES = 2


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = FullyShardedDataParallel(
        GPT(width=96, layers=2, heads=4, context=64),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(dist.get_rank())
    config = rankscope.MonitorConfig(quantities=("gradients", "micro_gradients", "parameters", "optimizer_state"))
    with rankscope.Monitor(config, total_steps=steps).attach(model, optimizer) as monitor:
        for _ in range(steps):
            for micro in range(MICRO_BATCHES):
                inputs, targets = draw_batch(text, 4, 64, generator)
                with contextlib.nullcontext() if micro == MICRO_BATCHES - 1 else model.no_sync():
                    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / MICRO_BATCHES
                    loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss * MICRO_BATCHES, tokens=MICRO_BATCHES * inputs.numel())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
