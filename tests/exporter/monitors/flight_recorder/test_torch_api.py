"""Reading the recorders of torch, by a function or through its worker server, and the rows of their entries."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.exporter.parts import CaptureRuntime
from tests.programs import run_program

from rankscope_contract.model.stacks import MAX_DETAILS_BYTES
from rankscope_exporter.adapters import torch_private, tracing
from rankscope_exporter.monitors.flight_recorder import torch_api
from rankscope_exporter.monitors.flight_recorder.poller import (
    KEPT,
    call_site,
    read_flight_record,
    row_of,
    take_flight_record,
)
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    CPU,
    NCCL,
    TorchRecorder,
    read_with_stacks,
    read_without_stacks,
)

C10D = torch._C._distributed_c10d
DATA = Path(__file__).parents[3] / "data" / "flight"
"""Dumps of NCCL that were written by hand; see its README."""

GOOD = TorchRecorder(name="good", with_stacks="test_good_pickle", plain="test_good_json", handler="test_none")
BROKEN = TorchRecorder(name="broken", with_stacks="test_broken", plain="test_broken", handler="test_none")
ABSENT = TorchRecorder(name="absent", with_stacks="test_none", plain="test_none", handler="test_none")


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number, "time_created_ns": 1000 * number, "profiling_name": "gloo:all_reduce",
        "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0, **more,
    }  # fmt: skip


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Add functions of a good and a broken recorder to torch's, and return the document of the good one."""
    document: dict[str, Any] = {"entries": [entry(2), entry(1)]}
    monkeypatch.setattr(C10D, f"_dump_{GOOD.plain}", lambda *_: json.dumps(document).encode(), raising=False)
    monkeypatch.setattr(C10D, f"_dump_{GOOD.with_stacks}", lambda *_: pickle.dumps(document), raising=False)
    error = Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure"))
    monkeypatch.setattr(C10D, f"_dump_{BROKEN.plain}", error, raising=False)
    return document


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces torch's recorders."""
    return lambda *recorders: monkeypatch.setattr(torch_api, "_recorders", lambda: recorders)


class Failures(list[tuple[str, BaseException]]):
    def report(self, where: str, error: BaseException) -> None:
        self.append((where, error))


@pytest.fixture
def failures() -> Failures:
    return Failures()


READINGS = {"with stacks": read_with_stacks, "without": read_without_stacks}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_failed_recorder_is_reported_and_the_others_are_read(read, functions, recorders, failures, monkeypatch):
    recorders(BROKEN, ABSENT, GOOD)

    assert {"good": [entry(1), entry(2)]} == read(failures.report)
    assert ["reading the flight record of broken"] == [where for where, _ in failures]
    assert "unspecified launch failure" in str(failures[0][1])
    monkeypatch.setattr(torch_private, "c10d", lambda: None)  # torch without recorders
    recorders(CPU, NCCL)
    assert {} == read(failures.report)
    assert 1 == len(failures)


def test_installed_torch_is_read_without_a_process_group():
    """In a separate process, because the record of this process contains groups of other tests."""
    ended = run_program(
        "from rankscope_exporter.monitors.flight_recorder.torch_api import read_with_stacks, read_without_stacks\n"
        "failures = []\n"
        "def report(*failure): failures.append(failure)\n"
        "print(read_with_stacks(report), read_without_stacks(report), failures)"
    )

    assert "{} {} []" == ended.stdout.strip(), ended.stderr


def test_entry_without_a_needed_field_is_skipped_and_reported(functions, recorders, failures):
    recorders(GOOD)
    functions["entries"].append({name: value for name, value in entry(3).items() if name != "process_group"})

    assert [1, 2] == [raw["record_id"] for raw in read_without_stacks(failures.report)["good"]]
    assert "1 of 3 entries" in str(failures[0][1])


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("called",)


def test_pickled_record_cannot_call_or_import_anything(functions, recorders, failures, capsys):
    recorders(GOOD)
    functions["entries"] = [Harmful()]

    assert {} == read_with_stacks(failures.report)
    assert "a flight record must not contain" in str(failures[0][1])
    assert "" == capsys.readouterr().out


# Captures of graphs.


NAMES = {"name": "device", "with_stacks": "test_device", "plain": "test_device", "handler": "test_none"}
DEVICE = TorchRecorder(**NAMES, asks_device=True)


@pytest.fixture
def on_a_device(monkeypatch):
    monkeypatch.setattr(tracing, "device_in_use", lambda: -1)


