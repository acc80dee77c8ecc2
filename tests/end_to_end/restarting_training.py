"""A training that resumes from its checkpoint. Arguments set how and when it ends. For tests of the life cycle of runs.

    [torchrun …] restarting_training.py FOLDER STEPS SECONDS_PER_STEP [ENDING:STEP …] [--on-sigterm] [--hold]
The last rank ends by the first ENDING in the first launch, by the second one after torchrun's first restart, and so on:
exception, kill, exit-3, exit-0, break, or silent (the process ends without leaving the context of the monitor). Each
fifth step is checkpointed. With `--on-sigterm` it exits with code 143 on SIGTERM. With `--hold` it makes its last step
only when the file FOLDER/finish exists, and ends by an ENDING only when FOLDER/end-LAUNCH exists: the agent of torchrun
ends the other ranks immediately, and with them records that were not polled.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

import rankscope


def end(how: str) -> bool:
    """End as requested; return whether the loop must stop."""
    if how == "exception":
        raise ValueError("planted")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how.startswith("exit-"):
        sys.exit(int(how.removeprefix("exit-")))
    return how == "break"


def leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def hold(until: Path) -> None:
    while "--hold" in sys.argv and not until.exists():
        time.sleep(0.02)


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    folder, steps, pause = Path(arguments[0]), int(arguments[1]), float(arguments[2])
    launch, world_size = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    how, _, at = arguments[3 + launch].partition(":") if len(arguments) > 3 + launch else ("", "", "0")
    if "--on-sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, leave)
    if world_size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world_size > 1 else 0
    checkpoint = folder / "checkpoint"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = rankscope.MonitorConfig(console=False, statistics="torch")  # no kernel to compile in short processes
    monitor = rankscope.Monitor(config, total_steps=steps, first_step=done + 1)
    monitor.attach(net, optimizer)
    last = int(at) if rank == world_size - 1 else 0
    if how == "silent":
        train(monitor, net, optimizer, range(done + 1, last + 1), pause, checkpoint)
        return
    with monitor:
        train(monitor, net, optimizer, range(done + 1, steps + 1), pause, checkpoint, how, last)
    if world_size > 1:
        dist.destroy_process_group()


def train(monitor, net, optimizer, steps, pause, checkpoint, how="", at=0):
    for step in steps:
        loss = net(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=float(step))
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        time.sleep(pause)
        if step == at:
            hold(checkpoint.with_name(f"end-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"))
            if end(how):
                return
        if step + 1 == steps.stop - 1:
            hold(checkpoint.with_name("finish"))
        if step % 5 == 0 and int(os.environ.get("RANK", "0")) == 0:
            checkpoint.with_suffix(".new").write_text(str(step))
            checkpoint.with_suffix(".new").replace(checkpoint)


if __name__ == "__main__":
    main()
