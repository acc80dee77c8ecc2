"""A small DDP training with faults: torchrun --nproc-per-node 2 tiny_training.py FOLDER STEPS SECONDS_PER_STEP.

With STEPS = 0 it trains until the file `FOLDER/stop` exists. Each rank writes `FOLDER/reference-<rank>.jsonl` with the
expected values of all stored rows, computed without Rankscope.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope

NAN_STEP, NAN_RANK = 5, 1
NAN_TENSOR = "first.weight"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 48)
        self.last = nn.Linear(48, 5)
        self.rarely = nn.Parameter(torch.zeros(7))  # used in even steps only

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y = self.last(torch.relu(self.first(x)))
        return y + self.rarely.sum() if step % 2 == 0 else y


def statistics(tensor: torch.Tensor) -> dict[str, Any]:
    exact = tensor.detach().double().flatten()
    finite = exact[torch.isfinite(exact)]
    return {
        "norm": math.sqrt(math.fsum(value * value for value in finite.tolist())),
        "min": min(finite.tolist()),
        "max": max(finite.tolist()),
        "mean": math.fsum(finite.tolist()) / len(finite),
        "scale": math.fsum(abs(value) for value in finite.tolist()) / len(finite),
        "nans": sum(math.isnan(value) for value in exact.tolist()),
        "infs": sum(math.isinf(value) for value in exact.tolist()),
        "zeros": sum(value == 0 for value in exact.tolist()),
        "numel": len(exact),
    }


def until_stopped(stop: Path) -> Iterator[int]:
    """Count the steps; all ranks end at the same one."""
    for step in itertools.count(1):
        is_stopped = torch.tensor(stop.exists())
        dist.broadcast(is_stopped, 0)
        if is_stopped:
            return
        yield step


def main() -> None:
    folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    local: dict[str, torch.Tensor] = {}
    step = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if (step, rank) != (NAN_STEP, NAN_RANK):
            return gradient
        gradient = gradient.clone()
        gradient[0, 0], gradient[0, 1], gradient[0, 2] = math.nan, -math.inf, 0.0
        return gradient

    dict(net.named_parameters())[NAN_TENSOR].register_hook(spoil)
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda gradient, name=name: local.__setitem__(name, gradient.clone()))
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    config = rankscope.MonitorConfig(console=False, exit_wait_seconds=60.0)  # the service may be starting at that time
    monitor = rankscope.Monitor(config, total_steps=steps or None)
    with (folder / f"reference-{rank}.jsonl").open("w") as reference, monitor.attach(ddp, optimizer):

        def note(kind: str, tensors: dict[str, torch.Tensor | None]) -> None:
            for name, tensor in tensors.items():
                if tensor is not None:
                    row = {"step": step, "kind": kind, "tensor": name, **statistics(tensor)}
                    reference.write(json.dumps(row) + "\n")

        for step in range(1, steps + 1) if steps else until_stopped(folder / "stop"):
            local.clear()
            loss = ddp(torch.randn(16, 24, generator=generator), step).square().mean()
            loss.backward()
            note("grad_unreduced", dict(local))
            note("grad_reduced", {name: parameter.grad for name, parameter in net.named_parameters()})
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if torch.isfinite(norm):
                note("param_before", dict(net.named_parameters()))
                optimizer.step()
                note("param_after", dict(net.named_parameters()))
                for key in ("exp_avg", "exp_avg_sq"):
                    note(key, {n: optimizer.state.get(p, {}).get(key) for n, p in net.named_parameters()})
            optimizer.zero_grad()
            monitor.log(loss=loss, grad_norm=norm, tokens=16, absent=None, zero=0.0)
            time.sleep(pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