def test_device_is_queried_in_the_relaxed_capture_mode(on_a_device, recorders, failures, monkeypatch):
    """The previous mode of the thread is restored."""
    runtime, seen = CaptureRuntime(), []
    monkeypatch.setattr(tracing, "exchange_of_modes", lambda: runtime.exchange)
    monkeypatch.setattr(C10D, f"_dump_{DEVICE.plain}", lambda *_: seen.append(runtime.mode) or "{}", raising=False)
    recorders(DEVICE)
    read_without_stacks(failures.report)

    assert ([2], [2, 0], []) == (seen, runtime.modes, failures)


@pytest.mark.parametrize(("is_urgent", "names"), [(True, {"device", "good"}), (False, {"good"})])
def test_device_without_that_mode_is_queried_only_for_a_hang(
    is_urgent, names, on_a_device, functions, recorders, failures, monkeypatch
):
    """The other recorder is always read."""
    monkeypatch.setattr(tracing, "exchange_of_modes", lambda: None)
    monkeypatch.setattr(C10D, f"_dump_{DEVICE.plain}", getattr(C10D, f"_dump_{GOOD.plain}"), raising=False)
    recorders(DEVICE, GOOD)

    assert names == set(read_without_stacks(failures.report, is_urgent=is_urgent))
    assert [] == [where for where, error in failures if is_urgent or "graph captures" not in str(error)]


# NCCL dumps.

NOW = 1_764_036_000.1


def of_record(entries: Any) -> dict[str, Any]:
    record = read_flight_record(entries, "hang", NOW, {"0": (0, 1, 2, 3), "1": (0, 2), "2": (0, 1)})
    return {
        "pending": str(record.pending),
        "age": record.pending.age_seconds,
        "latest": str(record.latest),
        "under way": [item.op for item in record.collectives if item.is_pending],
        "groups": [(group.id, group.ranks, group.latest_seq) for group in record.groups],
    }


RECORD = {
    "pending": "all_reduce seq 12 (nccl, default_pg, Float scalar)",
    "age": 0.08,
    "latest": "recv 0<-1 seq 8 (nccl, mesh_pp, BFloat16 8x512)",
    "under way": ["all_reduce", "recv 0<-1"],
    "groups": [("1", "0,2", 41), ("0", "0-3", 12)],
}


def test_pickled_nccl_dump_is_read_with_stacks(recorders, failures, monkeypatch):
    recorders(NCCL)
    monkeypatch.setattr(
        C10D, f"_dump_{NCCL.with_stacks}", lambda *_: (DATA / "nccl_dump.pickle").read_bytes(), raising=False
    )
    entries = read_with_stacks(failures.report)["nccl"]

    assert RECORD == of_record(entries)
    assert [88, 91, 97, 103, 110] == [raw["frames"][-1]["line"] for raw in entries]
    assert [] == failures


SERVER = """
import json, os, sys, threading
import torch, torch.distributed as dist
from rankscope_exporter.monitors.flight_recorder import torch_api
from rankscope_exporter.monitors.flight_recorder.torch_api import CPU, TorchRecorder, register_handler
c10d = torch._C._distributed_c10d
free = threading.Event()

def answers(request, response):
    response.set_content(open(DUMP).read(), "application/json")

def hangs(request, response):
    free.wait()
    answers(request, response)

def fails(request, response):
    raise ValueError("no such device")

for handler in (answers, hangs, fails):
    register_handler(handler.__name__, handler)

def device(handler, plain="none"):
    return TorchRecorder(name="nccl", with_stacks="none", plain=plain, handler=handler, asks_device=True)

failures = []

def read(*recorders, seconds=60.0):
    torch_api.ANSWER_SECONDS, torch_api._recorders = seconds, lambda: recorders
    found = torch_api.read_without_stacks(lambda *what: failures.append(what))
    return {name: [raw["profiling_name"] for raw in entries] for name, entries in found.items()}

def failed():
    reported = [[where, type(error).__name__, str(error)] for where, error in failures]
    failures.clear()
    return reported

def join():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))
"""

OF_GLOO = {"cpu": ["gloo:all_reduce"]}
OF_NCCL = ["_all_gather_base", "send 0->1", "_reduce_scatter_base", "all_reduce", "recv 0<-1"]
OF_BOTH = OF_GLOO | {"nccl": [f"nccl:{op}" for op in OF_NCCL]}
WHERE = "reading the flight record of nccl"


