"""A training has the same bits with and without a monitor, and never waits for the device because of it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from tests.gpu.trainings import (
    CASES,
    CONFIGURATIONS,
    STEPS,
    Block,
    Case,
    Device,
    Small,
    adamw,
    attached,
    configured,
    deterministic,
    differences,
    ids,
    state_of,
    vectors,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor, MonitorConfig


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


LOOPS = ("fp32", "bf16 autocast", "accumulation and clipping", "checkpointing")


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_do_not_wait_for_the_device(loop, configuration, every, cuda, device):
    case = CASES[loop]
    model, optimizer = case.build(cuda)
    with Monitor(configured(configuration, every=every)).attach(model, optimizer) as monitor:
        case.run(device, monitor, model, optimizer, 3)
        with device.no_waits():
            case.run(device, monitor, model, optimizer, 3)
            monitor.batch(ids(cuda)[:, 0])
            monitor.log(loss={"a": torch.ones((), device=cuda)})
            case.run(device, monitor, model, optimizer, 1)

    assert 0 == monitor.faults


def test_an_error_shows_each_wait(cuda, device):
    """Otherwise the tests of this module could not fail."""
    with device.no_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(2, device=cuda).sum().item()


class Slow(nn.Module):
    def __init__(self, device: Device, seconds: float) -> None:
        super().__init__()
        self.layer = Small()
        self.device, self.seconds = device, seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.device.sleep(self.seconds)
        return self.layer(batch)


@pytest.mark.parametrize("every", [1, 1000])
def test_host_is_done_long_before_the_device(every, cuda, device):
    """The device has work for a second. The model is small, because a device accepts about 1,000 kernels in advance."""
    case = Case(model=lambda: Slow(device, 0.5), batch=vectors)
    model, optimizer = case.build(cuda)
    with Monitor(configured("default", every=every)).attach(model, optimizer) as monitor:
        case.run(device, monitor, model, optimizer, 2)
        device.synchronize()
        session_of(monitor).publisher.catch_up(30)
        done = torch.cuda.Event()
        case.run(device, monitor, model, optimizer, 2)
        done.record()
        is_done = done.query()

    assert not is_done, "the host has waited for the device"
    assert 0 == monitor.faults


def test_copies_are_read_while_a_graph_is_captured(cuda, device):
    """Queries of a device by another thread break a capture, unless this thread is in the relaxed capture mode."""
    model, more = Block().to(cuda), Block().to(cuda)
    optimizer, batch = adamw(model.parameters()), ids(cuda)
    more(batch).sum().backward()
    with Monitor(configured("everything")).attach(model, optimizer) as monitor:
        publisher, captures = session_of(monitor).publisher, threading.Event()
        Case().run(device, monitor, model, optimizer, 2)
        publisher.catch_up(30)
        session_of(monitor).steps.items.put(lambda: captures.wait(10))
        Case().run(device, monitor, model, optimizer, 3)
        graph = torch.cuda.CUDAGraph()
        more.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            captures.set()
            more(batch).sum().backward()
            assert publisher.catch_up(30)
        graph.replay()
        device.synchronize()

    assert 0 == monitor.faults


def test_nothing_of_the_monitor_becomes_part_of_a_graph(cuda, device):
    """A graph that contained the monitor's work would write to its memory at each replay."""

    def graph_of(monitor: Monitor | None) -> int:
        model, batch = Block().to(cuda), ids(cuda)
        optimizer = adamw(model.parameters(), capturable=True)
        if monitor is not None:
            monitor.attach(model, optimizer)
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.log(loss=loss)
        if monitor is not None:
            monitor.detach()
        return nodes(graph)

    assert graph_of(None) == graph_of(Monitor(configured("everything")))


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    import ctypes

    count = ctypes.c_size_t()
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    assert 0 == runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value
