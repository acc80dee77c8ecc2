"""Entries of torch's flight record from gloo and NCCL, converted to rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope_exporter.monitors.flight_recorder import torch_api
from rankscope_exporter.monitors.flight_recorder.entry import Entry, call_site

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
