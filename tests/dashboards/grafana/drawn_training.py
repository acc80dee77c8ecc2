"""A training on one rank: drawn_training.py STEPS CHECKPOINT NAN. The loss is NaN from the step NAN on."""

import math
import sys
import time

import torch
from torch import nn

import rankscope

PAUSE_SECONDS = 0.1
steps, checkpoint, nan = map(int, sys.argv[1:])
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
with rankscope.Monitor({"console": False, "statistics": "torch"}).attach(net, optimizer) as monitor:
    for step in range(steps):
        loss = net(torch.ones(3, 4)).square().mean() * (math.nan if step >= nan else 1.0)
        loss.backward()
        if step < nan:
            optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        if step == checkpoint:
            with monitor.phase("checkpoint"):
                time.sleep(PAUSE_SECONDS)
        time.sleep(PAUSE_SECONDS)
