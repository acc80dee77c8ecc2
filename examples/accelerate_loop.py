"""Train a small GPT in a custom loop with Accelerate. The monitor receives the objects that `prepare` returns.

python examples/accelerate_loop.py 50
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py 50
"""

from __future__ import annotations

import os
import sys
from itertools import islice

import torch
from accelerate import Accelerator
from gpt_ddp import GPT, standard_library_text
from torch.nn import functional
from torch.utils.data import DataLoader

import rankscope

CONTEXT, MICRO_BATCHES = 64, 2


def main(steps: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(1)
    model = GPT(width=96, layers=2, heads=4, context=CONTEXT)
    text = standard_library_text(limit=1_000_000).long()
    pieces = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=6e-4), DataLoader(pieces, batch_size=8, shuffle=True)
    )
    with rankscope.Monitor(total_steps=steps).attach(model, optimizer) as monitor:
        for batch in islice(loader, steps * MICRO_BATCHES):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                monitor.log(loss=loss, tokens=MICRO_BATCHES * batch[:, 1:].numel())
    accelerator.end_training()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
