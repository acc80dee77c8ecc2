"""The summary of torch's flight record: of two real ranks on gloo, and of NCCL entries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.programs import warm_processes

from rankscope_contract.diagnostics.stacks import MAX_DETAILS_BYTES, FlightRecord
from rankscope_exporter.monitors.flight_recorder.entry import KEPT, read_flight_record, take_flight_record

NOW = 1000.0


def entry(seq: int, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 5]],
        "input_dtypes": ["BFloat16"],
        "state": "completed",
        "retired": True,
        "time_created_ns": int((NOW - 100 + seq) * 1e9),
        **more,
    }


def test_summary_distinguishes_pending_and_finished_entries():
    """NCCL sets `completed` before its watchdog retires the entry; gloo sets only `scheduled`."""
    record = read_flight_record(
        [
            entry(1),
            entry(2, retired=False),
            entry(3, retired=True, state="scheduled"),
            entry(4, retired=False, state="started"),
            entry(5, retired=False, state="scheduled", process_group=["7", "undefined"]),
            entry(0, is_p2p=True, p2p_seq_id=6, profiling_name="nccl:send 0->1", time_created_ns=int((NOW - 1) * 1e9)),
        ],
        "hang",
        NOW,
    )

    assert [(1, False), (2, False), (3, False), (4, True), (5, True), (6, False)] == [
        (item.seq, item.is_pending) for item in record.collectives
    ]
    assert "all_reduce seq 4 (nccl, default_pg, BFloat16 4x5)" == str(record.pending)
    assert 96.0 == record.pending.age_seconds
    assert ("7", "send 0->1") == (record.collectives[4].group, record.collectives[5].op)


def test_oldest_pending_entry_is_kept():
    record = read_flight_record([entry(0, retired=False, state="started"), *map(entry, range(1, 90))], "hang", NOW)

    assert (0, KEPT, 90) == (record.pending.seq, len(record.collectives), record.recorded)
    assert 89 == record.latest.seq


def test_summary_fits_the_size_limit_of_an_event():
    wide = {"input_sizes": [[7] * 4] * 900, "input_dtypes": ["Float"] * 900}
    record = read_flight_record([entry(0, retired=False, **wide), *(entry(i, **wide) for i in range(1, 90))], "x", NOW)

    assert len(record.to_json().encode()) <= MAX_DETAILS_BYTES


def unexpected(where: str, error: BaseException) -> None:
    raise AssertionError(f"{where}: {error!r}")


def test_process_without_groups_has_no_flight_record():
    assert None is take_flight_record("call", unexpected)


def record_once(is_as_wanted: Callable[[FlightRecord], bool]) -> FlightRecord | None:
    """Return the first record that satisfies the condition, or the last one after 60 s."""
    deadline = time.monotonic() + 60
    while (record := take_flight_record("hang", unexpected)) is None or not is_as_wanted(record):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return record


def work(rank: int, store: str, results: Any, is_waiting: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tensor = torch.ones(4, 5)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()

    def tell() -> None:
        results.put((0, record_once(lambda record: record.pending is not None and record.pending.seq == 5)))
        is_waiting.set()

    looking = threading.Thread(target=tell)
    if rank == 0:
        looking.start()
    else:  # the other rank waits for this rank
        is_waiting.wait(90)
        results.put((1, record_once(lambda record: record.pending is None)))
    dist.all_reduce(tensor)
    if rank == 0:
        looking.join()
    dist.barrier()
    dist.destroy_process_group()


def test_records_of_two_gloo_ranks_show_the_waiting_rank(tmp_path):
    context = warm_processes()
    results, is_waiting = context.Queue(), context.Event()
    ranks = [
        context.Process(target=work, args=(rank, str(tmp_path / "store"), results, is_waiting)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    records = dict(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(60)

    assert [0, 0] == [rank.exitcode for rank in ranks]
    assert "all_reduce seq 5 (gloo, default_pg, Float 4x5)" == str(records[0].pending)
    assert None is records[1].pending
    assert ("barrier", 4) == (records[1].latest.op, records[1].latest.seq)
    assert 0 <= records[0].pending.age_seconds < 60
