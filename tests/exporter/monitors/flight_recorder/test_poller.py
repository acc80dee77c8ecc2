"""The thread that reads the flight record: its records and counters, without a real process group."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist
from tests.exporter.conftest import wait_until
from tests.exporter.monitors.flight_recorder.test_step_assignment import raw
from tests.programs import run_program

from rankscope_exporter import ConfigError, MonitorConfig
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.flight_recorder import poller, torch_api
from rankscope_exporter.monitors.flight_recorder.poller import FlightRecorderPoller
from rankscope_exporter.monitors.flight_recorder.torch_api import Report, prepare_stacks
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_record import StepRecord


class Torch:
    """A double of torch's recorder that counts the readings."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.has_compiler = True

    def with_stacks(self, _report: Report) -> dict[str, Any]:
        self.asked.append("with")
        return {"cpu": self.entries}

    def without_stacks(self, _report: Report) -> dict[str, Any]:
        self.asked.append("without")
        return {"cpu": self.entries}


@pytest.fixture
def torch_(monkeypatch: pytest.MonkeyPatch) -> Torch:
    double = Torch()
    monkeypatch.setattr(poller, "has_groups", lambda: True)
    monkeypatch.setattr(poller, "_read_before", {})
    monkeypatch.setattr(poller, "prepare_stacks", lambda: double.has_compiler)
    monkeypatch.setattr(poller, "read_with_stacks", double.with_stacks)
    monkeypatch.setattr(poller, "read_without_stacks", double.without_stacks)
    return double


def made(share: float = 1.0) -> tuple[FlightRecorderPoller, list[StepRecord], ErrorBoundary]:
    records: list[StepRecord] = []
    boundary = ErrorBoundary()
    return FlightRecorderPoller(share, records.append, boundary), records, boundary


def step(reading: FlightRecorderPoller, number: int) -> None:
    reading.on_step_begin(number)
    reading.on_step_end(PendingStep(number, 0))


def test_rows_are_published_in_a_record_without_step(torch_):
    """A late record must not change the latest step of the page and of the service."""
    reading, records, _ = made()
    reading.on_step_begin(3)
    torch_.entries = [raw(0, reading._began_us)]
    reading.on_step_end(PendingStep(3, 0))
    reading.stop(60)

    assert [3] == [row["step"] for record in records for row in record.collectives]
    assert {None} == {record.step for record in records}


def test_overwritten_entries_are_counted_and_reported(torch_):
    reading, records, _ = made()
    torch_.entries = [raw(5, 0), raw(6, 0)]
    step(reading, 1)
    reading.stop(60)

    assert 5 == reading.overwritten
    (event,) = [event for record in records for event in record.events]
    assert ("note", "collectives_overrun", 5.0) == (event.type, event.op, event.value)


def test_many_entries_are_read_without_stacks_and_without_the_gil(torch_, monkeypatch):
    monkeypatch.setattr(poller, "MOST_WITH_STACKS", 2)
    reading, _, _ = made()
    torch_.entries = [raw(number, 0) for number in range(3)]
    step(reading, 1)
    wait_until(lambda: torch_.asked)
    reading.stop(60)

    assert ["with", "without"] == torch_.asked


def test_process_without_compiler_is_read_without_stacks(torch_):
    """Torch would import the compiler to write stacks."""
    torch_.has_compiler = False
    reading, _, _ = made()
    step(reading, 1)
    reading.stop(60)

    assert {"without"} == set(torch_.asked)


def test_unreadable_record_is_a_fault_and_training_continues(torch_):
    reading, records, boundary = made()
    torch_.entries = [{"record_id": 1}]
    step(reading, 1)
    reading.stop(60)

    assert ([], True) == (records, boundary.count > 0)


