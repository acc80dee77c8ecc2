"""Cases for two ranks of a gloo group, with and without the monitor; each returns the results of trainings or calls."""

import sys
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.exporter.parts import Published, config_of, ended
from tests.exporter.ranks import WORLD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules.anomaly import AnomalyNan
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.measure.quantities.collectives import quantity

Script = Callable[[int], None]


@dataclass
class Run:
    """The results of one rank. `rows` has, by step, the numbers of each (kind, function, index, call_seq)."""

    rows: dict[int, dict[tuple[Any, ...], Mapping[str, Any]]]
    entries: list[PlanEntry]
    notices: list[str]
    events: list[tuple[str | None, str | None, int | None]]
    faults: int
    parameters: list[torch.Tensor]

    def of(self, kind: str, step: int = 1) -> dict[tuple[Any, ...], Mapping[str, Any]]:
        return {key[1:]: numbers for key, numbers in self.rows.get(step, {}).items() if key[0] == kind}


def collectives(options: Mapping[str, Any] | None = None, *quantities: str, **more: Any) -> MonitorConfig:
    """Return a configuration with the quantity `collectives`, which is disabled if `options` is None."""
    own, enabled = {"collectives": dict(options or {})}, options is not None
    return config_of("collectives", *quantities, options=own, enabled=enabled, statistics="torch", **more)


