"""Cases for two ranks of a gloo group, with and without the monitor; each returns the results for its test."""

from __future__ import annotations

import sys
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tests.exporter.quantities.collective_runs import Run, collectives, functions, given, left, train
from tests.exporter.quantities.ranks import WORLD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_exporter import Monitor
from rankscope_exporter.quantities.collectives import quantity


def sequences(rank: int) -> Any:
    """Return runs by name, for example with repeated, asynchronous or selected calls."""

    def repeated(step: int) -> None:
        for number in range(3):
            dist.all_reduce(given(rank, number) * step)

    def at_places(_step: int) -> None:
        dist.all_reduce(given(rank))
        here(lambda: dist.all_reduce(given(rank, 1)))
        dist.broadcast(given(rank), 0)

    def asynchronous(_step: int) -> None:
        first, second, third = (given(rank, number) for number in range(3))
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        works.reverse()
        for work in works:
            assert work is not None
            work.wait()
            first.add_(0)
            work.wait()
        forgotten = dist.broadcast(third, 0, async_op=True)
        assert forgotten is not None
        forgotten.get_future().wait()

    def none(_step: int) -> None:
        pass

    def beside(_step: int) -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(given(rank)))
        thread.start()
        thread.join()

    def coalesced(_step: int) -> None:
        with dist._coalescing_manager():
            dist.all_reduce(given(rank))
            dist.all_reduce(given(rank, 1))

    def waited_elsewhere(_step: int) -> None:
        """Wait for the call as if another stream were current, because a CPU has no streams."""
        work = dist.all_reduce(given(rank), async_op=True)
        assert work is not None
        with unittest.mock.patch.object(quantity, "stream_of", return_value=7):
            work.wait()

    def failing(_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call, arguments in (
                (dist.all_reduce, ("no tensor",)),
                (dist.all_reduce, ()),
                (dist.broadcast, (given(0),)),
            ):
                try:
                    call(*arguments)
                except (TypeError, ValueError) as error:
                    errors.append(repr(error))

    errors: list[str] = []
    bare = train(failing), [*errors]
    errors.clear()
    return {
        "repeated": train(repeated, {}, steps=2),
        "most calls": train(repeated, {"most_calls": 2}),
        "every": train(repeated, {"every": 2, "inputs": True}, steps=3),
        "after the update": train(none, {}, after=repeated, steps=2),
        "call sites": train(at_places, {"call_sites": [r"collective_cases\.py\[\d+\] here\b"]}),
        "no such site": train(at_places, {"call_sites": [r"nowhere\.py\[1\]"]}),
        "targets": train(at_places, {"targets": ["broadcast", "all_gathr"]}),
        "asynchronous": train(asynchronous, {}, steps=2),
        "log only": train(at_places, {"log_only": True, "inputs": True}, steps=3),
        "none": train(none, {}),
        "beside": train(beside, {}),
        "another stream": train(waited_elsewhere, {}),
        "coalesced": train(coalesced, {}),
        "failing": train(failing, {}),
        "errors": (bare[1], errors),
    }


def here(call: Callable[[], Any]) -> int:
    """Make the call in this function, and return the number of the line above."""
    call()
    return sys._getframe().f_lineno - 1


def training(_rank: int) -> Any:
    """Return the parameters of a training with its own gradient reduction, without and with the monitor."""

    def once(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank())
        net = nn.Linear(5, 3)
        for parameter in net.parameters():
            dist.broadcast(parameter.detach(), 0)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        monitor = Monitor(collectives(options, "gradients")).attach(net, optimizer)
        for _ in range(4):
            net(torch.randn(6, 5)).square().mean().backward()
            works = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
            for work in works:
                work.wait()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad /= WORLD
            optimizer.step()
            optimizer.zero_grad()
        monitor.detach()
        assert monitor.faults == 0
        return [parameter.detach().clone() for parameter in net.parameters()]

    return once(None), once({"inputs": True})


def cause(rank: int) -> Any:
    """Return the anomalies, in order, when a gradient is spoiled on rank 0 before it is reduced."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = collectives({"inputs": True}, "parameters", "gradients", rules=(AnomalyNan(),))
    monitor = Monitor(config).attach(net, optimizer)
    net(torch.ones(4, 3)).square().mean().backward()
    gradient = net.weight.grad
    assert gradient is not None
    if rank == 0:
        gradient[0, 0] = torch.nan
    dist.all_reduce(gradient)
    optimizer.step()
    return left(monitor, net).events


def wrapped(rank: int) -> Any:
    """Return runs of frameworks with their own communication, each with its parameters without the monitor."""
    mesh = init_device_mesh("cpu", (WORLD,))

    def train_wrapped(make: Callable[[], nn.Module], *, on: bool) -> Run:
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        monitor = Monitor(collectives({} if on else None)).attach(net, optimizer)
        for step in (1, 2):
            net(torch.full((2, 4), float(rank + step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run = left(monitor, net)
        run.parameters = [getattr(one, "_local_tensor", one) for one in run.parameters]
        return run

    makers = {
        "DDP": lambda: DistributedDataParallel(nn.Linear(4, 2)),
        "FSDP1": lambda: FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=True),
        "FSDP2": lambda: fully_shard(nn.Linear(4, 2), mesh=mesh),
    }
    return {name: (train_wrapped(make, on=True), train_wrapped(make, on=False)) for name, make in makers.items()}


def logged(rank: int) -> Any:
    """Return the notices and faults of a DDP training that logs all calls of the first step."""
    train(lambda _step: None, {})  # this monitor also reads earlier calls
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(collectives({"log_only": True})).attach(net, optimizer)
    for step in (1, 2, 3):
        net(torch.ones(2, 4)).square().mean().backward()
        for number in range(3):
            dist.all_reduce(given(rank, number))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            dist.broadcast(given(rank), 0)
        else:
            dist.barrier()
    return left(monitor, net)


def compiled(rank: int) -> Any:
    """Return the result of a compiled function with a reduction, without and with the monitor, and the rows."""

    @torch.compile(backend="eager", fullgraph=True)
    def reduced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    bare = reduced(given(rank))
    torch.compiler.reset()
    seen = []
    run = train(lambda step: seen.append(reduced(given(rank)).sum().item()), {"every": 2}, steps=3)
    return bare.sum().item(), seen, run


CASES: tuple[Callable[[int], Any], ...] = (functions, sequences, training, cause, wrapped, logged, compiled)


def cases(rank: int) -> Iterator[tuple[str, Any]]:
    for case in CASES:
        yield case.__name__, case(rank)
