"""The thread that reads the flight record, and the collectives of two real ranks, compared with a log of the ranks."""

import json
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.conftest import wait_until
from tests.exporter.monitors.flight_recorder.rank_programs import LATE, LATE_SECONDS, STANDING, TRAINING
from tests.programs import run_program

from rankscope_contract.model.stacks import FlightRecord
from rankscope_exporter.monitors.flight_recorder import poller, torch_api
from rankscope_exporter.monitors.flight_recorder.poller import (
    MOST_STEPS_BETWEEN,
    FlightRecorderPoller,
    PollSchedule,
    StepAssignment,
)
from rankscope_exporter.monitors.flight_recorder.torch_api import Report, prepare_stacks
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.ring import encode, stream
from rankscope_exporter.records.record import StepRecord
from rankscope_ingest.record_channel.bodies import RowContext, check, decode
from rankscope_ingest.runs.collective_calls import Call, calls_of_note, sentences
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_storage.sql.collective_calls import CallState
from rankscope_storage.writer.writer import Batch


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


def test_unfinished_call_waits_and_keeps_its_position(timeline):
    first, _ = timeline.take({"cpu": [raw(0, 1, over=False), raw(1, 2)]}, RANKS)
    second, _ = timeline.take({"cpu": [raw(0, 1, duration_ms=2.5), raw(1, 2)]}, RANKS)

    assert [(2, 1, 1, "left", None)] == [summary(row) for row in first]
    assert [(1, 1, 0, "left", 0.0025)] == [summary(row) for row in second]


@pytest.mark.parametrize(
    ("last", "is_last", "state"),
    [([raw(1, 2)], False, None), ([raw(0, 1, over=False), raw(1, 2)], True, "entered")],
    ids=["overwritten", "last reading"],
)
def test_unfinished_call_is_entered_unless_it_was_overwritten(last, is_last, state, timeline):
    timeline.take({"cpu": [raw(0, 1, over=False)]}, RANKS)
    rows, _ = timeline.take({"cpu": last}, RANKS, is_last=is_last)

    assert [(1, 1, 0, state, None), (2, 1, 1, "left", None)] == [summary(row) for row in rows]


def test_last_reading_includes_calls_after_the_last_step(timeline):
    late = {"cpu": [raw(0, 99)]}

    assert ([], 0) == timeline.take(late, RANKS)
    assert [1] == [row["step"] for row in timeline.take(late, RANKS, is_last=True)[0]]


def test_restarted_recorder_is_followed_and_two_recorders_share_one_order(timeline):
    rows, _ = timeline.take({"cpu": [raw(0, 1), raw(1, 5, over=False)], "nccl": [raw(0, 3)]}, RANKS)
    timeline.step_ended(2, 10, 20)
    restarted, overwritten = timeline.take({"cpu": [raw(0, 11)], "nccl": []}, RANKS)

    assert [(1, 0), (3, 1)] == [(row["t_start"], row["call_seq"]) for row in rows]
    assert 0 == overwritten
    assert [(1, 2, None), (2, 0, "left")] == [(row["step"], row["call_seq"], row["state"]) for row in restarted]


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
            more, missed = timeline.take({"cpu": held}, RANKS, is_last=is_last)
            rows += more
            overwritten += missed

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
    reading.on_step_end(StepRecord(step=3, ts=0))
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
while not session.collectives.totals():
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


BOTH = (0, 1)
RUNS = ("script", "DDP", "FSDP1", "FSDP2", "tensor parallelism")
pytestmark = pytest.mark.timeout(300)


def diary(folder: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"diary-{rank}").read_text().splitlines()]


