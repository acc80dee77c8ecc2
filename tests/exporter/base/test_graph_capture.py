"""The monitor and captures of CUDA graphs, with doubles of the device's runtime."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.exporter.parts import records_of, session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.base import graph_capture, tracing


class Runtime:
    """A double of a device's runtime that stores the capture mode of a thread."""

    def __init__(self) -> None:
        self.mode = 0

    def exchange(self, wanted: Any) -> int:
        mode = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, mode.value = mode.value, self.mode
        return 0


def step(monitor: Monitor, net: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> None:
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.log(loss=loss)


def test_captured_step_is_not_a_step(quiet: MonitorConfig, monkeypatch):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    with Monitor(quiet).attach(net, optimizer) as monitor:
        session = session_of(monitor)
        step(monitor, net, optimizer, 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(tracing, "is_capturing", lambda: True)
            step(monitor, net, optimizer, 1.0)
        step(monitor, net, optimizer, 2.0)
    records = records_of(session)

    assert [1, 2] == [record.step for record in records if record.statistics is not None]
    assert [0.0, 2.0] == [scalar.value for record in records for scalar in record.scalars if scalar.name == "loss"]
    assert 0 == monitor.faults


def test_publisher_thread_is_in_the_relaxed_capture_mode(quiet: MonitorConfig, monkeypatch):
    net, runtime, modes = nn.Linear(4, 4), Runtime(), []
    with Monitor(quiet).attach(net) as monitor:
        monkeypatch.setattr(graph_capture, "device_in_use", lambda: -1)
        monkeypatch.setattr(graph_capture, "exchange_of_modes", lambda: runtime.exchange)
        session_of(monitor).steps.items.put(lambda: modes.append(runtime.mode))
        session_of(monitor).publisher.catch_up(30)
        monkeypatch.undo()

    assert [2] == modes
    assert 0 == runtime.mode


@pytest.mark.parametrize(("in_use", "expected"), [({5, 6}, [5, 5]), ({0, 6}, [0, 0]), (set(), [])])
def test_thread_calls_the_runtime_on_a_device_in_use_only(in_use, expected, monkeypatch):
    """Elsewhere, such as on device 0 in a new thread, a call would create a context of about 500 MB."""
    current, calls = [0], []

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    def exchange(_mode: Any) -> int:
        calls.append(current[-1])
        return 0

    monkeypatch.setattr(graph_capture, "exchange_of_modes", lambda: exchange)
    for name, double in {"is_initialized": lambda: True, "device_count": lambda: 8, "device": device}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", in_use.__contains__, raising=False)
    with graph_capture.others_may_capture() as is_relaxed:
        assert is_relaxed

    assert expected == calls
