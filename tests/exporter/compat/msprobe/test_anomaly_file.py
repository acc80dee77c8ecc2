"""Tests of `anomaly.json`: msprobe's format, complete after every step, whatever happens to the file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_exporter import ConfigError, MonitorConfig
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks import csv_msprobe
from rankscope_exporter.sinks.csv_msprobe import Anomalies, AnomalyOptions
from rankscope_ingest.importers.common.importer import Faults
from rankscope_ingest.importers.msprobe.json_files import read_anomalies

RECORDED = Path(__file__).parents[3] / "data/msprobe/single_rank/anomaly_detected/rank0/anomaly.json"


def sink(folder: Path, rank: int = 3) -> Anomalies:
    return Anomalies(
        AnomalyOptions(folder=str(folder)),
        Identity(run="r", launch_id="l", rank=rank, world_size=4, incarnation="5eed5eed" * 4),
    )


def anomaly(tensor: str = "head.weight", **others: Any) -> Event:
    told = {"kind": "grad_reduced", "op": "norm", "rule": "AnomalyTurbulence", "value": 3.0, "baseline": 1.5}
    return Event(type=EventType.ANOMALY, tensor=tensor, **{**told, "call_id": 7, **others})


def record(step: int | None, *events: Event) -> StepRecord:
    return StepRecord(ts=0, step=step, events=events)


def read(folder: Path, rank: int = 3) -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = json.loads((folder / f"anomaly_detected/rank{rank}/anomaly.json").read_text())
    return document


def test_entry_has_msprobes_fields_key_and_message(tmp_path):
    sink(tmp_path).put(record(5, anomaly()))
    (key, entry), = read(tmp_path).items()  # fmt: skip
    name = "0:head.weight/rank3/post_grad"

    assert list(next(iter(json.loads(RECORDED.read_text()).values()))) == list(entry)
    assert f"{name}_step_4_call_7" == key
    place = {"rank": 3, "step": 4, "micro_step": 0, "pp_stage": 3, "vpp_stage": 0, "call_id": 7}
    signal = f"Rule AnomalyTurbulence reports anomaly signal in ('{name}', 'norm') at step 4"
    message = f"{signal}, current value 3.0, history mean 1.5."
    sink(tmp_path).put(record(1, *(anomaly(op=op) for op in ("norm", "mean", "norm"))))
    assert ["norm", "mean", "norm"] == [entry["message"].split("'")[3] for entry in read(tmp_path).values()]
    assert {**place, "tag_name": name, "message": message, "group_mates": [0, 1, 2, 3]} == entry


def test_importer_restores_the_anomalies(tmp_path):
    found = [
        (2, anomaly("layers.0", kind="act_out", micro_step=1, op="nans", rule="AnomalyNan", baseline=None)),
        (3, anomaly("w", kind="exp_avg")),
        (3, anomaly("w", kind="param_after", call_id=None)),
    ]
    written = sink(tmp_path)
    for step, event in found:
        written.put(record(step, event))
    back = list(read_anomalies(tmp_path / "anomaly_detected/rank3/anomaly.json", Faults(), attempt=0, source="x"))
    rows = [(item.step, item.micro_step, item.rows["events"][0]) for item in back]

    assert [(step, event.micro_step, event.kind, event.tensor, event.op, event.rule, event.call_id)
            for step, event in found] == [
        (step, micro, row["kind"], row["tensor"], row["op"], row["rule"], row["call_id"]) for step, micro, row in rows
    ]  # fmt: skip
    assert math.isnan(rows[0][2]["baseline"])


def test_file_is_complete_after_every_step_and_replaced_by_a_new_run(tmp_path):
    first = sink(tmp_path)
    for step in range(1, 6):
        first.put(record(step, anomaly(), anomaly("b")))
        first.put(record(step))
        assert 2 * step == len(read(tmp_path))
    second = sink(tmp_path)
    second.put(record(1))

    assert not list(tmp_path.rglob("anomaly.json"))
    second.put(record(2, anomaly()))
    assert 1 == len(read(tmp_path))

    (tmp_path / "anomaly_detected/rank3/anomaly.json").unlink()
    second.put(record(3, anomaly()))
    assert [2] == [entry["step"] for entry in read(tmp_path).values()]


def test_partial_write_leaves_the_file_complete(tmp_path, monkeypatch):
    written = sink(tmp_path)
    written.put(record(1, anomaly()))
    pwrite, sizes = os.pwrite, iter([20])
    monkeypatch.setattr(os, "pwrite", lambda handle, data, place: pwrite(handle, data[: next(sizes, None)], place))
    with pytest.raises(OSError, match="20 of"):
        written.put(record(2, anomaly()))
    assert [0] == [entry["step"] for entry in read(tmp_path).values()]

    written.put(record(3, anomaly()))
    assert [0, 2] == [entry["step"] for entry in read(tmp_path).values()]


def test_file_size_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_msprobe, "MOST_BYTES", 600)
    written = sink(tmp_path)
    written.put(record(1, anomaly()))
    with pytest.raises(OSError, match="limit of"):
        written.put(record(2, anomaly()))

    assert 1 == len(read(tmp_path))


def test_events_without_a_tensor_are_omitted_and_any_name_is_a_valid_key(tmp_path):
    without = (Event(type=EventType.NOTE), anomaly(None, op="loss"), anomaly(kind=None))  # type: ignore[arg-type]
    sink(tmp_path).put(record(1, *without))
    assert not list(tmp_path.iterdir())

    sink(tmp_path).put(record(1, anomaly('a"b\\c\n☃\ud800')))
    assert 1 == len(read(tmp_path))


def test_invalid_folder_is_rejected():
    with pytest.raises(ConfigError, match=r"sinks\.anomalies: folder must be a path, not 3"):
        MonitorConfig(sinks={"anomalies": {"folder": 3}})
