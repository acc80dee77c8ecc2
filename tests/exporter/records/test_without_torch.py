"""Records, ring, encoding, server, rules and sinks work in a process in which torch cannot be imported."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
WITH_TORCH = {"process.openmp"}
for room in ("process", "publish", "publish.sinks", "records"):
    package = importlib.import_module(f"rankscope_exporter.{room}")
    for found in pkgutil.iter_modules(package.__path__):
        if f"{room}.{found.name}" not in WITH_TORCH:
            importlib.import_module(f"{package.__name__}.{found.name}")

from tests.exporter.publish.sinks.records import FINITE, entry, record
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.publish.ring import Ring
from rankscope_exporter.publish.ring import encode, stream
from rankscope_ingest.record_channel.client import open_stream
from rankscope_ingest.record_channel.bodies import decode
from rankscope_ingest.record_channel.bodies import PlanColumns, RowContext, check

made, ring = record(7, (entry("w"), FINITE)), Ring(10, 1 << 20)
thread = OwnThread(target=lambda: ring.append(encode(made)), name="publisher")
thread.start()
thread.join()
window, plan = ring.after(-1, 1 << 20), made.statistics.plan
body = open_stream(stream(window.first, window.encoded).to_pybytes())
context = RowContext(run="r", attempt=0, rank=0, incarnation="i")
valid = check(body, {plan.hash: PlanColumns(plan.plan)}, context, after=-1, first_ordinal=0)
(row,) = decode([valid])["tensor_stats"].to_pylist()
print(row["step"], row["tensor"], {name: row[name] for name in FINITE} == FINITE)
"""


def test_record_is_encoded_stored_and_read_without_torch():
    command, folder = [sys.executable, "-c", PROGRAM], Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)

    assert ("7 w True\n", "") == (done.stdout, done.stderr)
