"""A DDP training whose last rank is slow: slow_rank_training.py STEPS INPUT COMPUTE PAUSE. Times are in seconds."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope


class Net(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 + self.seconds)
        y: torch.Tensor = self.layer(x)
        return y


steps = int(sys.argv[1])
dist.init_process_group("gloo")
is_last = dist.get_rank() == dist.get_world_size() - 1
load, compute, pause = (float(text) * is_last for text in sys.argv[2:])
model = DistributedDataParallel(Net(compute))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with rankscope.Monitor({"console": False, "exit_wait_seconds": 60.0}, total_steps=steps).attach(model, optimizer):
    for step in range(steps):
        time.sleep(0.01 + load)
        optimizer.zero_grad()
        model(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(pause if step % 10 == 9 else 0)
dist.destroy_process_group()
