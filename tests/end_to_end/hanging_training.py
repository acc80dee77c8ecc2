"""Two ranks on Gloo. Rank 1 waits for a file before a collective in which rank 0 waits.

hanging_training.py FOLDER, for each rank with its environment
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankscope

HANG_STEP, LAST_STEP = 6, 9


def stand_still(until: Path) -> None:
    while not until.exists():
        time.sleep(0.5)  # rank 1 hangs here


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rankscope.Monitor(total_steps=LAST_STEP).attach(net, optimizer):
        for step in range(1, LAST_STEP + 1):
            loss = net(torch.ones(3, 4)).square().mean()
            loss.backward()
            if (step, rank) == (HANG_STEP, 1):
                stand_still(folder / "go-on")
            dist.all_reduce(loss.detach())  # rank 0 waits here
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
