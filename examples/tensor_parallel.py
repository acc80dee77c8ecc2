"""Train a small GPT whose feed-forward layers are sharded over the ranks (tensor parallelism).

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py

All ranks have the same data. Sharded tensors are measured in shards, all other tensors on each rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from gpt_ddp import GPT, draw_batch, standard_library_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import rankscope


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = GPT(width=96, layers=2, heads=4, context=64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # The foreach implementation of Adam does not accept plain tensors and DTensors together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, foreach=False)

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(1)
    with rankscope.Monitor(total_steps=steps).attach(model, optimizer) as monitor:
        for _ in range(steps):
            inputs, targets = draw_batch(text, 8, 64, generator)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
