"""Ranks of independent jobs, forked from one process: `python node_ranks.py RUN:RANKS …` prints their process ids."""

import os
import signal
import sys
import time

import torch
from torch import nn

import rankscope

rankscope.Monitor  # noqa: B018 - loads the training side before the fork


def train() -> None:
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    net = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(net.parameters())
    with rankscope.Monitor({"console": False, "statistics": "torch"}).attach(net, optimizer) as monitor:
        while not ended:
            loss = net(torch.ones(2, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
            time.sleep(0.05)


def main() -> None:
    children = []
    for run, _, count in (job.partition(":") for job in sys.argv[1:]):
        for rank in range(int(count)):
            child = os.fork()
            if not child:
                os.environ.update(RANKSCOPE_RUN=run, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count)
                train()
                os._exit(0)
            children.append(child)
            print(child, flush=True)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
