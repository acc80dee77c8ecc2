"""Forks, exits, signals and closed streams: the process ends as without a monitor, and failed threads start again."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.programs import run_program
from torch import nn

from rankscope.access.stores import store_spools
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.process import threads
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_storage.connection import connect

PREAMBLE = """
import os, sys
from rankscope_exporter import Monitor
from tests.exporter.parts import QUIET, Training
"""


def run(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program(PREAMBLE + textwrap.dedent(body), whole_exit=True, **environment)


def test_monitor_in_a_forked_child_is_inactive_and_holds_no_port() -> None:
    """The parent closes its port while the child is still running, and the port can be bound again immediately."""
    done = run("""
        import socket
        from pathlib import Path
        pipes = lambda: sum(file.is_fifo() for file in Path("/proc/self/fd").iterdir())
        before = pipes()
        training = Training(statistics="torch")
        training.train()
        monitor = training.monitor
        port = int(monitor.address.rpartition(":")[2])
        hooks = monitor._session.hooks
        spent = hooks.cpu_seconds
        (read, write), (go_read, go) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            training.train()
            monitor.log(loss=1.0)
            with monitor.phase("child"):
                pass
            is_inert = monitor.address is None and monitor.faults == 0
            is_inert &= not hooks.active and hooks.cpu_seconds == spent and pipes() == before + 4
            os.write(write, b"inert" if is_inert else b"alive")
            os.read(go_read, 1)
            os._exit(0)
        answer = os.read(read, 10).decode()
        monitor.detach()
        probe = socket.socket()
        probe.bind(("127.0.0.1", port))
        print(answer, monitor.faults)
        os.write(go, b"!")
        os.waitpid(child, 0)
    """)

    assert "inert 0\n" == done.stdout, done.stderr


def test_child_that_is_forked_during_detach_holds_no_spool(tmp_path: Path) -> None:
    """Detach may take seconds. Another thread may fork meanwhile, and the child may run longer than its parent."""
    done = run(
        """
        training = Training(statistics="torch")
        training.train()
        channel = training.session.channel
        def fork(_seconds):
            child = os.fork()
            if child == 0:
                os.write(1, b"held\\n" if channel.spool.folder else b"released\\n")
                os._exit(0)
            os.waitpid(child, 0)
            return 0
        channel.drain = fork
        training.monitor.detach()
        """,
        RANKSCOPE_SPOOL_DIR=str(tmp_path),
    )

    assert "released\n" == done.stdout, done.stderr


def test_exception_and_exit_code_end_the_program_as_without_a_monitor() -> None:
    failed = run("training = Training()\ntraining.train()\nraise ValueError('its own error')")
    left = run("with Training() as training:\n    training.train()\n    sys.exit(7)")

    assert (1, 7) == (failed.returncode, left.returncode)
    assert "ValueError: its own error" == failed.stderr.strip().splitlines()[-1]


def test_unreachable_service_delays_the_exit_by_at_most_the_setting() -> None:
    done = run(
        """
        import time
        training = Training(exit_wait_seconds=1.0, statistics="torch")
        with training.monitor:
            training.train()
            began = time.monotonic()
        print(time.monotonic() - began)
        """,
        RANKSCOPE_INGEST_URL="http://127.0.0.1:9",
    )

    assert 0 == done.returncode, done.stderr
    assert float(done.stdout) < 2.5


def test_import_and_construction_open_no_socket_or_thread() -> None:
    script = textwrap.dedent("""
        import json, threading
        from rankscope_exporter import Monitor
        monitor = Monitor()
        import psutil
        sockets = len(psutil.Process().net_connections(kind="all"))
        print(json.dumps([[t.name for t in threading.enumerate()], sockets]))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)

    assert [["MainThread"], 0] == json.loads(done.stdout), done.stderr


WITHOUT_REFERENCES = """
    training = Training(monitor=Monitor(QUIET | {"exit_wait_seconds": 1.0, "statistics": "torch"}, total_steps=PLANNED))
    published = []
    publish = training.session.channel.publish
    training.session.publisher.publish = lambda record: published.append(record) or publish(record)
    training.train()
    def print_exits():
        import json
        exits = [json.loads(e.details) for r in published for e in r.events if e.type == "exit"]
        print(json.dumps(exits))
    attachment = type(training.monitor._session_end)
    ended = attachment.end_of_process
    def end_and_print(self, *arguments):
        ended(self, *arguments)
        print_exits()
    attachment.end_of_process = end_and_print
    net, optimizer = training.net, training.optimizer
    del training
"""


@pytest.mark.parametrize(
    ("begin", "planned", "end", "reason"),
    [
        *(("", None, "", "unknown"), ("", None, "sys.exit(1)", "unknown")),
        ("", None, "raise ValueError('broken')", "exception"),
        *(("sys.last_value = NameError('of a notebook cell')\n", None, "", "unknown"), ("", 1, "", "completed")),
    ],
    ids=["end of the script", "exit code", "uncaught exception", "notebook", "all planned steps"],
)
def test_monitor_without_references_still_reports_the_exit_reason(begin, planned, end, reason) -> None:
    program = textwrap.dedent(WITHOUT_REFERENCES).replace("PLANNED", str(planned))
    done = run(begin + program + "\nimport gc\ngc.collect()\n" + end)
    ((exit_record,),) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    assert (reason, 1) == (exit_record["reason"], exit_record["last_step"]), done.stderr


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


