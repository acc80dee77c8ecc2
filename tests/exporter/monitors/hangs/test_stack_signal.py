"""A configured signal publishes stacks; a previous handler is still called."""

from __future__ import annotations

import textwrap

import pytest
from tests.programs import run_program

from rankscope_exporter import ConfigError, MonitorConfig

PREAMBLE = """
import faulthandler, glob, json, os, signal, sys, tempfile, threading, time, torch
from rankscope_exporter import Monitor, MonitorConfig
from torch import nn
def attached(**settings):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # The watchdog looks for stacks eight times in `hang_after_seconds`, which do not apply before the first step.
    limit = {"hang_after_seconds": 0.4}
    config = MonitorConfig(console=False, exit_wait_seconds=0, statistics="torch", **limit, **settings)
    return Monitor(config).attach(net, optimizer)
def events(monitor, kind="stacks"):
    records = monitor._session.channel.ring.after(-1, 1 << 30).records
    return [event for record in records for event in record.events if event.type == kind]
def eventually(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
def files(process=os.getpid()):
    return glob.glob(f"{tempfile.gettempdir()}/rankscope-stacks-{process}-*.txt")
def caught():
    return next(line for line in open("/proc/self/status") if line.startswith("SigCgt"))
"""


def run(body: str) -> str:
    done = run_program(PREAMBLE + textwrap.dedent(body))
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_handler_is_registered_only_if_configured_and_restored():
    """The default action of SIGUSR2 would terminate the process."""
    assert "True\n1\nTrue True\n['later']\n" == run("""
        before = caught(), [signal.getsignal(number) for number in signal.valid_signals()]
        monitor = attached(stop_signals=[])
        print(before == (caught(), [signal.getsignal(number) for number in signal.valid_signals()]))
        monitor.detach()

        monitor = attached(stacks_signal="SIGUSR2")
        os.kill(os.getpid(), signal.SIGUSR2)
        print(len(eventually(lambda: events(monitor))))
        monitor.detach()
        print(before[0] == caught(), signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL)

        # A handler that the script sets after attach() is kept.
        received = []
        monitor = attached(stacks_signal="SIGUSR2")
        signal.signal(signal.SIGUSR2, lambda *_: received.append("later"))
        monitor.detach()
        os.kill(os.getpid(), signal.SIGUSR2)
        print(received)
    """)


def test_signal_publishes_stacks_and_calls_the_previous_handler():
    """A forked child writes nothing into its parent's file."""
    assert "['before'] True True 0\n0 1\n['before', 'before'] True []\n" == run("""
        received = []
        def handler(number, frame):
            received.append("before")
        signal.signal(signal.SIGUSR2, handler)
        monitor = attached(stacks_signal="SIGUSR2")
        os.kill(os.getpid(), signal.SIGUSR2)
        recorded = eventually(lambda: events(monitor))
        stacks = json.loads(recorded[0].details)
        print(received, "signal" == stacks["reason"], stacks["threads"][0].get("is_training"), monitor.faults)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            os._exit(0 if received == ["before", "before"] and os.path.getsize(files(os.getppid())[0]) == 0 else 1)
        print(os.waitpid(child, 0)[1], len(events(monitor)))
        monitor.detach()
        os.kill(os.getpid(), signal.SIGUSR2)
        print(received, signal.getsignal(signal.SIGUSR2) is handler, files())
    """)


@pytest.mark.thorough
def test_stacks_are_written_while_c_code_holds_the_gil():
    """Another process sends the signal and reads the file, because this process cannot run Python code."""
    assert "hold_the_interpreter in the file\nhold_the_interpreter recorded\n" == run("""
        import ctypes, subprocess
        def hold_the_interpreter(seconds):
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        monitor = attached(stacks_signal="SIGUSR2")
        path, = files()
        helper = subprocess.Popen([sys.executable, "-c",
            "import os, signal, sys, time; time.sleep(1); os.kill(int(sys.argv[1]), signal.SIGUSR2);"
            "texts = (time.sleep(0.02) or open(sys.argv[2]).read() for _ in range(500));"
            "name = 'hold_the_interpreter'; print(name, 'in the file' if any(name in each for each in texts) else '')",
            str(os.getpid()), path])
        # A signal interrupts a sleep, so several sleeps are needed.
        while helper.poll() is None:
            hold_the_interpreter(5)
        found = eventually(lambda: [e for e in events(monitor) if "hold_the_interpreter" in e.details])
        print("hold_the_interpreter recorded" if found else "not recorded")
        monitor.detach()
    """)


def test_signal_used_by_faulthandler_is_refused():
    assert "True True True 1\n" == run("""
        import tempfile
        with tempfile.TemporaryFile() as file:
            faulthandler.register(signal.SIGUSR2, file=file)
            messages = []
            import logging
            handler = logging.Handler()
            handler.emit = lambda record: messages.append(record.getMessage())
            logging.getLogger("rankscope").addHandler(handler)
            monitor = attached(stacks_signal="SIGUSR2")
            os.kill(os.getpid(), signal.SIGUSR2)
            named = any(
                "SIGUSR2 already has a handler in C code" in text and "use SIGUSR1" in text for text in messages
            )
            print(named, monitor.address is not None, os.fstat(file.fileno()).st_size > 0, monitor.faults)
    """)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGINT", "usr2", "SIGSEGV", ""])
def test_unsupported_signal_is_refused_with_the_alternatives(name):
    with pytest.raises(ConfigError, match="'SIGUSR1', 'SIGUSR2' or 'SIGQUIT'"):
        MonitorConfig(stacks_signal=name)


def test_environment_sets_signal_and_limit():
    variables = {"RANKSCOPE_STACKS_SIGNAL": "SIGUSR1", "RANKSCOPE_HANG_AFTER_SECONDS": "7.5"}
    config = MonitorConfig().with_environment(variables)

    assert ("SIGUSR1", 7.5) == (config.stacks_signal, config.hang_after_seconds)
