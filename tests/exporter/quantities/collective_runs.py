"""Trainings with collectives under the monitor, and one call of every function with its expected tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.exporter.quantities.ranks import WORLD
from tests.exporter.runs import Published, config_of, ended
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import Monitor, MonitorConfig

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
    """Train a layer, without a monitor if `options` is None.

    `script` runs between the backward pass and the update, and `after` runs after the update.
    """
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
        operations = [
            dist.P2POp(dist.isend, uneven[0], 1 - rank),
            dist.P2POp(dist.irecv, buffer(3), 1 - rank),
            dist.P2POp(dist.isend, uneven[1], 1 - rank),
            dist.P2POp(dist.irecv, buffer(5), 1 - rank),
        ]
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
"""Functions with a list of tensors as input or output, whose tensors have an index."""


def functions(rank: int) -> Any:
    """Return the rows of every function, and the expected rows."""
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