def train(
    script: Script, options: Mapping[str, Any] | None = None, *, steps: int = 1, after: Script | None = None
) -> Run:
    """Train without a monitor if `options` is None. `script` runs before the update, and `after` runs after it."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(collectives(options)).attach(net, optimizer)
    for step in range(1, steps + 1):
        net(torch.ones(4, 3) * step).square().mean().backward()
        script(step)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)
    return left(monitor, net)


def left(monitor: Monitor, net: nn.Module) -> Run:
    found = Published(()) if monitor.address is None else ended(monitor)
    rows: dict[int, dict[tuple[Any, ...], Mapping[str, Any]]] = {}
    for row in found.rows:
        key = (row.entry.kind, row.entry.tensor.partition("@")[0], row.entry.index, row.entry.call_seq)
        rows.setdefault(row.step, {})[key] = row.numbers
    events = [(event.rule, event.kind, event.call_id) for event in found.events if event.type == "anomaly"]
    parameters = [parameter.detach().clone() for parameter in net.parameters()]
    return Run(rows, [row.entry for row in found.rows], found.notices, events, monitor.faults, parameters)


def given(rank: int, number: int = 0, size: int = 4) -> torch.Tensor:
    """Return what `rank` sends: different for each rank, number and element."""
    return torch.arange(size, dtype=torch.float32) + 10 * (rank + 1) + 100 * number


# One call of every function, and the tensors that each rank sends and receives.


def every_function(rank: int) -> dict[str, tuple[Any, list[Any], list[Any]]]:
    """Return, for each function, a call, and the tensors that this rank sends and receives, by index."""
    mine, other = given(rank), given(1 - rank)
    both = [given(0), given(1)]
    total, joined = both[0] + both[1], torch.cat(both)
    halves = list(mine.chunk(WORLD))
    sums = list(total.chunk(WORLD))
    swapped = [one.chunk(WORLD)[rank] for one in both]
    uneven = [given(rank, 1, 3), given(rank, 2, 5)]

    def buffer(size: int = 4) -> torch.Tensor:
        return torch.zeros(size)

    def only(on: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors if rank == on else []

    def pair(send: Callable[[], Any], receive: Callable[[], Any]) -> None:
        for call in (send, receive) if rank == 0 else (receive, send):
            work = call()
            if isinstance(work, dist.Work):
                work.wait()

    def batch() -> None:
        pairs = [(tensor, buffer(tensor.numel())) for tensor in uneven]
        calls = [call for sent, received in pairs for call in ((dist.isend, sent), (dist.irecv, received))]
        operations = [dist.P2POp(function, tensor, 1 - rank) for function, tensor in calls]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    theirs = [given(1 - rank, 1, 3), given(1 - rank, 2, 5)]
    return {
        "all_reduce": (lambda: dist.all_reduce(mine.clone()), [mine], [total]),
        "broadcast": (lambda: dist.broadcast(mine.clone(), src=1), only(1, [mine]), [both[1]]),
        "reduce": (lambda: dist.reduce(mine.clone(), dst=1), [mine], only(1, [total])),
        "scatter": (
            lambda: dist.scatter(buffer(2), halves if rank == 0 else None, src=0),
            only(0, halves),
            [both[0].chunk(WORLD)[rank]],
        ),
        "gather": (
            lambda: dist.gather(mine, [buffer(), buffer()] if rank == 0 else None, dst=0), [mine], only(0, both)
        ),
        "all_gather": (lambda: dist.all_gather([buffer(), buffer()], mine), [mine], both),
        "reduce_scatter": (lambda: dist.reduce_scatter(buffer(2), halves), halves, [sums[rank]]),
        "_reduce_scatter_base": (lambda: dist._reduce_scatter_base(buffer(2), mine), [mine], [sums[rank]]),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(buffer(2), mine), [mine], [sums[rank]]),
        "_all_gather_base": (lambda: dist._all_gather_base(buffer(8), mine), [mine], [joined]),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(buffer(8), mine), [mine], [joined]),
        "all_gather_single": (lambda: dist.all_gather_single(buffer(8), mine), [mine], [joined]),
        "reduce_scatter_single": (lambda: dist.reduce_scatter_single(buffer(2), mine), [mine], [sums[rank]]),
        "all_to_all": (lambda: dist.all_to_all([buffer(2), buffer(2)], halves), halves, swapped),
        "all_to_all_single": (lambda: dist.all_to_all_single(buffer(4), mine), [mine], [torch.cat(swapped)]),
        "send": (lambda: pair(lambda: dist.send(mine, 1 - rank), lambda: dist.recv(buffer(), 1 - rank)), [mine], []),
        "recv": (None, [], [other]),
        "isend": (lambda: pair(lambda: dist.isend(mine, 1 - rank), lambda: dist.irecv(buffer(), 1 - rank)), [mine], []),
        "irecv": (None, [], [other]),
        "batch_isend_irecv": (batch, {0: uneven[0], 2: uneven[1]}, {1: theirs[0], 3: theirs[1]}),
    }  # fmt: skip


LISTS = {
    *((name, kind) for name in ("all_to_all", "batch_isend_irecv") for kind in ("comm_in", "comm_out")),
    *((name, "comm_in") for name in ("scatter", "reduce_scatter")),
    *((name, "comm_out") for name in ("gather", "all_gather")),
}
"""Functions with a list of tensors as input or output. These tensors have an index."""


def functions(rank: int) -> Any:
    table = every_function(rank)
    refused: dict[str, str] = {}

    def script(_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of functions that torch has deprecated
            for name, (call, _, _) in table.items():
                try:
                    if call is not None:
                        call()
                except (RuntimeError, NotImplementedError) as error:  # that gloo does not have
                    refused[name] = str(error)

    run = train(script, {"inputs": True})
    expected: dict[str, dict[tuple[Any, ...], torch.Tensor]] = {"comm_in": {}, "comm_out": {}}
    for name, (_, gives, gets) in table.items():
        for kind, tensors in (("comm_in", gives), ("comm_out", gets)):
            if name in refused and kind == "comm_out":
                continue
            lists = (name, kind) in LISTS
            items = tensors.items() if isinstance(tensors, dict) else enumerate(tensors)
            for index, tensor in items:
                expected[kind][name, index if lists else None, None] = tensor
    return run, expected, refused


def sequences(rank: int) -> Any:
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
                *((dist.all_reduce, ("no tensor",)), (dist.all_reduce, ()), (dist.broadcast, (given(0),))),
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