def line_of(comment: str) -> int:
    return next(number for number, line in enumerate(TRAINING.splitlines(), 1) if line.endswith(f"# {comment}"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = run_program(TRAINING, seconds=200, FOLDER=str(folder))

    assert "exit codes [0, 0]\n" == done.stdout, done.stderr
    return folder


@pytest.fixture(scope="module")
def outcomes(trained: Path) -> list[dict[str, Any]]:
    """Results of both ranks, rows sorted by time: a call that torch retires late is in a later record."""
    results = [json.loads((trained / f"outcome-{rank}").read_text()) for rank in BOTH]
    for result in results:
        for name in RUNS:
            result[name]["rows"].sort(key=lambda row: row["t_start"])
    return results


def test_rows_have_the_order_and_times_of_the_calls(trained, outcomes):
    for rank, outcome in enumerate(outcomes):
        written = diary(trained, rank)
        rows = outcome["script"]["rows"]
        calls = list(zip(written[::2], written[1::2], strict=True))

        assert [(step, name) for (_, step, name, _), _ in calls] == [(row["step"], row["op"]) for row in rows]
        for (entered, left), row in zip(calls, rows, strict=True):
            assert entered[-1] <= row["t_start"] <= left[-1]
        assert [*range(4)] * 3 == [row["call_seq"] for row in rows]
        assert [*range(1, 13)] == [row["collective_seq"] for row in rows]
        assert (0, 0) == (outcome["script"]["faults"], outcome["script"]["overwritten"])


def test_rows_have_size_type_group_and_call_site(outcomes):
    sizes = {"all_reduce": (12, "float32"), "all_gather": (32, "float32"), "barrier": (None, None)}
    names = ("group", "group_size", "group_ranks", "state", "backend", "is_p2p", "duration")
    for row in [row for outcome in outcomes for row in outcome["script"]["rows"]]:
        size = (4 * row["step"], "bfloat16") if row["op"] == "broadcast" else sizes[row["op"]]

        assert size == (row["bytes"], row["dtype"])
        assert f"<string>[{line_of(row['op'] + ' is here')}]" == row["call_site"]
        # Gloo reports no duration.
        assert ("default_pg", 2, "0-1", "left", "gloo", False, None) == tuple(row[name] for name in names)


@pytest.mark.parametrize(
    ("framework", "operations"),
    [
        ("DDP", {"c10d.allreduce_": "all_reduce", "c10d.broadcast_": "broadcast"}),
        # Gloo has no reduce-scatter and records the operations that replace it.
        ("FSDP1", {"c10d.allgather_": "all_gather", "c10d._reduce_scatter_base_": "all_reduce"}),
        ("FSDP2", {"c10d._allgather_base_": "all_gather", "c10d._reduce_scatter_base_": "all_reduce"}),
        ("tensor parallelism", {"c10d_functional.all_reduce": "all_reduce"}),
    ],
)
def test_rows_of_a_framework_match_comm_debug_mode(framework, operations, outcomes):
    """CommDebugMode counts operations when they are dispatched, independent of the flight record."""
    for outcome in outcomes:
        run = outcome[framework]
        found: dict[int | None, Counter[str]] = defaultdict(Counter)
        for row in run["rows"]:
            found[row["step"]][row["op"]] += 1
        counted = [
            {operations[name]: count for name, count in of_step.items() if name in operations}
            for of_step in run["counted"]
        ]

        assert counted == [dict(found[step]) for step in (1, 2, 3)]
        assert all(counted)
        assert {f"<string>[{line_of('backward is here')}]"} == {row["call_site"] for row in run["rows"] if row["step"]}
        assert 0 == run["faults"]


def test_calls_before_the_first_step_have_no_step_and_one_monitor_each(outcomes):
    ops = [row["op"] for row in outcomes[0]["DDP"]["rows"] if row["step"] is None]

    assert ["all_gather", "broadcast", "broadcast"] == ops
    for outcome in outcomes:
        seen = [(row["group_id"], row["t_start"]) for name in RUNS for row in outcome[name]["rows"]]
        assert len(seen) == len(set(seen))


def test_page_counts_calls_and_bytes_by_operation(outcomes):
    """Only calls that were read: at the last scrape a step had not ended."""
    lines = dict(line.rsplit(" ", 1) for line in outcomes[0]["script"]["page"])
    calls = {name: float(value) for name, value in lines.items() if "calls_total" in name}

    assert {"all_reduce", "all_gather", "broadcast", "barrier"} == {name.split('"')[1] for name in calls}
    assert all(1 <= count <= 3 for count in calls.values())


def test_store_shows_the_late_rank_and_the_waits_of_the_others(outcomes, tmp_path):
    """The rank that slept before the call, checked with SQL on the store."""
    store = Store.open(tmp_path / "store", create=True)
    with store.claim(owner="test") as writer:
        for rank, outcome in enumerate(outcomes):
            body = stream(0, [encode(StepRecord(ts=outcome["told_at"], collectives=tuple(outcome["script"]["rows"])))])
            context = RowContext(run="r", attempt=0, rank=rank, incarnation=f"i{rank}")
            checked = check(pa.ipc.open_stream(body).read_all(), {}, context, after=-1, first_ordinal=0)
            writer.append(Batch(tables=decode([checked]), watermarks={f"i{rank}": 0}))
    with connect(store.root) as connection:
        calls = connection.query("FROM collective_calls ORDER BY collective_seq").to_pylist()

    assert [(step, op) for step in (1, 2, 3) for op in ("all_reduce", "all_gather", "broadcast", "barrier")] == [
        (row["step"], row["op"]) for row in calls
    ]
    assert {("over", False, (0, 1))} == {
        (row["state"], row["is_mismatch"], tuple(row["ranks_entered"])) for row in calls
    }
    late = next(row for row in calls if (row["step"], row["op"]) == LATE[1:])
    assert (LATE[0], True) == (late["last_rank"], late["spread"] > LATE_SECONDS / 5)


# Positions of the ranks.


@pytest.fixture(scope="module")
def stood(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stood")
    done = run_program(STANDING, seconds=200, FOLDER=str(folder))

    assert "exit codes [0, -9]\n" == done.stdout, done.stderr
    return folder


def records(folder: Path, case: str) -> dict[int, FlightRecord]:
    return {rank: FlightRecord.of(json.loads((folder / f"{case}-{rank}").read_text())) for rank in BOTH}


def only(folder: Path, case: str) -> Call:
    (call,) = calls_of_note(records(folder, case))
    return call


@pytest.mark.parametrize(
    ("case", "state", "words"),
    [
        ("never entered", CallState.NEVER_ENTERED, "rank 1 never entered all_reduce 2 (20 B float32) of default_pg; "),
        ("never left", CallState.NEVER_LEFT, "rank 1 entered broadcast 3 (12 B float32) of default_pg since "),
        ("all in", CallState.ALL_IN, "ranks 0-1 are all in all_reduce 4 (3.9 KiB float32) of default_pg since "),
    ],
)
def test_positions_of_two_ranks_match_the_log_of_the_ranks(case, state, words, stood):
    """A rank stops itself inside the call, so that its state does not change."""
    written = {rank: [(what, at) for what, of, at in diary(stood, rank) if of == case] for rank in BOTH}
    told_at = max(at for entries in written.values() for what, at in entries if what == "tell")
    done = {
        rank: tuple(what for what, at in entries if at <= told_at and what != "tell")
        for rank, entries in written.items()
    }
    call = only(stood, case)

    assert state is call.state
    assert sentences(records(stood, case))[0].startswith(words)
    for ranks, calls in ((call.missing, ()), (call.waiting, ("enter",)), (call.left, ("enter", "leave"))):
        assert {rank for rank in BOTH if done[rank] == calls} == set(ranks)


def test_different_calls_of_ranks_are_named(stood):
    call = only(stood, "mismatch")

    assert call.is_mismatch
    assert CallState.ALL_IN is call.state
    assert [("all_reduce (16 B float32)", (0,)), ("broadcast (64 B float64)", (1,))] == list(call.forms)
    forms = "rank 0 all_reduce (16 B float32), rank 1 broadcast (64 B float64); "
    assert sentences(records(stood, "mismatch"))[0].startswith(f"ranks differ in collective 5 of default_pg: {forms}")
