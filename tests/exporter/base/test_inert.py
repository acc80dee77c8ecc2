"""An installation in which the exporter cannot be imported, or a torch without a part of it: training continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

TRAININGS = """
import hashlib, importlib, io, json, logging, os, sys
import torch
import torch._dynamo  # an optimizer imports it

def train(watched):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if watched:
        import rankscope
        config = rankscope.MonitorConfig(console=False, exit_wait_seconds=0)
        monitor = rankscope.Monitor(config, total_steps=4).attach(model, optimizer)
    for step in range(4):
        batch = torch.full((2, 3), float(step))
        if watched:
            with monitor.phase("evaluation"):
                monitor.phase("checkpoint")(int)(3)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watched:
            monitor.log(loss=loss, tokens=6)
            list(monitor.current("grad_reduced"))
    if watched:
        monitor.detach()
        assert 0 == monitor.faults
    return hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()

expected = train(False)

def without_distributed():
    for name in [name for name in vars(torch._C) if "c10d" in name]:
        delattr(torch._C, name)
    for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
        del sys.modules[name]
    importlib.import_module("torch.distributed")
    assert not torch.distributed.is_available()

def absent(package, error):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise error
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder())

old_numpy = ImportError("pyarrow requires NumPy 2.0 or newer, found 1.26.4", name="pyarrow")
missing = ModuleNotFoundError("No module named 'prometheus_client'", name="prometheus_client")
CASES = {
    "pyarrow": lambda: absent("pyarrow", old_numpy),
    "prometheus_client": lambda: absent("prometheus_client", missing),
    "distributed": without_distributed,
}
for name, prepare in CASES.items():
    if os.fork() == 0:
        lines = io.StringIO()
        logging.getLogger("rankscope").addHandler(logging.StreamHandler(lines))
        prepare()
        is_equal = train(True) == expected
        print(json.dumps({"name": name, "is_equal": is_equal, "lines": lines.getvalue().splitlines()}), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", TRAININGS],
        cwd=tmp_path_factory.mktemp("runs"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert 3 == len(done.stdout.splitlines()), done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_training_continues_without_a_package_or_with_one_that_does_not_fit(found):
    assert found["pyarrow"]["is_equal"]
    assert found["prometheus_client"]["is_equal"]


def test_one_line_names_the_reason_and_the_command(found):
    off = "Rankscope is off, training continues without a monitor: "

    assert [
        f"{off}ModuleNotFoundError: No module named 'prometheus_client'; to get one: pip install prometheus_client"
    ] == found["prometheus_client"]["lines"]
    (line,) = found["pyarrow"]["lines"]
    assert line.startswith(
        f"{off}ImportError: pyarrow requires NumPy 2.0 or newer, found 1.26.4; to get one: pip install"
    )


def test_torch_without_distributed_is_watched(found):
    assert {"name": "distributed", "is_equal": True, "lines": []} == found["distributed"]
