"""Train a small model and log own metrics until the file `stop` exists; the file `late` starts a further metric.

python logging_training.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import rankscope

FOLDER = Path(sys.argv[1])


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"hyperparameters": {"batch_size": 8}, "quantities": ["gradients", "adam_updates"]}
    with rankscope.Monitor(settings).attach(model, optimizer) as monitor:
        step = 0
        while not (FOLDER / "stop").exists():
            step += 1
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values = {"my_metric": 2 * step, "val/accuracy": 1 - 1 / (1 + step), "val/loss": 3 / step}
            late = {"late/bleu": 7.25} if (FOLDER / "late").exists() else {}
            monitor.log(loss=loss, acc={"top1": step, "top5": 10 * step}, **values, **late)
            time.sleep(0.02)


if __name__ == "__main__":
    main()
