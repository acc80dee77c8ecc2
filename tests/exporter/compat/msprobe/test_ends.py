"""Scripts for msprobe as processes: the state of their run, and their files after a change of the statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.programs import run_command, run_program

SCRIPT = """
import sys, torch
from rankscope_exporter.compat.msprobe import TrainerMon
def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon("config.json")
    monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)
    for step in range(4):
        model(torch.ones(1, 4) * (step + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            monitor.ops = ["max", "norm", "mean"]
    END
main()
"""


def trained(folder: Path, end: str) -> int:
    config = {"wg_distribution": True, "format": "csv", "step_count_per_record": 9, "ops": ["norm", "min"]}
    (folder / "config.json").write_text(json.dumps(config))
    output = {"MONITOR_OUTPUT_DIR": str(folder / "out"), "RANKSCOPE_SPOOL_DIR": str(folder / "records")}
    done = run_program(SCRIPT.replace("END", end), folder=folder, whole_exit=True, **output)
    assert "Traceback" not in done.stderr
    return done.returncode


@pytest.mark.parametrize(("end", "code", "state"), [("pass", 0, "completed"), ("sys.exit(3)", 3, "failed")])
def test_script_that_ends_well_is_completed_with_all_its_files(end: str, code: int, state: str, tmp_path: Path) -> None:
    assert code == trained(tmp_path, end)
    done = run_command("sql", "select state from attempts", "--store", tmp_path / "records", "--format", "json")
    (folder,) = (tmp_path / "out").iterdir()
    before, after = (path.read_text().splitlines() for path in sorted(folder.glob("grad_reduced_*.csv")))

    assert [{"state": state}] == json.loads(done.stdout)
    assert before[0].endswith("name,step,norm,min,shape,dtype")
    assert before[-1] == "0,bias,1,1.414214,1.0,[2],torch.float32"
    assert after[0].endswith("name,step,max,norm,mean,shape,dtype")
    assert after[-1] == "0,bias,3,1.0,1.414214,1.0,[2],torch.float32"
