"""Fixtures that read a rank by HTTP and decode the published stream."""

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from rankscope_contract.model.schema import NESTED, Plan
from rankscope_contract.wire.channel import PLAN_PATH, RECORDS_PATH, SCHEMA_HEADER
from rankscope_exporter import Monitor, MonitorConfig

if device := os.environ.get("RANKSCOPE_TEST_DEVICE"):  # `make test-gpu` repeats some tests with tensors on a GPU
    torch.set_default_device(device)


@dataclass(frozen=True, slots=True)
class Row:
    """The statistics of one tensor at one step in the stream."""

    step: int
    kind: str
    tensor: str
    placement: str
    numbers: dict[str, float | int | None]
    index: int | None = None
    micro_step: int | None = None


class Reader:
    """A slow, simple decoder of the record channel, independent of that of the service."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **headers: str) -> bytes:
        request = urllib.request.Request(self._address + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
        return body

    def records(self) -> list[dict[str, Any]]:
        body = self.get(f"{RECORDS_PATH}?after=-1", **{SCHEMA_HEADER: "1"})
        if not body:
            return []
        none = dict.fromkeys(NESTED, ())  # a dataset without rows has no column
        return [{**none, **row} for row in pa.ipc.open_stream(body).read_all().to_pylist()]

    def rows(self) -> list[Row]:
        return [row for record in self.records() if record["plan"] for row in self._rows_of(record)]

    def scalars(self, name: str) -> list[tuple[int, float]]:
        return [
            (record["step"], scalar["value"])
            for record in self.records()
            for scalar in record["scalars"] or ()
            if scalar["name"] == name
        ]

    def events(self) -> list[dict[str, Any]]:
        return [{**event, "step": record["step"]} for record in self.records() for event in record["events"] or ()]

    def _rows_of(self, record: dict[str, Any]) -> Iterator[Row]:
        plan = Plan.from_json(self.get(PLAN_PATH + record["plan"]).decode())
        entries = plan.entries
        for position, entry in enumerate(entries):
            counts = record["counts"][position :: len(entries)]
            if counts[-1] is None:
                continue
            values = record["values"][position :: len(entries)]
            numbers = dict(zip((*plan.value_ops, *plan.count_ops), (*values, *counts), strict=True))
            where = (entry.index, entry.micro_step)
            yield Row(record["step"], entry.kind, entry.tensor, entry.placement, numbers, *where)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll `condition` and return its first true value; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    return pytest.fail(f"not within {seconds} s")


@pytest.fixture
def quiet() -> MonitorConfig:
    """Return a configuration without console output and without a wait at the end."""
    return MonitorConfig(console=False, exit_wait_seconds=0)


@pytest.fixture
def reader() -> Callable[[Monitor], Reader]:
    def make(monitor: Monitor) -> Reader:
        assert monitor.address is not None
        return Reader(monitor.address)

    return make


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def group() -> Iterator[Any]:
    """Return a process group that contains this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
