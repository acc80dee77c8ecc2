"""Phases, throughput, hardware, memory, collectives and hangs on a GPU."""

import json
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.parts import records_of, session_of
from tests.gpu.trainings import CONFIGURATIONS, Block, Case, Device, adamw, configured
from torch import nn

from rankscope_contract.model.events import EventType
from rankscope_exporter import Monitor
from rankscope_exporter.monitors.hardware import Gpu, ResourceObserver, load_nvml, uuid_of
from rankscope_exporter.records.record import StepRecord

FORWARD, BACKWARD, UPDATE = 0.03, 0.05, 0.02
"""Seconds of work in each phase."""


class InBackward(torch.autograd.Function):
    """The identity, with work in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return gradient, None


class Phased(nn.Module):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.sleep(FORWARD)
        return InBackward.apply(self.layer(x), lambda: self.device.sleep(BACKWARD))


class SlowSGD(torch.optim.SGD):
    device: Device

    def step(self, closure: Any = None) -> Any:
        self.device.sleep(UPDATE)
        return super().step(closure)


def scalars(records: Any, name: str, label: str | None = None) -> dict[str, list[float]]:
    """Return the values of a scalar in all records, by one of its labels."""
    found = defaultdict(list)
    for record in records:
        for scalar in record.scalars:
            if scalar.name == name:
                found[scalar.labels[label] if label else ""].append(scalar.value)
    return found


def test_phases_have_the_durations_of_the_device(device):
    model = Phased(device).to(device.name)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    optimizer.device = device
    expected = [device.timed(lambda s=s: device.sleep(s)) for s in (FORWARD, BACKWARD, UPDATE) * 2][3:]
    with Monitor(configured("default")).attach(model, optimizer) as monitor:
        session = session_of(monitor)
        for _ in range(6):
            model(torch.ones(2, 8, device=device.name)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=1.0)
    phases = scalars(records_of(session), "step_phase_seconds", "phase")
    medians = {name: statistics.median(values[1:]) for name, values in phases.items() if len(values) > 1}

    assert 0 == monitor.faults
    assert pytest.approx(expected, rel=0.1) == [medians[phase] for phase in ("forward", "backward", "optimizer")]


def test_peak_of_the_device_is_known_and_mfu_is_a_share(cuda, device):
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to(cuda, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"throughput": {"flops_per_sample": 6 * 4 * 4096**2}}
    with Monitor(configured("default", every=1000, **settings)).attach(model, optimizer) as monitor:
        session = session_of(monitor)
        for _ in range(20):
            model(torch.ones(4096, 4096, device=cuda, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            monitor.log(samples=4096)
            device.synchronize()
    shares = scalars(records_of(session), "mfu")[""]

    assert 0 == monitor.faults
    assert shares, "no MFU"
    assert 0.05 < statistics.median(shares) < 1.0


def test_nvml_values_of_the_device_are_plausible(cuda):
    nvml = load_nvml()
    assert nvml is not None, "nvidia-ml-py is not installed"
    gpu = Gpu.open(nvml, str(uuid_of(cuda)))
    assert gpu is not None
    failures: list[Any] = []
    read = gpu.read(lambda *failure: failures.append(failure))
    found = {(item.name, *(label for key, label in item.labels.items() if key != "gpu")): item.value for item in read}
    gpu.close()

    assert [] == failures
    assert 0 <= found["gpu_utilization",] <= 1
    assert 10 < found["gpu_power_watts",] < 2000
    assert 10 < found["gpu_temperature_celsius", "gpu"] < 110
    assert 1e8 < found["gpu_clock_hertz", "sm"] <= found["gpu_clock_limit_hertz", "sm"] < 5e9
    total = torch.cuda.get_device_properties(cuda).total_memory
    assert pytest.approx(total, rel=0.05) == found["gpu_memory_total_bytes",]
    assert 0 < found["gpu_memory_used_bytes",] <= found["gpu_memory_total_bytes",]


def test_hardware_thread_publishes_the_gpu(cuda, device):
    model = Block().to(cuda)
    optimizer = adamw(model.parameters())
    with Monitor(configured("default", hardware={"every_seconds": 0.1})).attach(model, optimizer) as monitor:
        session = session_of(monitor)
        for _ in range(5):
            Case().run(device, monitor, model, optimizer, 1)
            device.sleep(0.1)
            device.synchronize()
    names = {scalar.name for record in records_of(session) for scalar in record.scalars}

    assert 0 == monitor.faults
    assert {"gpu_utilization", "gpu_power_watts", "device_memory_allocated_bytes"} <= names


def test_memory_is_that_of_the_allocator_of_torch(cuda):
    kept = torch.ones(1 << 20, device=cuda)
    found = {scalar.name: scalar.value for scalar in ResourceObserver(cuda, dict, int).of_allocator()}

    assert torch.cuda.memory_allocated(cuda) == found["device_memory_allocated_bytes"] >= kept.nbytes
    assert torch.cuda.memory_reserved(cuda) == found["device_memory_reserved_bytes"]
    assert torch.cuda.max_memory_allocated(cuda) == found["device_memory_allocated_peak_bytes"]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_peak_memory_that_the_monitor_adds(configuration, cuda, device, record_property):
    """The temporary memory of statistics has a limit: a few copies of a chunk of 4 Mi elements in float64."""

    def peak(attach: bool) -> int:
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(cuda)
        optimizer = adamw(model.parameters())
        monitor = Monitor(configured(configuration))
        if attach:
            monitor.attach(model, optimizer)
        torch.cuda.reset_peak_memory_stats(cuda)
        for _ in range(3):
            model(torch.ones(64, 2048, device=cuda)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        device.synchronize()
        found = torch.cuda.max_memory_allocated(cuda)
        monitor.detach()
        return found

    added = peak(attach=True) - peak(attach=False)
    record_property("added_bytes", added)
    if configuration == "default":
        assert added < 512 << 20


def test_collectives_of_nccl_have_rows(group, cuda, device):
    model = Block().to(cuda)
    optimizer = adamw(model.parameters())
    with Monitor(configured("default", collectives_share=1.0)).attach(model, optimizer) as monitor:
        session = session_of(monitor)
        for _ in range(4):
            summed, gathered = torch.ones(1000, device=cuda), torch.empty(500, device=cuda)
            dist.all_reduce(summed)
            dist.all_gather_into_tensor(gathered, torch.ones(500, device=cuda))
            Case().run(device, monitor, model, optimizer, 1)
            device.synchronize()
    rows = [row for record in records_of(session) for row in record.collectives]
    sizes = {row["op"]: row["bytes"] for row in rows}

    assert 0 == monitor.faults
    assert {"nccl"} == {row["backend"] for row in rows}
    assert {4000, 2000} <= set(sizes.values()), sizes
    assert any("test_measurements.py" in str(row["call_site"]) for row in rows)


def test_flight_record_is_read_while_a_graph_is_captured(group, cuda):
    from rankscope_exporter.monitors.flight_recorder.torch_api import read_with_stacks, read_without_stacks

    failures: list[Any] = []
    model, batch = nn.Linear(64, 64).to(cuda), torch.ones(8, 64, device=cuda)
    dist.all_reduce(batch)
    model(batch).sum().backward()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), {}

    def read() -> None:
        for function in (read_with_stacks, read_without_stacks):
            found[function.__name__] = function(lambda *failure: failures.append(failure))

    with torch.cuda.graph(graph):
        model(batch)
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(20)
        model(batch)
    graph.replay()
    torch.cuda.synchronize()

    assert not thread.is_alive()
    assert [] == failures
    assert all("nccl" in entries for entries in found.values()), found


def wait_for_the_device(loss: torch.Tensor) -> float:
    return loss.item()


def events(records: Any, kind: str) -> Iterator[tuple[StepRecord, Any]]:
    return ((record, event) for record in records for event in record.events if event.type == kind)


def test_hang_of_the_device_names_the_waiting_line(cuda, device):
    model = Block().to(cuda)
    optimizer = adamw(model.parameters())
    with Monitor(configured("default", hang_after_seconds=1.0, every=1000)).attach(model, optimizer) as monitor:
        session = session_of(monitor)
        Case().run(device, monitor, model, optimizer, 2)
        device.sleep(6.0)
        wait_for_the_device(Case().run(device, monitor, model, optimizer, 1)[0])
    records = records_of(session)
    stacks = [json.loads(event.details) for _, event in events(records, EventType.STACKS)]

    assert list(events(records, "hang"))
    assert any("wait_for_the_device" in json.dumps(found) for found in stacks)
    assert 0 == monitor.faults
