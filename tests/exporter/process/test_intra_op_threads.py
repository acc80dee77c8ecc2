"""The threads of torch's pool are found exactly, also in a fork, while threads of other libraries compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import run_program

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by /proc")


def _new_interpreter(code):
    environment, command = {**os.environ, "OMP_NUM_THREADS": "1"}, [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)


@pytest.fixture(params=[_new_interpreter, run_program], ids=["new", "forked"])
def program(request):
    return request.param


THREADS_OF_OTHERS = """
import os, threading, time
import duckdb, pyarrow, torch
from rankscope_exporter.process.openmp import intra_op_threads
from rankscope_exporter.adapters.hook_context import IntraOpThreads, _clock

def native_threads():
    return set(map(int, os.listdir("/proc/self/task")))

def repeat(work):
    threading.Thread(target=lambda: [work() for _ in iter(lambda: True, False)], daemon=True).start()

torch.set_num_threads(THREADS)
tensor = torch.empty(1 << 20)
before = native_threads()
if POOL_EXISTS:
    tensor.fill_(1)
pool = native_threads() - before

pyarrow.set_cpu_count(4)
table = pyarrow.table({"key": pyarrow.chunked_array([list(range(10_000))] * 20)})
connection = duckdb.connect(config={"threads": 4})
repeat(lambda: table.group_by("key").aggregate([("key", "sum")]))
repeat(lambda: connection.execute("SELECT sum(hash(i)) FROM range(1_000_000) numbers(i)").fetchall())
repeat(lambda: tensor.add(1))  # this thread has an OpenMP team of its own

def busy_threads():
    def seconds():
        return {thread: time.clock_gettime(_clock(thread)) for thread in others & native_threads()}
    others = native_threads() - pool - {os.getpid()}
    earlier = seconds()
    time.sleep(0.05)
    return {thread for thread, now in seconds().items() if now > earlier[thread]}

deadline = time.monotonic() + 60
while len(busy_threads()) < 6:
    assert time.monotonic() < deadline

for _ in range(5):
    found = set(intra_op_threads())
    assert THREADS - 1 == len(found), found
    if POOL_EXISTS:
        assert pool == found, (pool, found)
assert THREADS == torch.get_num_threads()

team = IntraOpThreads()
team.find()
assert 0.0 == team.seconds
earlier = {thread: time.clock_gettime(_clock(thread)) for thread in found}
own = time.thread_time()
team.call(lambda: [tensor.add(tensor) for _ in range(200)])
own = time.thread_time() - own
by_thread = [time.clock_gettime(_clock(thread)) - seconds for thread, seconds in earlier.items()]
assert all(0.1 * own < seconds for seconds in by_thread), (own, by_thread)
assert abs(team.seconds - sum(by_thread)) < 0.1 * team.seconds, (team.seconds, by_thread)
os._exit(0)
"""


@pytest.mark.usual(1)
@pytest.mark.parametrize("pool_exists", [True, False], ids=["existing pool", "no pool"])
def test_only_threads_of_the_pool_are_found(program, pool_exists):
    """DuckDB, pyarrow and a second thread with torch compute all the time, each with several threads."""
    done = program(THREADS_OF_OTHERS.replace("THREADS", "3").replace("POOL_EXISTS", str(pool_exists)))

    assert 0 == done.returncode, done.stderr
