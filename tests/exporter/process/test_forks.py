"""A child that is forked while the parent publishes, and trains with a monitor of its own, publishes every step."""

from __future__ import annotations

from tests.programs import run_program

FORKS = """
import os, threading, time
import pyarrow as pa, pyarrow.compute as pc
from tests.exporter.parts import Training

is_publishing = False
begun = threading.Event()

def publish():  # on the publisher thread, like the work for each step
    global is_publishing
    is_publishing = True
    begun.set()
    numbers = pa.array(range(10_000), pa.float32())
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        pc.if_else(pc.is_nan(numbers), None, numbers)
    is_publishing = False

training = Training(statistics="torch")
for _ in range(4):
    training.train(2)
    begun.clear()
    training.session.steps.items.put(publish)
    begun.wait(20)
    child = os.fork()
    if child == 0:
        was_publishing = is_publishing
        own = Training(statistics="torch")
        own.train(5)
        own.monitor.detach()
        print(was_publishing, [record.step for record in own.records][:5], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
training.monitor.detach()
print(training.faults)
"""


def test_fork_waits_until_the_publisher_is_outside_of_libraries_with_locks():
    done = run_program(FORKS, seconds=120)

    assert ["False [1, 2, 3, 4, 5]"] * 4 + ["0"] == done.stdout.splitlines(), done.stderr


OWN_FORK = """
import os, threading
from rankscope_exporter.process.threads import no_fork

with no_fork(), no_fork():  # a callback of the script may fork on a thread of the monitor
    child = os.fork()
    if child == 0:
        os._exit(0)
with no_fork():
    pass
print(os.waitpid(child, 0)[1])
"""


def test_thread_inside_a_section_can_fork_itself():
    assert "0\n" == run_program(OWN_FORK, seconds=60).stdout
