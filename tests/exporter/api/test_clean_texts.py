"""Secrets and long texts in each text that a training gives to the monitor, and a search in all that a rank writes."""

from __future__ import annotations

import urllib.request
from dataclasses import replace

import pyarrow as pa
import torch
from torch import nn

from rankscope_contract.model.redaction import MAX_NAME, MAX_TEXT
from rankscope_contract.model.schema import Plan
from rankscope_exporter import Monitor

LONG = "x" * 100_000
ENTRANCES = (
    *("run", "scalar", "key", "event", "details", "key of details", "phase", "setting", "argument", "exception"),
    *("header", "environment"),
)


def secret(entrance: str) -> str:
    return f"pw{ENTRANCES.index(entrance):02}sEcret1"


def url(entrance: str) -> str:
    return f"https://bob:{secret(entrance)}@host/x"


def trained(monitor: Monitor) -> BaseException:
    model = nn.Sequential()
    for end in "ab":
        model.add_module(f"{LONG}{end}", nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    monitor.attach(model, optimizer)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        monitor.log(**{url("scalar"): 1.0, "loss": {url("key"): 2.0}, f"{LONG}a": 1.0, f"{LONG}b": 2.0})
    with monitor.phase(url("phase")):
        monitor.event("note", f"password={secret('event')} {LONG}", of=url("details"), **{url("key of details"): 1})
    return ValueError(f"{url('exception')} Authorization: Bearer {secret('header')} {LONG}")


def pages(monitor: Monitor) -> str:
    found = [urllib.request.urlopen(f"{monitor.address}{path}", timeout=10).read() for path in ("/metrics", "/config")]
    return b"".join(found).decode()


def test_no_secret_and_no_long_text_of_a_training_leaves_its_rank(tmp_path, quiet, reader, monkeypatch, caplog, capfd):
    monkeypatch.setattr("rankscope_contract.model.redaction._cut", [])  # it is logged once for each process
    monkeypatch.setattr("sys.argv", ["train.py", "--password", secret("argument")])
    monkeypatch.setenv("HOSTNAME", f"https://a:{secret('environment')}@host")
    sinks = {name: {"folder": str(tmp_path / name)} for name in ("tensorboard", "csv")}
    hyper = {"api_key": secret("setting"), "text": LONG}
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", str(tmp_path / "records"))
    config = replace(quiet, console=True, sinks=sinks, run=url("run"), hyperparameters=hyper)
    monitor = Monitor(config)
    error = trained(monitor)
    rank = reader(monitor)
    records, shown = rank.records(), pages(monitor)
    monitor.__exit__(type(error), error, None)
    spooled = [pa.ipc.open_stream(path).read_all().to_pylist() for path in (tmp_path / "records").rglob("*.arrows")]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = "".join(path.read_bytes().decode("latin-1") + str(path) for path in files)
    texts = [repr(records), repr(spooled), shown, written, caplog.text, *capfd.readouterr()]

    assert [] == [(name, place) for name in ENTRANCES for place, text in enumerate(texts) if secret(name) in text]
    assert [] == [place for place, text in enumerate(texts) if LONG[: MAX_TEXT + 1] in text]
    events = [event for part in spooled for record in part for event in record["events"] or ()]
    assert "exception: ValueError: https://***@host/x Authorization: Bearer *** xxx" in repr(events)
    assert "… (100,077 characters)" in next(event["message"] for event in events if event["type"] == "exit")
    plans = [Plan.from_json(path.read_text()) for path in (tmp_path / "records").rglob("plan-*.json")]
    names = {entry.tensor for plan in plans for entry in plan.entries}
    assert 4 == len(names)  # two weights and two biases, whose long names differ at the end
    logged = {scalar["name"] for part in spooled for record in part for scalar in record["scalars"] or ()}
    assert 2 == len([name for name in logged if name.startswith("xxx")])
    assert "https://***@host/x" in logged
    assert MAX_NAME == max(map(len, names | logged))
    assert 1 == caplog.text.count("Rankscope cuts a text of 100,001 characters")
