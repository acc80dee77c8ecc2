"""Ranks that execute commands from standard input: `python faulty_rank.py RUN…`, then lines `RUN COMMAND`.

Commands: `nan` sets one gradient to NaN; `nan-raise` also raises an exception after the step; `nan-die` kills the rank
with SIGKILL a few steps later. `nan-steps` sets the gradients to NaN until the next command, `large` multiplies one
gradient by 100, and `pause` makes no step until the next command. Output: `bad RUN STEP SECONDS`, and `exit RUN CODE`.
"""

import os
import signal
import sys
import threading
import time
import traceback
from typing import TextIO

import torch
from torch import nn

import rankscope

rankscope.Monitor  # noqa: B018 - loads the training side before the fork
PAUSE_SECONDS = 0.05
FAREWELL_STEPS = 6  # after these steps a killed rank has published the fault, possibly without a scrape in between


def train(run: str, commands: TextIO) -> None:
    torch.manual_seed(0)
    net = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-5)  # the gradients remain large
    factor = 1.0
    net.weight.register_hook(lambda gradient: gradient * factor)
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(line.strip() for line in commands), daemon=True).start()
    with rankscope.Monitor({"console": False, "statistics": "torch"}).attach(net, optimizer) as monitor:
        step, left, command = 0, -1, ""
        while left != 0:
            step, left = step + 1, left - 1
            command = lines.pop(0) if lines else "nan-steps" if command == "nan-steps" else ""
            factor = float("nan") if command.startswith("nan") else 100.0 if command == "large" else 1.0
            if command:
                print("bad", run, step, time.time(), flush=True)
            while command == "pause" and not lines:
                time.sleep(PAUSE_SECONDS)
            loss = net(torch.ones(2, 16)).square().mean()
            loss.backward()
            if factor == 1.0:  # like a gradient scaler
                optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
            if command == "nan-raise":
                raise RuntimeError("the last step was bad")
            if command == "nan-die":
                left = FAREWELL_STEPS
            time.sleep(PAUSE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def start(run: str) -> tuple[int, TextIO]:
    """Fork a rank; return its process id and the pipe for its commands."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(reading)
        return child, os.fdopen(writing, "w", buffering=1)
    os.environ["RANKSCOPE_RUN"] = run
    code = 0
    try:
        train(run, os.fdopen(reading))
    except RuntimeError:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Start the ranks, forward commands, and print the exit code of each rank."""
    ranks = {run: start(run) for run in sys.argv[1:]}
    runs = {child: run for run, (child, _) in ranks.items()}

    def report() -> None:
        while True:
            child, status = os.wait()
            print("exit", runs[child], os.waitstatus_to_exitcode(status), flush=True)

    threading.Thread(target=report, daemon=True).start()
    for line in sys.stdin:
        run, command = line.split()
        ranks[run][1].write(command + "\n")
    for child in runs:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