CLOSED = "import os, sys\nos.closerange(0, 3)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"

TRAINING = """
import contextlib, os, sys
import torch
from torch import nn
from rankscope_exporter import Monitor
torch.manual_seed(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
monitor = Monitor({"statistics": "torch"})
if sys.argv[1] == "monitored":
    monitor.attach(net, optimizer)
for step in range(5):
    loss = net(torch.ones(3, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.log(loss=loss)
    print("step", step)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"output of native code")
are_null = {}
for descriptor in range(3):
    with contextlib.suppress(OSError):
        are_null[descriptor] = os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
torch.save({"weights": net.state_dict(), "are_null": are_null, "address": monitor.address}, sys.argv[2])
monitor.detach()
sys.exit(7)
"""


@pytest.mark.thorough
def test_output_with_closed_streams_is_in_no_file_of_the_monitor(tmp_path):
    import torch

    environment = {**os.environ, "RANKSCOPE_RUN": "closed", "RANKSCOPE_SPOOL_DIR": str(tmp_path / "records")}
    saved = {}
    for name in ("alone", "monitored"):
        command = [sys.executable, "-c", CLOSED, "-c", TRAINING, name, str(tmp_path / name)]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, check=False)
        saved[name] = torch.load(tmp_path / name)
        assert 7 == ended.returncode
    spools, _ = store_spools(tmp_path / "records", tmp_path / "history", shard="0/1", with_running=False)
    with connect(tmp_path / "history") as connection:
        losses = connection.sql("SELECT count(*) FROM scalars WHERE name = 'loss'").fetchall()

    assert [6] == [spool.records for spool in spools]  # five steps and the exit
    assert [(5,)] == losses
    assert saved["monitored"]["address"]
    assert dict.fromkeys(range(3), True) == saved["monitored"]["are_null"]
    for name, weight in saved["alone"]["weights"].items():
        assert torch.equal(weight, saved["monitored"]["weights"][name])


STOPPED = """
import json, os, signal, threading, time
from rankscope_exporter import Monitor
from tests.exporter.parts import QUIET, Training
def attached(**settings):
    training = Training(monitor=Monitor(QUIET | {"statistics": "torch", **settings}, total_steps=9))
    publish = training.session.channel.publish
    def show_exit(record):
        for event in record.events:
            if event.type == "exit":
                os.write(1, f"{json.loads(event.details)}\\n".encode())
        return publish(record)
    training.session.publisher.publish = show_exit
    training.train()
    return training.monitor
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
def report(*words):
    print(*words, flush=True)
"""
SIGNAL_EXIT = "{'reason': 'signal', 'last_step': 1, 'error': 'SIGTERM'}\n"
COMPLETED = "{'reason': 'completed', 'last_step': 1, 'error': None}\n"


