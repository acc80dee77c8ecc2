"""An op is added by one value in `kinds.py`: a copy of the contract with one more op reaches record and store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope_contract

NEW_OP = """\
    Op(
        name="spread",
        doc="Maximum minus minimum.",
        accumulators=("max", "min"),
        finish=lambda sums: sums["max"] - sums["min"],
        is_default=False,
    ),
"""

SCRIPT = """\
import json, pathlib, sys, tempfile
import torch
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until
from rankscope_contract.model.schema import DATASETS
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect

net = torch.nn.Linear(2, 1, bias=False)
with torch.no_grad():
    net.weight.copy_(torch.tensor([[-1.0, 3.0]]))
config = MonitorConfig(quantities=("parameters",), ops=["spread", "kurtosis"], console=False, exit_wait_seconds=0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
with Monitor(config).attach(net, optimizer) as monitor:
    read = Reader(monitor.address)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    monitor.end_step()
    wait_until(read.rows, 60)
    table = tables_of(read)["tensor_stats"]
with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder) / "store"
    with Store.open(root, create=True).claim(owner="test") as writer:
        writer.append(Batch(tables={"tensor_stats": table}, watermarks={"i": 100}))
    with connect(root) as connection:
        rows = connection.query("SELECT spread, kurtosis, norm FROM tensor_stats").to_pylist()
rollups = [field.name for field in DATASETS["tensor_rollups"] if field.name.startswith("spread")]
print(json.dumps({"rows": [list(row.values()) for row in rows], "rollups": rollups}))
"""


@pytest.mark.thorough
def test_op_added_by_one_value_is_recorded_and_stored(tmp_path):
    contract = Path(rankscope_contract.__file__).parent
    shutil.copytree(contract, tmp_path / "rankscope_contract", ignore=shutil.ignore_patterns("__pycache__"))
    kinds = tmp_path / "rankscope_contract" / "model" / "kinds.py"
    text = kinds.read_text(encoding="utf-8")
    place = '    _count("nans"'
    assert 1 == text.count(place)
    kinds.write_text(text.replace(place, NEW_OP + place), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"]
    assert {(4.0, 1.64, None)} == {(row[0], round(row[1], 4), row[2]) for row in found["rows"]}
    assert ["spread_min", "spread_max", "spread_avg", "spread_count", "spread_nans", "spread_infs"] == found["rollups"]
