"""A training has the same bits with and without a monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.device import CONFIGURATIONS, Device, configured
from tests.gpu.trainings import (
    CASES,
    STEPS,
    Block,
    Case,
    Small,
    adamw,
    attached,
    deterministic,
    differences,
    ids,
    state_of,
    vectors,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import MonitorConfig


def trained(device: Device, case: Case, config: MonitorConfig | None, *, compiles: bool = False) -> dict[str, bytes]:
    with deterministic():
        model, optimizer = case.build(device.name)
        runs = torch.compile(model) if compiles else model
        monitor = attached(config, model, optimizer)
        losses = case.run(device, monitor, runs, optimizer, STEPS)
        device.synchronize()
        monitor.detach()

        assert 0 == monitor.faults
        return state_of(device, model, optimizer, losses)


_plain: dict[str, dict[str, bytes]] = {}


def plain(device: Device, name: str, case: Case, **how: Any) -> dict[str, bytes]:
    """Return the state after a training without a monitor, which must be reproducible to be compared."""
    if name not in _plain:
        first, second = trained(device, case, None, **how), trained(device, case, None, **how)
        assert [] == differences(first, second), "the training itself is not deterministic"
        _plain[name] = first
    return _plain[name]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", CASES)
def test_training_ends_with_equal_bits(name, configuration, device):
    expected = plain(device, name, CASES[name])

    assert [] == differences(expected, trained(device, CASES[name], configured(configuration)))


def sharded(model: nn.Module) -> nn.Module:
    if isinstance(model, Block):
        fully_shard(model.block)
    fully_shard(model)
    return model


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("wrap", [in_ddp, sharded])
def test_distributed_training_ends_with_equal_bits(wrap, configuration, group, device):
    case = Case(wrap=wrap, micro_batches=2, clips=True)
    expected = plain(device, wrap.__name__, case)

    assert [] == differences(expected, trained(device, case, configured(configuration)))


# CUDA graphs.


def captured_step(device: Device, config: MonitorConfig | None) -> dict[str, bytes]:
    """Train as torch's manual describes: warm-up on a side stream, capture of a whole step, replays."""
    torch.manual_seed(0)
    model = Block().to(device.name)
    optimizer = adamw(model.parameters(), capturable=True)
    monitor = attached(config, model, optimizer)
    batch = ids(device.name)

    def step() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(STEPS):
        batch.copy_(ids(device.name))
        graph.replay()
        losses.append(loss.detach().clone())
        monitor.log(loss=losses[-1])
    device.synchronize()
    monitor.detach()

    assert 0 == monitor.faults
    return state_of(device, model, optimizer, losses)


def graphed_callable(device: Device, config: MonitorConfig | None) -> dict[str, bytes]:
    """Train a block of the model as a graph, and the rest of the model without one."""
    torch.manual_seed(0)
    model = Block().to(device.name)
    sample = torch.randn(4, 16, 64, device=device.name, requires_grad=True)
    model.block = torch.cuda.make_graphed_callables(model.block, (sample,))
    optimizer = adamw(model.parameters())
    monitor = attached(config, model, optimizer)
    losses = Case().run(device, monitor, model, optimizer, STEPS)
    device.synchronize()
    monitor.detach()

    assert 0 == monitor.faults
    return state_of(device, model, optimizer, losses)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("train", [captured_step, graphed_callable])
def test_training_with_cuda_graphs_ends_with_equal_bits(
    train: Callable[[Device, MonitorConfig | None], dict[str, bytes]], configuration, cuda, device
):
    with deterministic():
        expected = train(device, None)
        assert [] == differences(expected, train(device, None)), "the training itself is not deterministic"

        assert [] == differences(expected, train(device, configured(configuration)))


# Compilation, last because it takes longest.

COMPILED = Case(model=Small, batch=vectors, autocast=torch.bfloat16)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_compiled_training_ends_with_equal_bits(configuration, cuda, device):
    torch.compiler.reset()
    expected = plain(device, "compiled", COMPILED, compiles=True)
    torch.compiler.reset()

    assert [] == differences(expected, trained(device, COMPILED, configured(configuration), compiles=True))
