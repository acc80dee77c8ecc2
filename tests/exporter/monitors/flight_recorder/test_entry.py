"""Entries of torch's flight record from gloo and NCCL, converted to rows, and their summary for a hang."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope_contract.diagnostics.stacks import MAX_DETAILS_BYTES
from rankscope_exporter.monitors.flight_recorder import torch_api
from rankscope_exporter.monitors.flight_recorder.entry import (
    KEPT,
    Entry,
    call_site,
    read_flight_record,
    take_flight_record,
)

NCCL = {
    "record_id": 12, "pg_id": 3, "process_group": ("17", "mesh_dp"), "collective_seq_id": 41, "p2p_seq_id": 0,
    "op_id": 50, "profiling_name": "nccl:_all_gather_base", "time_created_ns": 1_700_000_000_123_456_789,
    "input_sizes": [[4, 5]], "input_dtypes": ["BFloat16"], "output_sizes": [[8, 5]], "output_dtypes": ["BFloat16"],
    "state": "completed", "time_discovered_started_ns": 1, "time_discovered_completed_ns": 2, "duration_ms": 1.25,
    "retired": True, "timeout_ms": 600000, "is_p2p": False, "frames": [],
}  # fmt: skip
"""As torch's documentation and source have it; no GPU wrote it."""


def row(**changes: Any) -> dict[str, Any]:
    return Entry.of({**NCCL, **changes}, {"17": (0, 1, 4)}).row(7, 2)


def test_nccl_entry_has_its_duration_on_the_device():
    assert {
        "step": 7, "call_seq": 2, "op": "_all_gather_base", "group": "mesh_dp", "group_size": 3, "bytes": 80,
        "dtype": "bfloat16", "call_site": None, "t_start": 1_700_000_000_123_456, "duration": 0.00125,
        "collective_seq": 41, "group_id": "17", "group_ranks": "0-1,4", "state": "left", "backend": "nccl",
        "is_p2p": False,
    } == row()  # fmt: skip


def test_point_to_point_entry_has_the_number_of_its_pair():
    result = row(profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=6)

    assert ("send", 6, True) == (result["op"], result["collective_seq"], result["is_p2p"])


@pytest.mark.parametrize(
    ("changes", "state", "duration"),
    [
        ({"duration_ms": None}, "left", None),
        ({"retired": False}, "left", 0.00125),  # NCCL sets `completed` before its watchdog retires the entry
        ({"retired": False, "state": "started", "duration_ms": None}, "entered", None),
        ({"state": "scheduled", "duration_ms": None}, "left", None),  # gloo sets no other state
    ],
)
def test_missing_fields_are_null(changes, state, duration):
    result = row(**changes)

    assert (state, duration) == (result["state"], result["duration"])


def test_destroyed_group_has_no_ranks():
    result = Entry.of(NCCL, {}).row(None, None)

    assert (None, None, "mesh_dp") == (result["group_size"], result["group_ranks"], result["group"])


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


NOW = 1000.0


def entry(seq: int, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": seq, "p2p_seq_id": 0, "is_p2p": False, "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 5]], "input_dtypes": ["BFloat16"],
        "state": "completed", "retired": True, "time_created_ns": int((NOW - 100 + seq) * 1e9), **more,
    }  # fmt: skip


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
    wide = {"input_sizes": [[7] * 4] * 300, "input_dtypes": ["Float"] * 300}
    record = read_flight_record([entry(0, retired=False, **wide), *(entry(i, **wide) for i in range(1, 90))], "x", NOW)

    assert len(record.to_json().encode()) <= MAX_DETAILS_BYTES


def test_process_without_groups_has_no_flight_record():
    assert None is take_flight_record("call", lambda *_: None)
