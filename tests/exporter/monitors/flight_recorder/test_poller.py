"""The thread that reads the flight record: its schedule, the steps of its rows, its records and its counters."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.conftest import wait_until
from tests.programs import run_program

from rankscope_exporter import ConfigError, MonitorConfig
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.flight_recorder import poller, torch_api
from rankscope_exporter.monitors.flight_recorder.poller import (
    MOST_STEPS_BETWEEN,
    FlightRecorderPoller,
    PollSchedule,
    StepAssignment,
)
from rankscope_exporter.monitors.flight_recorder.torch_api import Report, prepare_stacks
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_record import StepRecord


def readings(share: float, cost: float, step_seconds: float, steps: int) -> list[int]:
    """Return the steps after which a reading took place; steps and readings advance the clock."""
    pace, now, read = PollSchedule(share), 0.0, []
    for step in range(1, steps + 1):
        now += step_seconds
        if pace.is_due(step, now):
            read.append(step)
            now += cost
            pace.took(cost, step_seconds, now)
    return read


@pytest.mark.parametrize(
    ("share", "cost", "step_seconds", "steps", "read"),
    [
        (0.001, 0.05, 1.0, 200, [1, 64, 128, 192]),  # 0.1 % of the time allow one reading of 50 ms in 50 s
        (1.0, 0.001, 1.0, 4, [1, 2, 3, 4]),
        (0.0, 0.0, 1.0, 5, []),
        (0.001, 0.05, 0.0065, 2 * MOST_STEPS_BETWEEN + 5, [1, MOST_STEPS_BETWEEN, 2 * MOST_STEPS_BETWEEN]),
        (0.001, 0.05, 0.004, 2 * MOST_STEPS_BETWEEN + 5, [1, 2 * MOST_STEPS_BETWEEN]),
    ],
)
def test_readings_keep_within_their_share_at_powers_of_two(share, cost, step_seconds, steps, read):
    assert read == readings(share, cost, step_seconds, steps)


def test_ranks_with_slower_readings_read_at_common_steps():
    assert set(readings(0.001, 0.09, 1.0, 1000)) - {1} < set(readings(0.001, 0.05, 1.0, 1000))


@given(
    share=st.floats(0.0005, 0.5), cost=st.floats(1e-4, 0.2), step_seconds=st.floats(1e-3, 10), steps=st.integers(1, 400)
)
def test_readings_after_the_first_keep_within_their_share(share, cost, step_seconds, steps):
    read = readings(share, cost, step_seconds, steps)

    assert cost * (len(read) - 1) <= share * (steps * step_seconds + cost * len(read)) + 1e-9


RANKS = {"0": (0, 1)}


def raw(number: int, at_us: int, *, over: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number, "collective_seq_id": number + 1, "p2p_seq_id": 0, "is_p2p": False,
        "process_group": ("0", "default_pg"), "profiling_name": "gloo:all_reduce", "state": "scheduled",
        "time_created_ns": at_us * 1000 + 7, "retired": over, **more,
    }  # fmt: skip


def summary(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["collective_seq"], row["step"], row["call_seq"], row["state"], row["duration"]


@pytest.fixture
def timeline() -> StepAssignment:
    """Return the assignment after a step from 0 to 10."""
    timeline = StepAssignment()
    timeline.step_ended(1, 0, 10)
    return timeline


def test_call_belongs_to_the_last_step_that_began_before_it():
    timeline = StepAssignment()
    timeline.step_ended(7, 10, 20)
    timeline.step_ended(8, 25, 40)
    taken = timeline.take({"cpu": [raw(0, 5), raw(1, 10), raw(2, 22), raw(3, 25), raw(4, 39)]}, RANKS)

    assert [(None, 0), (7, 0), (7, 1), (8, 0), (8, 1)] == [(row["step"], row["call_seq"]) for row in taken.rows]


def test_unfinished_call_waits_and_keeps_its_position(timeline):
    first = timeline.take({"cpu": [raw(0, 1, over=False), raw(1, 2)]}, RANKS).rows
    second = timeline.take({"cpu": [raw(0, 1, duration_ms=2.5), raw(1, 2)]}, RANKS).rows

    assert [(2, 1, 1, "left", None)] == [summary(row) for row in first]
    assert [(1, 1, 0, "left", 0.0025)] == [summary(row) for row in second]


@pytest.mark.parametrize(
    ("last", "is_last", "state"),
    [([raw(1, 2)], False, None), ([raw(0, 1, over=False), raw(1, 2)], True, "entered")],
    ids=["overwritten", "last reading"],
)
def test_unfinished_call_is_entered_unless_it_was_overwritten(last, is_last, state, timeline):
    timeline.take({"cpu": [raw(0, 1, over=False)]}, RANKS)
    taken = timeline.take({"cpu": last}, RANKS, is_last=is_last)

    assert [(1, 1, 0, state, None), (2, 1, 1, "left", None)] == [summary(row) for row in taken.rows]


def test_last_reading_includes_calls_after_the_last_step(timeline):
    late = {"cpu": [raw(0, 99)]}

    assert [] == timeline.take(late, RANKS).rows
    assert [1] == [row["step"] for row in timeline.take(late, RANKS, is_last=True).rows]


def test_calls_of_a_step_with_lost_entries_have_no_position(timeline):
    timeline.take({"cpu": [raw(0, 1)]}, RANKS)
    timeline.step_ended(2, 10, 20)
    timeline.step_ended(3, 20, 30)
    taken = timeline.take({"cpu": [raw(5, 12), raw(6, 13), raw(7, 21)]}, RANKS)

    assert 4 == taken.overwritten
    assert [(2, None), (2, None), (3, 0)] == [(row["step"], row["call_seq"]) for row in taken.rows]


def test_restarted_recorder_is_followed_and_two_recorders_share_one_order(timeline):
    taken = timeline.take({"cpu": [raw(0, 1), raw(1, 5, over=False)], "nccl": [raw(0, 3)]}, RANKS)
    timeline.step_ended(2, 10, 20)
    restarted = timeline.take({"cpu": [raw(0, 11)], "nccl": []}, RANKS)

    assert [(1, 0), (3, 1)] == [(row["t_start"], row["call_seq"]) for row in taken.rows]
    assert 0 == restarted.overwritten
    assert [(1, 2, None), (2, 0, "left")] == [(row["step"], row["call_seq"], row["state"]) for row in restarted.rows]


@st.composite
def trainings(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]]]:
    """Return the size of the ring, and a list of events: a call, the end of a step, or a reading."""
    events = draw(st.lists(st.sampled_from(["call", "call", "call", "step", "read"]), max_size=60))
    return draw(st.integers(1, 8)), [(event, draw(st.integers(0, 2))) for event in events]


@given(trainings())
def test_each_call_has_one_row_or_is_counted_as_overwritten(training):
    """For any order of calls, steps and readings; a call may last for any number of events."""
    ring, events = training
    timeline, rows, overwritten = StepAssignment(), [], 0
    calls: list[tuple[int, int, int]] = []  # time, step, end
    step, began = 1, 0
    for now, (event, length) in enumerate([*events, ("read", 0)], start=1):
        if event == "call":
            calls.append((now, step, now + length))
        elif event == "step":
            timeline.step_ended(step, began, now)
            step, began = step + 1, now
        else:
            is_last = now > len(events)
            if is_last:
                timeline.step_ended(step, began, now)
            held = [raw(number, at, over=end <= now) for number, (at, _, end) in enumerate(calls)][-ring:]
            taken = timeline.take({"cpu": held}, RANKS, is_last=is_last)
            rows += taken.rows
            overwritten += taken.overwritten

    assert len(calls) == len(rows) + overwritten
    expected = {number + 1: of for number, (_, of, _) in enumerate(calls)}
    assert {row["collective_seq"]: expected[row["collective_seq"]] for row in rows} == {
        row["collective_seq"]: row["step"] for row in rows
    }
    assert len(rows) == len({row["collective_seq"] for row in rows})
    for of in set(expected.values()):
        numbers = [seq for seq, its in expected.items() if its == of]
        places = {row["collective_seq"]: row["call_seq"] for row in rows if row["step"] == of}
        assert all(place is None or numbers[place] == seq for seq, place in places.items())


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


def reading_of(
    torch_: Torch, *entries: dict[str, Any], share: float = 1.0
) -> tuple[FlightRecorderPoller, list[StepRecord], ErrorBoundary]:
    """Return a poller, its records and its errors after a step with `entries`, which began at the time 0."""
    records: list[StepRecord] = []
    boundary = ErrorBoundary()
    torch_.entries = list(entries)
    reading = FlightRecorderPoller(share, records.append, boundary)
    reading.on_step_end(PendingStep(3, 0))
    return reading, records, boundary


def rows_of(records: list[StepRecord]) -> list[Any]:
    return [row for record in records for row in record.collectives]


def test_rows_are_published_in_a_record_without_step(torch_):
    """A late record must not change the latest step of the page and of the service."""
    reading, records, _ = reading_of(torch_, raw(0, 1))
    reading.stop(60)

    assert [3] == [row["step"] for row in rows_of(records)]
    assert {None} == {record.step for record in records}


def test_many_entries_are_read_without_stacks_and_without_the_gil(torch_, monkeypatch):
    monkeypatch.setattr(poller, "MOST_WITH_STACKS", 2)
    reading, *_ = reading_of(torch_, *(raw(number, 0) for number in range(3)))
    wait_until(lambda: torch_.asked)
    reading.stop(60)

    assert ["with", "without"] == torch_.asked


def test_process_without_compiler_is_read_without_stacks(torch_):
    """Torch would import the compiler to write stacks."""
    torch_.has_compiler = False
    reading, *_ = reading_of(torch_)
    reading.stop(60)

    assert {"without"} == set(torch_.asked)


def test_unreadable_record_is_a_fault_and_training_continues(torch_):
    reading, records, boundary = reading_of(torch_, {"record_id": 1})
    reading.stop(60)

    assert ([], True) == (records, boundary.count > 0)


def test_last_reading_is_repeated_for_unfinished_entries(torch_, monkeypatch):
    """Torch marks a call as finished with a delay; a call must not be reported as unfinished because of that."""
    reading, records, _ = reading_of(torch_, raw(0, 0, over=False))
    wait_until(lambda: torch_.asked)
    monkeypatch.setattr(poller.time, "sleep", lambda _seconds: torch_.entries.__setitem__(0, raw(0, 0)))
    reading.stop(60)

    assert ["left"] == [row["state"] for row in rows_of(records)]


@pytest.mark.parametrize(("has_groups", "share"), [(False, 1.0), (True, 0)])
def test_nothing_is_read_without_groups_or_with_a_share_of_zero(has_groups, share, torch_, monkeypatch):
    monkeypatch.setattr(poller, "has_groups", lambda: has_groups)
    before = threading.active_count()
    reading, records, _ = reading_of(torch_, share=share)

    assert before == threading.active_count()
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
    "events": [[event.type, event.value, event.message] for record in records for event in record.events
               if event.op == "collectives_overrun"],
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
    (event,) = messages["events"]
    assert ["note", 12.0] == event[:2]
    assert event[2].startswith("12 collectives have no row in the dataset collectives: ")
    assert ["12.0"] == [line.rpartition(" ")[2] for line in messages["dropped"]]


def test_rows_are_published_if_groups_cannot_be_read(torch_, monkeypatch, caplog):
    class Changed:
        """The module of another release of torch."""

        pg_names = 7

    monkeypatch.setattr(dist.distributed_c10d, "_world", Changed())
    reading, records, boundary = reading_of(torch_, raw(0, 1))
    reading.stop(60)

    assert [(3, None)] == [(row["step"], row["group_ranks"]) for row in rows_of(records)]
    assert 0 < boundary.count
    assert 1 == len([record for record in caplog.records if "ranks of process groups failed" in record.getMessage()])


def test_failed_compiler_import_reads_without_stacks(monkeypatch):
    def broken(_name):
        raise RuntimeError("no cache folder")

    monkeypatch.setitem(sys.modules, "torch._dynamo", object())  # as in a process that has loaded it
    monkeypatch.setattr(torch_api.importlib, "import_module", broken)

    assert False is prepare_stacks()
