"""A service process keeps free memory between flushes, if its allocator is glibc."""

import os
import subprocess
import sys

import pytest

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's allocator is configured")


def printed(script: str, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [int(number) for number in done.stdout.split()]


REPORT_AT_EXIT = """
import atexit, ctypes, sys, tempfile, threading
from pathlib import Path

def heaps():
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as info:
        file = ctypes.c_void_p(libc.fopen(info.name.encode(), b"w"))
        libc.malloc_info(0, file)
        libc.fclose(file)
        return Path(info.name).read_text().count("<heap nr=")

def report():
    import pyarrow
    print("arrow uses", pyarrow.default_memory_pool().backend_name)
    threads = [threading.Thread(target=bytearray, args=(1 << 16,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sys.platform.startswith("linux"):
        print("heaps:", heaps())

atexit.register(report)
"""

MAINTENANCE = """
import asyncio, itertools, sys, time
from pathlib import Path
import numpy as np
from rankscope_ingest.pipeline import maintenance_schedule as maintenance
from rankscope_ingest.base.memory import tune_allocator
from rankscope_storage.maintenance.compaction import CompactionReport

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

SIZE = int(sys.argv[1])

class Store:
    seen, kept = [], []

    def compact(self):
        self.seen.append(resident())
        merged = [np.ones(1 << 20, np.uint8) for _ in range(SIZE)]
        self.kept.append(merged[-1])
        self.seen.append(resident())
        return CompactionReport()

    def maintain(self):
        pass

async def main():
    commits = itertools.count(maintenance.COMPACT_EVERY_COMMITS, maintenance.COMPACT_EVERY_COMMITS)
    schedule = maintenance.MaintenanceSchedule(Store(), time.monotonic())
    keeping = asyncio.create_task(schedule.run(lambda: next(commits), check_seconds=0.01))
    while len(Store.seen) < 3:
        await asyncio.sleep(0.01)
    keeping.cancel()

tune_allocator()
asyncio.run(main())
print(*Store.seen[:3])
"""


@LINUX
@pytest.mark.thorough
@pytest.mark.parametrize(("megabytes", "is_returned"), [(400, True), (20, False)])
def test_memory_of_a_large_maintenance_task_is_returned_before_the_next_one(megabytes, is_returned):
    """A small task leaves free memory to the flushes."""
    before, full, after = printed(MAINTENANCE, str(megabytes))

    assert full - before >= megabytes
    assert after - before < 20 if is_returned else after >= full


@pytest.mark.usual(1)
@pytest.mark.parametrize("module", ["rankscope", "rankscope_ingest"])
@pytest.mark.parametrize(("chosen", "used"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_threads_and_arrow_share_one_heap_unless_the_user_chose_another(module, chosen, used, tmp_path):
    """The report uses `default_memory_pool` before `tune_allocator` sets it: only the environment variable counts."""
    (tmp_path / "sitecustomize.py").write_text(REPORT_AT_EXIT)
    environment = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    environment |= {"PYTHONPATH": str(tmp_path)} | ({} if chosen is None else {"ARROW_DEFAULT_MEMORY_POOL": chosen})
    command = [sys.executable, "-m", module, *(["serve"] if module == "rankscope" else []), "missing.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)

    assert "missing.toml" in done.stderr
    assert f"arrow uses {used}" in done.stdout
    if sys.platform.startswith("linux"):
        assert "heaps: 1\n" in done.stdout