def run_server(code: str) -> Any:
    """Run `code` in another process, since a worker server runs until its process exits; return the printed JSON."""
    done = run_program((SERVER + code).replace("DUMP", repr(str(DATA / "nccl_dump.json"))))

    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def test_nccl_dump_is_read_through_the_worker_server_also_in_a_child():
    record, status, failed = run_server("""
torch_api._recorders = lambda: [device("answers")]
found = torch_api.read_without_stacks(lambda *what: failures.append(what))["nccl"]
pid = os.fork()
if pid == 0:
    again = torch_api.read_without_stacks(lambda *what: failures.append(what))
    os._exit(0 if again == {"nccl": found} and not failures else 1)
print(json.dumps([found, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), failed()]))
""")

    assert (RECORD, 0, []) == (of_record(record) | {"groups": RECORD["groups"]}, status, failed)


def test_hanging_device_blocks_only_its_own_record():
    """The device is queried again after it has responded; until then it blocks only one thread of the server.

    The process exits although another query hangs.
    """
    results = run_server("""
join()
read(device("answers"))  # starts all threads of the server
first = read(device("hangs"), CPU, seconds=0.1)
threads = len(os.listdir("/proc/self/task"))
again = [read(CPU, device("answers"), seconds=0.05) for _ in range(20)]
grown = len(os.listdir("/proc/self/task")) - threads
hung = failed()
free.set()
print(json.dumps([first, again, grown, hung, read(CPU, device("answers")), failed()]))
free.clear()
read(device("hangs"), seconds=0.1)
""")
    first, again, grown, hung, later, failed = results

    assert (OF_GLOO, [OF_GLOO] * 20, 0) == (first, again, grown)
    assert {(WHERE, "TimeoutError")} == {(where, kind) for where, kind, _ in hung}
    assert (OF_BOTH, []) == (later, failed)


def test_function_is_called_if_the_handler_fails():
    results = run_server("""
c10d._dump_test = lambda *_: open(DUMP).read()
both = read(device("fails", "test")), failed()
print(json.dumps([*both, read(device("fails")), failed()]))
""")
    found, nothing, none, failures = results

    assert ({"nccl": OF_BOTH["nccl"]}, [], {}) == (found, nothing, none)
    assert [[WHERE, "RuntimeError"]] == [failure[:2] for failure in failures]
    assert "ValueError: no such device" in failures[0][2]


def test_server_is_not_started_without_free_threads():
    """Torch would abort the process."""
    results = run_server("""
import resource
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20),) * 2)
print(json.dumps([read(device("answers")), failed()]))
""")

    assert {} == results[0]
    assert [[WHERE, "RuntimeError", "the process cannot start the threads of torch's worker server"]] == results[1]


def test_dumps_of_the_tests_have_the_fields_of_torch():
    """Gloo's recorder uses the same code of torch; only entries of a timed device have a duration."""
    of_torch = run_server("""
import pickle
from rankscope_exporter.monitors.flight_recorder.torch_api import prepare_stacks
import torch._dynamo
prepare_stacks()
join()
plain, stacks = json.loads(c10d._dump_fr_trace_json(True, False)), pickle.loads(c10d._dump_fr_trace(True, True, False))
print(json.dumps([
    [sorted(document), sorted(document["entries"][0]), sorted(next(iter(document["pg_status"].values())))]
    for document in (plain, stacks)
] + [plain["version"]]))
""")
    by_hand = [
        json.loads((DATA / "nccl_dump.json").read_text()),
        pickle.loads((DATA / "nccl_dump.pickle").read_bytes()),
    ]

    assert of_torch == [
        [sorted(dump), sorted(dump["entries"][3]), sorted(dump["pg_status"]["0"])] for dump in by_hand
    ] + [by_hand[0]["version"]]


NCCL_ENTRY = {
    "record_id": 12, "pg_id": 3, "process_group": ("17", "mesh_dp"), "collective_seq_id": 41, "p2p_seq_id": 0,
    "op_id": 50, "profiling_name": "nccl:_all_gather_base", "time_created_ns": 1_700_000_000_123_456_789,
    "input_sizes": [[4, 5]], "input_dtypes": ["BFloat16"], "output_sizes": [[8, 5]], "output_dtypes": ["BFloat16"],
    "state": "completed", "time_discovered_started_ns": 1, "time_discovered_completed_ns": 2, "duration_ms": 1.25,
    "retired": True, "timeout_ms": 600000, "is_p2p": False, "frames": [],
}  # fmt: skip
"""As torch's documentation and source have it; no GPU wrote it."""


def row(**changes: Any) -> dict[str, Any]:
    return row_of({**NCCL_ENTRY, **changes}, {"17": (0, 1, 4)})


