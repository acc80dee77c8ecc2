"""Ranks on Gloo. At step 6, before a collective, rank 1 sleeps until FOLDER (the argument) has the file `go-on`."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankscope

BLAMED_RANK, BLAMED_STEP, LAST_STEP = 1, 6, 9


def fall_behind(until: Path) -> None:
    while not until.exists():
        time.sleep(0.5)  # rank 1 hangs here


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rankscope.Monitor(total_steps=LAST_STEP).attach(net, optimizer):
        for step in range(1, LAST_STEP + 1):
            loss = net(torch.ones(3, 4)).square().mean()
            loss.backward()
            if (step, dist.get_rank()) == (BLAMED_STEP, BLAMED_RANK):
                fall_behind(folder / "go-on")
            dist.all_reduce(loss.detach())  # the others wait here
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
