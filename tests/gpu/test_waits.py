"""The training thread never waits for the device because of the monitor."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.exporter.parts import session_of
from tests.gpu.device import CONFIGURATIONS, Device, configured
from tests.gpu.trainings import Block, Case, Small, adamw, ids, vectors
from torch import nn

from rankscope_exporter import Monitor

LOOPS = {
    "fp32": Case(),
    "bf16, fused": Case(autocast=torch.bfloat16, optimizer={"fused": True}),
    "accumulation": Case(micro_batches=3),
    "checkpointing": Case(model=lambda: Block(checkpointed=False)),
}


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_do_not_wait_for_the_device(loop, configuration, every, cuda, device):
    case = LOOPS[loop]
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
    """A layer behind work that takes long."""

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
    """Return the number of nodes of a captured graph."""
    import ctypes

    count = ctypes.c_size_t()
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    assert 0 == runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value
