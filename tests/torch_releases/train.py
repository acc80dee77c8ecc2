"""Train with and without a monitor, and write the values that the store must have, computed by formulas.

Runs with any release of torch and the rank's part of Rankscope: `python train.py FOLDER`. Four trainings: the
three lines of the README on one rank, the same in a child that is forked from this training, DDP on two ranks, and
FSDP2 on two if torch can run it without a device. The last two have two micro-batches in each step. Exits with 1 if the
monitor changes a bit or has a fault.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
STEPS = 12
"""The compiled kernel measures from step 10 on."""
FORK_AT = 5
ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-3}
RELEASE = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
HAS_FSDP2 = RELEASE >= (2, 7)
"""Earlier releases of torch run FSDP2 on a device only."""

Tensors = dict[str, torch.Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))


def readme(micros: int) -> list[bytes]:
    """Train as the README shows, and return the bits of the parameters."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    watch = bool(os.environ.get("RANKSCOPE_RUN"))
    if watch:
        import rankscope  # 1

        monitor = rankscope.Monitor(total_steps=STEPS).attach(model, optimizer)  # 2
    with monitor if watch else contextlib.nullcontext():
        for step in range(1, STEPS + 1):
            inputs = batch(0, step, 0)
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch:
                monitor.log(loss=loss, tokens=inputs.numel())  # 3
            if step == FORK_AT and os.environ["RANKSCOPE_RUN"] == "readme":
                fork(micros)
    assert 1 == micros
    assert not watch or monitor.faults == 0, f"{monitor.faults} faults"
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def fork(micros: int) -> None:
    """Train with a monitor in a forked child."""
    child = os.fork()
    if child == 0:
        os.environ["RANKSCOPE_RUN"] = "forked"
        try:
            readme(micros)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert 0 == os.waitpid(child, 0)[1], "the training in the forked child failed"


def distributed(wrap: str, micros: int) -> list[bytes]:
    """Train a wrapped model, and return the bits of this rank's part of the parameters."""
    rank = dist.get_rank()
    model: Any = net()
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    watch = bool(os.environ.get("RANKSCOPE_RUN"))
    if watch:
        import rankscope

        monitor = rankscope.Monitor(total_steps=STEPS).attach(model, optimizer)
    with monitor if watch else contextlib.nullcontext():
        for step in range(1, STEPS + 1):
            for micro in range(micros):
                is_last = micro == micros - 1
                if wrap == "fsdp2":
                    model.set_requires_gradient_sync(is_last)
                with model.no_sync() if wrap == "ddp" and not is_last else contextlib.nullcontext():
                    loss = model(batch(rank, step, micro)).square().mean()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch:
                monitor.log(loss=loss)
    assert not watch or monitor.faults == 0, f"{monitor.faults} faults"
    local = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
    return [tensor.detach().numpy().tobytes() for tensor in local]


def expected(world: int, micros: int, *, is_sharded: bool) -> list[dict[str, Any]]:
    """Return the norms that the store must have, by a training in float64 with the formulas of Adam.

    A gradient of a rank is the sum over its micro-batches. The reduced gradient is the mean over the ranks.
    """
    model = net().double()
    parameters = dict(model.named_parameters())
    first = {name: torch.zeros_like(value) for name, value in parameters.items()}
    second = {name: torch.zeros_like(value) for name, value in parameters.items()}
    rows: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        own = [gradients(model, rank, step, micros) for rank in range(world)]
        reduced = {name: sum(one[name] for one, _ in own) / world for name in parameters}
        for name, value in parameters.items():
            first[name].mul_(ADAM["betas"][0]).add_((1 - ADAM["betas"][0]) * reduced[name])
            second[name].mul_(ADAM["betas"][1]).add_((1 - ADAM["betas"][1]) * reduced[name] ** 2)
            corrected = first[name] / (1 - ADAM["betas"][0] ** step)
            scale = (second[name] / (1 - ADAM["betas"][1] ** step)).sqrt() + ADAM["eps"]
            value.data.sub_(ADAM["lr"] * corrected / scale)
        for rank in range(world):
            whole = {"grad_reduced": reduced, "param_after": parameters, "exp_avg": first, "exp_avg_sq": second}
            for kind, tensors in whole.items():
                for name, tensor in tensors.items():
                    part = tensor.chunk(world)[rank] if is_sharded else tensor
                    rows.append(row(step, rank, kind, name, float(part.detach().norm())))
            if world > 1:
                gradient, _ = own[rank]
                rows += [row(step, rank, "grad_unreduced", name, float(one.norm())) for name, one in gradient.items()]
            rows.append(row(step, rank, "scalar", "loss", own[rank][1]))
    return rows


def row(step: int, rank: int, kind: str, tensor: str, value: float) -> dict[str, Any]:
    return {"step": step, "rank": rank, "kind": kind, "tensor": tensor, "value": value}


def gradients(model: nn.Module, rank: int, step: int, micros: int) -> tuple[Tensors, float]:
    """Return the sum of the gradients of a rank over its micro-batches, and its last loss."""
    model.zero_grad()
    for micro in range(micros):
        loss = model(batch(rank, step, micro).double()).square().mean()
        loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}, float(loss.detach())


def train(rank: int, world: int, name: str, micros: int, folder: str) -> None:
    """Train without and with a monitor, and compare the bits."""
    torch.set_num_threads(1)
    os.chdir(folder)
    if world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.rendezvous", rank=rank, world_size=world)
    bits = []
    for run in ("", name):
        os.environ["RANKSCOPE_RUN"] = run
        bits.append(distributed(name, micros) if world > 1 else readme(micros))
    assert bits[0] == bits[1], f"{name}: the monitor changed the training"
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    cases = [("readme", 1, 1), ("ddp", WORLD, 2), *([("fsdp2", WORLD, 2)] if HAS_FSDP2 else [])]
    for name, world, micros in cases:
        torch.multiprocessing.spawn(train, (world, name, micros, str(folder)), nprocs=world)
        rows = expected(world, micros, is_sharded=name == "fsdp2")
        for run in (name, "forked") if name == "readme" else (name,):
            (folder / f"{run}.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