def test_last_reading_is_repeated_for_unfinished_entries(torch_, monkeypatch):
    """Torch marks a call as finished with a delay; a call must not be reported as unfinished because of that."""
    reading, records, _ = made()
    torch_.entries = [raw(0, 0, over=False)]
    step(reading, 1)
    wait_until(lambda: torch_.asked)
    monkeypatch.setattr(poller.time, "sleep", lambda _seconds: torch_.entries.__setitem__(0, raw(0, 0)))
    reading.stop(60)

    assert ["left"] == [row["state"] for record in records for row in record.collectives]


def test_process_without_groups_has_no_thread(monkeypatch):
    monkeypatch.setattr(poller, "has_groups", lambda: False)
    reading, records, _ = made()
    before = threading.active_count()
    for number in range(5):
        step(reading, number)
    reading.stop(60)

    assert (before, [], 0) == (threading.active_count(), records, len(reading._ended))


def test_share_of_zero_reads_nothing(torch_):
    reading, records, _ = made(0)
    step(reading, 1)
    reading.stop(60)

    assert ([], []) == (torch_.asked, records)


@pytest.mark.parametrize("share", [-0.1, 1.5, "much", True])
def test_invalid_share_is_refused(share):
    with pytest.raises(ConfigError, match="collectives_share"):
        MonitorConfig(collectives_share=share)


OVERRUN = """
import json, torch, torch.distributed as dist, rankscope
import tempfile, time
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
config = rankscope.MonitorConfig(console=False, exit_wait_seconds=0, collectives_share=1.0)
monitor = rankscope.Monitor(config).attach(net, optimizer)
session = monitor._session
net(torch.ones(2, 3)).sum().backward()
for _ in range(20):
    dist.all_reduce(torch.ones(3))
optimizer.step()
monitor.end_step()
while not session.step_observers.collectives.totals.by_op():
    time.sleep(0.01)
monitor.detach()
records = session.channel.ring.after(-1, 1 << 40).records
page = b"".join(bytes(piece) for piece in session.channel.exposition.pieces()).decode()
dist.destroy_process_group()
print(json.dumps({
    "rows": [row["collective_seq"] for record in records for row in record.collectives],
    "places": [row["call_seq"] for record in records for row in record.collectives],
    "texts": [event.message for record in records for event in record.events if event.op == "collectives_overrun"],
    "dropped": [line for line in page.splitlines() if 'reason="collectives_overrun"' in line],
}))
"""


def test_entries_lost_by_a_small_torch_ring_are_counted():
    """Torch keeps the last 8 of 20 real collectives."""
    done = run_program(OVERRUN, TORCH_FR_BUFFER_SIZE="8")

    assert 0 == done.returncode, done.stderr
    messages = json.loads(done.stdout)
    assert [*range(13, 21)] == messages["rows"]
    assert [None] * 8 == messages["places"]
    assert ["12 collectives have no row in the dataset collectives"] == [
        text.partition(":")[0] for text in messages["texts"]
    ]
    assert ["12.0"] == [line.rpartition(" ")[2] for line in messages["dropped"]]


def test_rows_are_published_if_groups_cannot_be_read(torch_, monkeypatch, caplog):
    class Changed:
        """The module of another release of torch."""

        pg_names = 7

    monkeypatch.setattr(dist.distributed_c10d, "_world", Changed())
    reading, records, boundary = made()
    reading.on_step_begin(3)
    torch_.entries = [raw(0, reading._began_us)]
    reading.on_step_end(PendingStep(3, 0))
    reading.stop(60)

    assert [(3, None)] == [(row["step"], row["group_ranks"]) for record in records for row in record.collectives]
    assert 0 < boundary.count
    assert 1 == len([record for record in caplog.records if "ranks of process groups failed" in record.getMessage()])


def test_failed_compiler_import_reads_without_stacks(monkeypatch):
    def broken(_name):
        raise RuntimeError("no cache folder")

    monkeypatch.setitem(sys.modules, "torch._dynamo", object())  # as in a process that has loaded it
    monkeypatch.setattr(torch_api.importlib, "import_module", broken)

    assert False is prepare_stacks()
