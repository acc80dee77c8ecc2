"""The store is a Delta table, and delta-rs runs OPTIMIZE on it. All questions are still answered."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable
from tests.programs import run_command

RANK = """
import os, select, torch, rankscope
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
monitor = rankscope.Monitor(total_steps=60).attach(model, optimizer)
with monitor:
    for step in range(60):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        monitor.log(loss=loss, tokens=32)
        select.select([], [], [], 0.05)
"""
VIEWS = ("goodput", "tensor_timeline", "loss_curve", "scalar_history")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_six_questions_are_answered_after_optimize_by_delta_rs(service, start_job, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    service.start()
    assert 0 == start_job(script, RANKSCOPE_RUN="table").wait(90)
    service.stop()
    DeltaTable(str(service.store)).optimize.compact()
    questions = [("runs",), ("summary",), *(("sql", f"select count(*) from {view}") for view in VIEWS)]
    answers = [run_command(*question, "--store", service.store) for question in questions]

    assert [0] * 6 == [answer.returncode for answer in answers], [answer.stderr for answer in answers]
    service.start()  # waits until the service is healthy
