"""Ranks, services and spools of an earlier commit and of this checkout, with each other: all rows are stored.

The code of the earlier commit is that of the packages of this repository, taken from its history by git.
"""

import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import pytest

COMMIT = "f5ca044e"
STEPS = 30
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("exporter", "ingest", "storage", "view", "dashboards", "cli")
TRAINING = f"""
import torch
from rankscope_exporter import Monitor
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
with Monitor({{"run": "r"}}, total_steps={STEPS}).attach(model, optimizer) as monitor:
    for step in range({STEPS}):
        loss = model(torch.ones(2, 4)).square().mean() * (float("nan") if step == 20 else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
"""
SERVICE = """
store.path = "store"
service.listen = "127.0.0.1:{port}"
ingest.poll_seconds = 0.5
ingest.flush_after_seconds = 1.0
"""
COUNTS = """
SELECT (SELECT count(*) FROM scalars WHERE name = 'loss') AS losses, (SELECT count(*) FROM tensor_stats) AS tensors,
  (SELECT count(DISTINCT step) FROM tensor_stats) AS steps,
  (SELECT count(*) > 0 FROM events WHERE rule = 'AnomalyNan') AS nan
"""
EXPECTED = {"losses": STEPS, "tensors": STEPS * 6 * 4, "steps": STEPS, "nan": True}


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with (folder / "code.tar").open("wb") as archive:
        subprocess.run(["git", "archive", COMMIT, *PACKAGES], cwd=ROOT, stdout=archive, check=True)
    with tarfile.open(folder / "code.tar") as archive:
        archive.extractall(folder, filter="data")
    return {"earlier": folder, "this": ROOT}


class Code:
    """The packages of one checkout, whose programs run in `folder`."""

    def __init__(self, checkout: Path, folder: Path, **environment: str) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
        paths = os.pathsep.join(str(checkout / package) for package in PACKAGES)
        self._common = {"cwd": folder, "env": {**own, "PYTHONPATH": paths, **environment}}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *arguments], text=True, **self._common)

    def run(self, *arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200, **self._common).stdout

    def counts(self, store: str) -> object:
        return json.loads(self.run("-m", "rankscope", "sql", COUNTS, "--store", store, "--format", "json"))


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


@pytest.mark.parametrize(("service", "rank"), [("this", "earlier"), ("earlier", "this")])
def test_service_stores_all_records_of_a_rank_of_the_other_commit(checkouts, free_port, service, rank, tmp_path):
    (tmp_path / "service.toml").write_text(SERVICE.format(port=free_port))
    serving = Code(checkouts[service], tmp_path)
    process = serving.start("-m", "rankscope", "serve", "service.toml")
    try:
        wait_for(f"http://127.0.0.1:{free_port}/healthz")
        Code(checkouts[rank], tmp_path, RANKSCOPE_INGEST_URL=f"http://127.0.0.1:{free_port}").run("-c", TRAINING)
    finally:
        process.terminate()
        process.wait(60)

    assert [EXPECTED] == serving.counts("store")
    other = Code(checkouts[rank], tmp_path)  # of another schema version of the store
    with pytest.raises(subprocess.CalledProcessError) as refused:
        other.counts("store")
    if rank == "earlier":
        assert "has schema version 2" in refused.value.stderr
    else:
        assert "`rankscope store upgrade --store" in refused.value.stderr
        other.run("-m", "rankscope", "store", "upgrade", "--store", "store")
        assert [EXPECTED] == other.counts("store")


@pytest.mark.parametrize(("reader", "rank"), [("this", "earlier"), ("earlier", "this")])
def test_spool_of_a_rank_is_imported_by_the_other_commit(checkouts, reader, rank, tmp_path):
    Code(checkouts[rank], tmp_path, RANKSCOPE_SPOOL_DIR=str(tmp_path / "spool")).run("-c", TRAINING)
    reading = Code(checkouts[reader], tmp_path)
    reading.run("-m", "rankscope", "import", "spool", "--store", "history")

    assert [EXPECTED] == reading.counts("history")
