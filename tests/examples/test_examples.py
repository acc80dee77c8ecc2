"""Each example runs for a few steps with the command of its docstring. Part of `make test-examples`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COMMANDS = {
    "fsdp1.py": (*LAUNCH, "fsdp1.py", "3"),
    "fsdp2.py": (*LAUNCH, "fsdp2.py", "3"),
    "tensor_parallel.py": (*LAUNCH, "tensor_parallel.py", "3"),
    "pipeline_parallel.py": (*LAUNCH, "pipeline_parallel.py", "3"),
    "gpt_ddp.py": (*LAUNCH, "gpt_ddp.py", "--steps", "3", "--layers", "3"),
    "hf_trainer.py": (sys.executable, "hf_trainer.py", "3"),
    "lightning_module.py": (sys.executable, "lightning_module.py", "3", "2"),
    "accelerate_loop.py": (*LAUNCH, "accelerate_loop.py", "3"),
    "plain_loop.py": (
        *(sys.executable, "plain_loop.py", "--steps", "3"),
        *("--accumulate", "2", "--scaler", "--checkpointing", "--compile"),
    ),
}


@pytest.mark.skipif(not os.environ.get("RANKSCOPE_EXAMPLES"), reason="make test-examples")
@pytest.mark.parametrize("name", COMMANDS)
def test_example_trains_without_a_fault(name):
    done = subprocess.run(COMMANDS[name], cwd=EXAMPLES, capture_output=True, text=True, timeout=150, check=False)

    assert 0 == done.returncode, done.stderr[-2000:]
    assert "rankscope: run" in done.stdout + done.stderr
    assert "failed, training continues" not in done.stdout + done.stderr