def run_stopped(body: str, **environment: str) -> tuple[int, str]:
    done = run_program(STOPPED + textwrap.dedent(body), **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_every_monitor_reports_the_exit_before_the_signal_ends_the_process():
    assert (-15, SIGNAL_EXIT * 2) == run_stopped("one, two = attached(), attached(); stop(); report('still running')")


def test_unreachable_service_delays_a_stop_signal_by_a_few_seconds():
    """Launchers send SIGKILL some seconds after the signal. The wait does not depend on `exit_wait_seconds`."""
    code, output = run_stopped(
        """
        from rankscope_exporter.process import lifecycle
        lifecycle.STOP_WAIT_SECONDS = 0.3
        monitor = attached(exit_wait_seconds=600)
        threading.Timer(30, lambda: os._exit(3)).start()
        stop()
        """,
        RANKSCOPE_INGEST_URL="http://127.0.0.1:9",
    )

    assert (-15, SIGNAL_EXIT) == (code, output)


def test_signal_handler_is_restored_by_detach_and_in_forked_children():
    """A child with the handler of the monitor would not end while it runs C code."""
    assert (-15, "0 True\n" + COMPLETED + "0\n") == run_stopped("""
        monitor = attached()
        child = os.fork()
        if child == 0:
            report(int(signal.getsignal(signal.SIGTERM)), monitor.address is None)
            stop()
            os._exit(3)
        assert 15 == os.waitpid(child, 0)[1]
        monitor.detach()
        report(int(signal.getsignal(signal.SIGTERM)))
        stop()
        """)


def test_earlier_handler_of_the_script_is_called_and_may_continue():
    """The handler may save a checkpoint and end the loop. The steps until then are measured."""
    assert (0, "asked True\n" + SIGNAL_EXIT + "True\n") == run_stopped("""
        def handler(number, frame):
            report("asked", monitor.address is not None)
        signal.signal(signal.SIGTERM, handler)
        with attached() as monitor:
            stop()
        report(signal.getsignal(signal.SIGTERM) is handler)
        """)


def test_later_handler_of_the_script_decides_whether_the_process_ends():
    """Lightning, for example, calls the earlier handler, ends its loop and returns."""
    assert (0, "mine\ncontinues\n" + SIGNAL_EXIT) == run_stopped("""
        monitor = attached()
        ours = signal.getsignal(signal.SIGTERM)
        def handler(number, frame):
            report("mine")
            ours(number, frame)
        signal.signal(signal.SIGTERM, handler)
        with monitor:
            stop()
            report("continues")
        """)


STUCK = """
import ctypes
from rankscope_exporter.process import lifecycle
lifecycle.STUCK_SECONDS = 0.2
monitor = attached()
monitor._session.diagnosis.hand_over = monitor._session.publisher.publish
monitor._session.current_step.lock.acquire()
threading.Timer(0.2, stop).start()
threading.Timer(60, lambda: os._exit(3)).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
lock(mutex)  # never returns, and holds no interpreter lock: as a rank that waits for a collective
"""


def test_main_thread_that_waits_in_c_code_is_ended_by_the_signal():
    """Without a handler, the signal ends it immediately. The report waits for no lock that the main thread holds."""
    unfinished = SIGNAL_EXIT.replace("1", "None")  # the first step

    assert (-15, unfinished) == run_stopped(STUCK)


def test_signals_of_an_event_loop_still_reach_the_loop():
    """An event loop and the monitor use the same mechanism of the interpreter, of which there is one per process."""
    assert (0, "in the loop\n" + SIGNAL_EXIT) == run_stopped("""
        import asyncio
        async def main():
            ended = asyncio.Event()
            def leave():
                report("in the loop")
                ended.set()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
            with attached():
                stop()
                await ended.wait()
        asyncio.run(main())
        """)


def test_other_thread_attaches_without_a_handler_and_without_a_fault():
    assert (0, "0 0\n" + COMPLETED) == run_stopped("""
        def work():
            with attached() as monitor:
                report(monitor.faults, int(signal.getsignal(signal.SIGTERM)))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """)


def test_signal_during_monitor_code_is_handled_after_that_code():
    """The training thread may hold a lock that the report of the exit needs."""
    assert (-15, "left\n" + SIGNAL_EXIT) == run_stopped("""
        monitor = attached()
        def inside():
            stop()
            time.sleep(0.2)
            report("left")
        monitor._session.boundary.call("waiting", inside)
        time.sleep(10)
        """)


def test_ignored_signal_remains_ignored():
    """With nohup, the signal does not end the process."""
    assert (0, "1\n" + COMPLETED) == run_stopped("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        monitor = attached()
        report(int(signal.getsignal(signal.SIGTERM)))
        stop()
        monitor.detach()
        """)


def test_stop_signals_from_the_environment_and_conflicts():
    texts = {"SIGTERM, SIGUSR1": ("SIGTERM", "SIGUSR1"), "": ("SIGTERM",), "off": ()}
    found = {text: MonitorConfig().with_environment({"RANKSCOPE_STOP_SIGNALS": text}) for text in texts}

    assert texts == {text: config.stop_signals for text, config in found.items()}
    assert () == MonitorConfig(stop_signals=()).with_environment({}).stop_signals
    with pytest.raises(ConfigError, match="remove it from one of them"):
        MonitorConfig(stop_signals=("SIGUSR2",), stacks_signal="SIGUSR2")


RUN = "threads"
LONG = ("hardware", "http", "publisher", "registration", "spool", "spool-writer", "switch", "watchdog")
"""Threads that work until the training ends."""


def test_each_thread_raises_once_and_all_steps_are_published(
    quiet, reader, eventually, monkeypatch, tmp_path, free_port
) -> None:
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", str(tmp_path))
    serve = ServeConfig(ingest_url=f"http://127.0.0.1:{free_port}")
    config = replace(quiet, run=RUN, serve=serve, switch_file=str(tmp_path / "switch"), switch_poll_seconds=0.05)
    raised: list[str] = []
    start = OwnThread.start

    def failing(thread: OwnThread) -> None:
        work = thread._work
        if thread._on_fault is not None and not thread.name.startswith("rankscope-stop"):

            def once() -> None:
                if thread.name not in raised:
                    raised.append(thread.name)
                    raise RuntimeError(f"injected into {thread.name}")
                work()

            thread._work = once  # type: ignore[assignment]
        start(thread)

    monkeypatch.setattr(OwnThread, "start", failing)
    monkeypatch.setattr(threads, "RESTART_SECONDS", 0.05)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for number in range(3):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=float(number))
            monitor.end_step()

        assert [(1, 0.0), (2, 1.0), (3, 2.0)] == eventually(lambda: (found := read.scalars("loss"))[2:] and found)
        eventually(lambda: {f"rankscope-{name}" for name in LONG} <= set(raised))
        eventually(lambda: f'faults_total{{rank="0",run="{RUN}"}} {len(raised)}.0\n' in read.get("/metrics").decode())
