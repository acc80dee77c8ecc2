"""A training of one rank: small_training.py FOLDER STEPS PAUSE [JUMP]. With 0 STEPS it ends when FOLDER/stop exists."""

import itertools
import sys
import time
from pathlib import Path

import torch

import rankscope

JUMPS_AT = 20


def set_clock(seconds: int) -> None:
    nanoseconds, now = time.time_ns, time.time
    time.time_ns = lambda: nanoseconds() + seconds * 10**9
    time.time = lambda: now() + seconds


def main() -> None:
    folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"hyperparameters": {"batch_size": 8}, "quantities": ["gradients", "adam_updates"]}
    with rankscope.Monitor(settings, total_steps=steps or None).attach(model, optimizer) as monitor:
        for step in itertools.count(1):
            if step > steps > 0 or (folder / "stop").exists():
                break
            if step == JUMPS_AT and len(sys.argv) > 4:
                set_clock(int(sys.argv[4]))
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values = {"my_metric": 2 * step, "val/accuracy": 1 - 1 / (1 + step), "val/loss": 3 / step, "tokens": 32}
            late = {"late/bleu": 7.25} if (folder / "late").exists() else {}
            monitor.log(loss=loss, acc={"top1": step, "top5": 10 * step}, **values, **late)
            print(step, flush=True)
            time.sleep(pause)


if __name__ == "__main__":
    main()
