"""Train a small GPT with DeepSpeed ZeRO, which shards optimizer state, gradients and parameters over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py

Each rank measures its own shards; the view `tensor_global` combines them. DeepSpeed compiles an operator at its first
run on a CPU, which takes one or two minutes.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from gpt_ddp import GPT, draw_batch, standard_library_text
from torch.nn import functional

import rankscope

STAGE = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE},
    "zero_allow_untested_optimizer": True,
}


def main(steps: int) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = GPT(width=96, layers=2, heads=4, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with rankscope.Monitor(total_steps=steps).attach(engine) as monitor:
        for _ in range(steps):
            for _ in range(CONFIG["gradient_accumulation_steps"]):
                inputs, targets = draw_batch(text, 8, 64, generator)
                loss = functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
                engine.backward(loss)
                engine.step()  # updates after the last micro-batch
            monitor.log(loss=loss, tokens=2 * inputs.numel())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
