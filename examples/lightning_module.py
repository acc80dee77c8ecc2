"""Train a small GPT as a Lightning module: a callback adds the monitor; `self.log` values are stored with their step.

python examples/lightning_module.py 50
python examples/lightning_module.py 50 2        # on two ranks
"""

from __future__ import annotations

import os
import sys

import lightning.pytorch as pl
import torch
from gpt_ddp import GPT, standard_library_text
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from rankscope.integrations.lightning import RankscopeCallback

CONTEXT = 64


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(width=96, layers=2, heads=4, context=CONTEXT)

    def training_step(self, pieces: Tensor, _place: int) -> Tensor:
        loss = functional.cross_entropy(self.gpt(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        self.log("perplexity", loss.exp())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=6e-4)


def main(steps: int, ranks: int) -> None:
    text = standard_library_text(limit=1_000_000).long()
    pieces = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[RankscopeCallback()],
    )
    trainer.fit(Language(), DataLoader(pieces, batch_size=8, shuffle=True))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*(int(argument) for argument in (*sys.argv[1:], "50", "1")[:2]))
