"""A training of one rank. Its wall clock is set by JUMP seconds before the step 20: set_clock_training.py JUMP."""

from __future__ import annotations

import sys
import time

import torch

import rankscope

STEPS, JUMPS_AT, PAUSE_SECONDS = 60, 20, 0.05


def set_clock(seconds: int) -> None:
    """Set the clock of this process forward by `seconds`."""
    nanoseconds, now = time.time_ns, time.time
    time.time_ns = lambda: nanoseconds() + seconds * 10**9
    time.time = lambda: now() + seconds


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with rankscope.Monitor(total_steps=STEPS).attach(model, optimizer) as monitor:
        for step in range(STEPS):
            if step == JUMPS_AT:
                set_clock(int(sys.argv[1]))
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, tokens=32)
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
