"""The monitor and captures of CUDA graphs, with doubles of the device's runtime."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.exporter.parts import Training

from rankscope_exporter.base import graph_capture, tracing


class Runtime:
    """A double of a device's runtime that stores the capture mode of a thread."""

    def __init__(self) -> None:
        self.mode = 0

    def exchange(self, wanted: Any) -> int:
        mode = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, mode.value = mode.value, self.mode
        return 0


def test_captured_step_is_not_a_step(monkeypatch):
    with Training() as training:
        training.train(loss=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(tracing, "is_capturing", lambda: True)
            training.train(loss=1.0)
        training.train(loss=2.0)

    assert [1, 2] == training.measured()
    assert [0.0, 2.0] == [value for _, value in training.scalars("loss")]
    assert 0 == training.faults


def test_publisher_thread_is_in_the_relaxed_capture_mode(monkeypatch):
    runtime, modes = Runtime(), []
    with Training() as training:
        monkeypatch.setattr(graph_capture, "device_in_use", lambda: -1)
        monkeypatch.setattr(graph_capture, "exchange_of_modes", lambda: runtime.exchange)
        training.session.steps.items.put(lambda: modes.append(runtime.mode))
        training.publish()
        monkeypatch.undo()

    assert ([2], 0) == (modes, runtime.mode)


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
