"""Entries of torch's record in the terms of the store: as gloo and as NCCL write them; none has anything called."""

from __future__ import annotations

import ctypes
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope_exporter.collectives import flight
from rankscope_exporter.collectives.entries import Entry, call_site

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


def test_an_entry_of_nccl_has_the_time_that_it_took_on_the_device():
    assert {
        "step": 7, "call_seq": 2, "op": "_all_gather_base", "group": "mesh_dp", "group_size": 3, "bytes": 80,
        "dtype": "bfloat16", "call_site": None, "t_start": 1_700_000_000_123_456, "duration": 0.00125,
        "collective_seq": 41, "group_id": "17", "group_ranks": "0-1,4", "state": "left", "backend": "nccl",
        "is_p2p": False,
    } == row()  # fmt: skip


def test_a_message_is_numbered_among_those_of_its_two_ranks():
    told = row(profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=6)

    assert ("send", 6, True) == (told["op"], told["collective_seq"], told["is_p2p"])


@pytest.mark.parametrize(
    ("changes", "state", "duration"),
    [
        ({"duration_ms": None}, "left", None),
        ({"retired": False}, "left", 0.00125),  # NCCL says completed before its watchdog retires the entry
        ({"retired": False, "state": "started", "duration_ms": None}, "entered", None),
        ({"state": "scheduled", "duration_ms": None}, "left", None),  # gloo never says more
    ],
)
def test_what_is_not_said_is_null(changes, state, duration):
    told = row(**changes)

    assert (state, duration) == (told["state"], told["duration"])


def test_a_group_that_torch_no_longer_knows_has_no_ranks():
    told = Entry.of(NCCL, {}).row(None, None)

    assert (None, None, "mesh_dp") == (told["group_size"], told["group_ranks"], told["group"])


def frame(file: str, line: int) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": "f"}


def test_the_call_site_is_the_innermost_place_that_is_neither_torchs_nor_ours(monkeypatch):
    torchs = frame(str(Path(torch.__file__).parent / "distributed" / "c10d_logger.py"), 83)
    ours = frame(flight.__file__, 3)
    module = type(sys)("model.parts.loss")
    module.__file__, module.__package__ = "/job/code/model/parts/loss.py", "model.parts"
    monkeypatch.setitem(sys.modules, "model.parts.loss", module)

    assert "train.py[88]" == call_site([torchs, ours, frame("/job/code/train.py", 88), frame("/job/x.py", 1)])
    assert "model/parts/loss.py[7]" == call_site([torchs, frame("/job/code/model/parts/loss.py", 7)])
    assert None is call_site([torchs])
    assert None is call_site([])


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("called",)


@pytest.mark.parametrize("thing", [Harmful(), torch.float32, {1, 2, 3}.__class__])
def test_nothing_that_a_record_names_is_ever_called_or_imported(thing, capsys, monkeypatch):
    monkeypatch.setattr(flight, "_functions", lambda _names: {"cpu": lambda *_: pickle.dumps({"entries": [thing]})})
    with pytest.raises(pickle.UnpicklingError, match="a flight record holds no"):
        flight.read_with_stacks()

    assert "" == capsys.readouterr().out


def test_plain_content_is_read_and_put_in_order(monkeypatch):
    entries = [{"record_id": 2, "frames": []}, {"record_id": 1, "frames": [{"line": 3}]}]
    monkeypatch.setattr(flight, "_functions", lambda _names: {"cpu": lambda *_: pickle.dumps({"entries": entries})})

    assert {"cpu": entries[::-1]} == flight.read_with_stacks()


def test_a_torch_without_a_record_has_none(monkeypatch):
    monkeypatch.setattr(flight, "_c10d", lambda: None)

    assert ({}, {}) == (flight.read_with_stacks(), flight.read_without_stacks())


def test_where_the_debug_server_answers_with_an_error_torchs_function_is_asked(monkeypatch):
    entries = [{"record_id": 1}]
    monkeypatch.setattr(flight, "_unlocked", lambda: {"cpu": "fr_trace_json"})
    monkeypatch.setattr(flight, "_answer_of", lambda _handler: "no such thing")
    monkeypatch.setattr(flight, "_functions", lambda _names: {"cpu": lambda *_: json.dumps({"entries": entries})})

    assert {"cpu": entries} == flight.read_without_stacks()


class Runtime:
    """A double of a device's runtime, which keeps the mode in which a thread meets captures of graphs."""

    def __init__(self) -> None:
        self.mode, self.modes = 0, []

    def exchange(self, wanted: Any) -> int:
        mode = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, mode.value = mode.value, self.mode
        self.modes.append(self.mode)
        return 0


@pytest.fixture
def on_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(flight, "_unlocked", dict)


def test_a_capture_of_another_thread_is_not_spoiled(on_a_device, monkeypatch):
    """The device is asked in the relaxed mode, and the thread gets its own back."""
    runtime, seen = Runtime(), []
    monkeypatch.setattr(flight, "_exchange_of_modes", lambda: runtime.exchange)
    dump = json.dumps({"entries": []})
    monkeypatch.setattr(flight, "_functions", lambda _names: {"cpu": lambda *_: seen.append(runtime.mode) or dump})
    flight.read_without_stacks()

    assert ([2], [2, 0]) == (seen, runtime.modes)


def test_without_a_way_to_say_so_only_a_hang_has_the_device_asked(on_a_device, monkeypatch):
    monkeypatch.setattr(flight, "_exchange_of_modes", lambda: None)
    monkeypatch.setattr(flight, "_functions", lambda _names: {"cpu": lambda *_: '{"entries": []}'})

    assert {} == flight.read_without_stacks(is_urgent=True)
    with pytest.raises(RuntimeError, match="captures of graphs"):
        flight.read_without_stacks()
