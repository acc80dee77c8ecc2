"""Real runs with usual schedules: a drawn spike, jump or NaN reaches a webhook, and a healthy run gives no event."""

import json
import random

import pytest
from tests.end_to_end.conftest import Service
from tests.programs import run_command, run_program

from rankscope.demo.receiver import AlertReceiver
from rankscope.up.machine import free_port
from rankscope_storage.connection import connect

STEPS = 90
TRAINING = """
import math, os, random, torch
from rankscope_exporter import Monitor
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=30)
rest = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, rest], [30])
noise = random.Random(5)
with Monitor({"run": "RUN"}).attach(model, optimizer) as monitor:
    for step in range(1, 91):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        if step == AT and "RUN" == "jump-run":
            optimizer.param_groups[0]["lr"] = 0.02
        optimizer.step()
        if not (step == AT and "RUN" == "jump-run"):
            schedule.step()
        loss = 2 + 8 * math.exp(-step / 12) + 0.3 * noise.random()
        monitor.log(loss=loss * FACTOR if step == AT else loss)
"""


RUNS = {"healthy-run": "1", "spike-run": "6", "jump-run": "1", "nan-run": "math.nan"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train the runs with one service; yield the store, the step of the fault, and the titles of the messages."""
    folder, step = tmp_path_factory.mktemp("spike"), random.randint(20, STEPS - 15)
    with AlertReceiver() as receiver:
        service = Service(folder, free_port(), urls=(receiver.notify_url,))
        service.start()
        for run, factor in RUNS.items():
            code = TRAINING.replace("RUN", run).replace("AT", str(step)).replace("FACTOR", factor)
            done = run_program(code, folder=folder, RANKSCOPE_INGEST_URL=service.url)
            assert 0 == done.returncode, done.stderr
        service.wait_for(lambda: len(receiver.alerts) >= len(RUNS) - 1)
        assert 0 == service.stop(), service.log()
        yield service.store, step, [f"{alert.title}\n{alert.text}" for alert in receiver.alerts]


@pytest.mark.thorough
def test_healthy_run_has_no_event_and_no_message(trained):
    store, _, messages = trained
    with connect(store) as connection:
        found = connection.sql("SELECT * FROM events WHERE run = 'healthy-run' AND type IN ('anomaly', 'incident')")

        assert [] == found.fetchall()
    assert not [text for text in messages if "healthy-run" in text]


@pytest.mark.parametrize(
    ("run", "rule", "name"),
    [
        ("spike-run", "LossSpike", "loss"),
        ("jump-run", "LearningRateJump", "learning_rate"),
        ("nan-run", "AnomalyNan", "loss"),
    ],
)
def test_fault_reaches_the_webhook_and_the_terminal_once_with_its_step(trained, run, rule, name):
    store, step, messages = trained
    shown = run_command("anomalies", run, "--store", store, "--format", "json")
    (event,) = json.loads(shown.stdout.replace("NaN", "null"))
    (message,) = [text for text in messages if run in text]

    assert (rule, name, step) == (event["rule"], event["op"], event["step"])
    assert {rule, str(step)} <= set(message.replace(",", " ").replace(":", " ").split())
    severity, _, title = message.splitlines()[0][1:].partition("] ")
    lines = (store.parent / "service.log").read_text().splitlines()
    assert [f"{severity}: {title}"] == [line for line in lines if f": {run}: " in line]
