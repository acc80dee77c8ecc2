"""The packages' examples run, and an imported package does not claim models of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

from heavy_checks import require

pytestmark = [pytest.mark.timeout(900), require("deepspeed", "megatron.core")]

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OTHERS = """
import tempfile, torch, torch.distributed as dist
import deepspeed, megatron.core.distributed
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter.adapters import framework_of

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
print(framework_of(model).name, framework_of(DistributedDataParallel(model)).name)
"""


@pytest.mark.parametrize("name", ["deepspeed_zero.py", "megatron_core.py"])
def test_example_trains_without_a_fault(name):
    done = run(*LAUNCH, name, "3")

    assert 0 == done.returncode, done.stderr[-2000:]
    assert "rankscope: run" in done.stdout + done.stderr
    assert "failed, training continues" not in done.stdout + done.stderr


def test_imported_package_does_not_claim_other_models():
    done = run("-c", OTHERS)

    assert ["plain", "ddp"] == done.stdout.split()[-2:], done.stderr[-2000:]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "RANKSCOPE_INGEST_URL": ""}
    command = (sys.executable, *arguments)
    return subprocess.run(
        command, cwd=EXAMPLES, capture_output=True, text=True, timeout=800, check=False, env=environment
    )