def test_nccl_entry_has_its_duration_on_the_device():
    assert {
        "step": None, "call_seq": None, "op": "_all_gather_base", "group": "mesh_dp", "group_size": 3, "bytes": 80,
        "dtype": "bfloat16", "call_site": None, "t_start": 1_700_000_000_123_456, "duration": 0.00125,
        "collective_seq": 41, "group_id": "17", "group_ranks": "0-1,4", "state": "left", "backend": "nccl",
        "is_p2p": False,
    } == row()  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"duration_ms": None}, {"state": "left", "duration": None}),
        # NCCL sets `completed` before its watchdog retires the entry, and gloo sets no other state than `scheduled`.
        ({"retired": False}, {"state": "left", "duration": 0.00125}),
        ({"retired": False, "state": "started", "duration_ms": None}, {"state": "entered", "duration": None}),
        ({"state": "scheduled", "duration_ms": None}, {"state": "left", "duration": None}),
        (
            {"profiling_name": "nccl:send 0->1", "is_p2p": True, "p2p_seq_id": 6},
            {"op": "send", "collective_seq": 6, "is_p2p": True},
        ),
        ({"process_group": ("9", "destroyed")}, {"group_size": None, "group_ranks": None, "group": "destroyed"}),
    ],
)
def test_row_of_an_entry_with_other_fields(changes, found):
    assert found.items() <= row(**changes).items()


def frame(file: str, line: int) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": "f"}


def test_call_site_is_the_innermost_frame_of_the_script(monkeypatch):
    torchs = frame(str(Path(torch.__file__).parent / "distributed" / "c10d_logger.py"), 83)
    ours = frame(torch_api.__file__, 3)
    module = type(sys)("model.parts.loss")
    module.__file__, module.__package__ = "/job/code/model/parts/loss.py", "model.parts"
    monkeypatch.setitem(sys.modules, "model.parts.loss", module)

    assert "train.py[88]" == call_site([torchs, ours, frame("/job/code/train.py", 88), frame("/job/x.py", 1)])
    assert "model/parts/loss.py[7]" == call_site([torchs, frame("/job/code/model/parts/loss.py", 7)])
    assert None is call_site([torchs])
    assert None is call_site([])


NOW_NS = 1000.0


def entry_of(seq: int, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": seq, "p2p_seq_id": 0, "is_p2p": False, "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 5]], "input_dtypes": ["BFloat16"],
        "state": "completed", "retired": True, "time_created_ns": int((NOW_NS - 100 + seq) * 1e9), **more,
    }  # fmt: skip


def test_summary_distinguishes_pending_and_finished_entries():
    """NCCL sets `completed` before its watchdog retires the entry; gloo sets only `scheduled`."""
    record = read_flight_record(
        [
            entry_of(1),
            entry_of(2, retired=False),
            entry_of(3, retired=True, state="scheduled"),
            entry_of(4, retired=False, state="started"),
            entry_of(5, retired=False, state="scheduled", process_group=["7", "undefined"]),
            entry_of(
                0, is_p2p=True, p2p_seq_id=6, profiling_name="nccl:send 0->1", time_created_ns=int((NOW_NS - 1) * 1e9)
            ),
        ],
        "hang",
        NOW_NS,
    )

    assert [(1, False), (2, False), (3, False), (4, True), (5, True), (6, False)] == [
        (item.seq, item.is_pending) for item in record.collectives
    ]
    assert "all_reduce seq 4 (nccl, default_pg, BFloat16 4x5)" == str(record.pending)
    assert 96.0 == record.pending.age_seconds
    assert ("7", "send 0->1") == (record.collectives[4].group, record.collectives[5].op)


def test_oldest_pending_entry_is_kept():
    record = read_flight_record(
        [entry_of(0, retired=False, state="started"), *map(entry_of, range(1, 90))], "hang", NOW_NS
    )

    assert (0, KEPT, 90) == (record.pending.seq, len(record.collectives), record.recorded)
    assert 89 == record.latest.seq


def test_summary_fits_the_size_limit_of_an_event():
    wide = {"input_sizes": [[7] * 4] * 300, "input_dtypes": ["Float"] * 300}
    record = read_flight_record(
        [entry_of(0, retired=False, **wide), *(entry_of(i, **wide) for i in range(1, 90))], "x", NOW_NS
    )

    assert len(record.to_json().encode()) <= MAX_DETAILS_BYTES


def test_process_without_groups_has_no_flight_record():
    assert None is take_flight_record("call", lambda *_: None)
