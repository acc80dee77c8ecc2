"""A DDP training with one fault of each kind: RANK=… WORLD_SIZE=2 python troubled_training.py FOLDER.

The ranks start when FOLDER contains the file `go`. Step 20: NaN in a gradient of rank 1. Step 30: gradients on both
ranks are a thousand times too large. Step 32: only rank 1 changes its bias, without the optimizer. Steps 21, 31 and 40
last until FOLDER contains the file `seen-<step>`, because a step is published during the next one. Then it trains
until it is killed.
"""

import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope

NAN_STEP, LARGE_STEP, PARTING_STEP = 20, 30, 32
WAITING_STEPS = (21, 31, 40)
PLANNED_STEPS = 100_000
PAUSE_SECONDS = 0.05

GRADIENTS = ["grad_unreduced", "grad_reduced"]

CONFIG = {
    "console": False,
    "quantities": ["parameters", "gradients", "optimizer_state", "hashes", "activations", "linear"],
    "options": {"hashes": {"every": 1}, "linear": {"every": 1}},
    "rules": [
        {"rule_name": "AnomalyNan"},
        {"rule_name": "AnomalyTurbulence", "args": {"threshold": 10.0, "ops": ["norm"], "kinds": GRADIENTS}},
        {"rule_name": "ParamMovedBetween"},
    ],
    "hardware": {"every_seconds": 0.5},
    "throughput": {"peak_tflops": 1, "flops_per_token": 6 * 16 * 4},
}
"""Return a monitor with the settings that all panels need: hashes, peak FLOP/s of the CPU, FLOPs without tokens."""


def wait_for(sign: Path) -> None:
    while not sign.exists():
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(1, str(Path(__file__).parents[2]))
    from tests.end_to_end.simulated_devices import simulate

    simulate()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(16, 4)
    step = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if (step, rank) == (NAN_STEP, 1):
            return gradient * math.nan
        return gradient * (1000.0 if step == LARGE_STEP else 1.0)

    net.weight.register_hook(spoil)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    monitor = rankscope.Monitor(CONFIG, total_steps=PLANNED_STEPS)
    with monitor.attach(ddp, optimizer):
        wait_for(folder / "go")
        for step in range(1, PLANNED_STEPS + 1):
            loss = ddp(torch.ones(2, 16)).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            if (step, rank) == (PARTING_STEP, 1):
                with torch.no_grad():
                    net.bias[0] += 1e-3
            monitor.log(loss=loss, grad_norm=norm, tokens=32, samples=2, accuracy=0.5)
            time.sleep(PAUSE_SECONDS)
            if step in WAITING_STEPS:
                wait_for(folder / f"seen-{step}")


if __name__ == "__main__":
    main()
