"""Tests of forks and exits: the process ends as without a monitor. `test_misfortunes` has the tests of data loaders."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.programs import run_program

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
        training = Training(statistics="torch")
        training.train()
        monitor = training.monitor
        port = int(monitor.address.rpartition(":")[2])
        hooks = monitor._session.hooks
        spent = hooks.clock.cpu_seconds
        (read, write), (go_read, go) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            training.train()
            monitor.log(loss=1.0)
            with monitor.phase("child"):
                pass
            is_inert = monitor.address is None and monitor.faults == 0
            is_inert &= not hooks.active and hooks.clock.cpu_seconds == spent
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
                os.write(1, b"held\\n" if channel.persistence.folder else b"released\\n")
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
        import json, sys, threading
        from rankscope_exporter import Monitor
        monitor = Monitor()
        import psutil
        sockets = len(psutil.Process().net_connections(kind="all"))
        print(json.dumps([[t.name for t in threading.enumerate()], sockets, "numba" in sys.modules]))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)

    assert [["MainThread"], 0, False] == json.loads(done.stdout), done.stderr


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
        ("", None, "", "unknown"),
        ("", None, "sys.exit(1)", "unknown"),
        ("", None, "raise ValueError('broken')", "exception"),
        ("sys.last_value = NameError('of a notebook cell')\n", None, "", "unknown"),
        ("", 1, "", "completed"),
    ],
    ids=["end of the script", "exit code", "uncaught exception", "notebook", "all planned steps"],
)
def test_monitor_without_references_still_reports_the_exit_reason(begin, planned, end, reason) -> None:
    program = textwrap.dedent(WITHOUT_REFERENCES).replace("PLANNED", str(planned))
    done = run(begin + program + "\nimport gc\ngc.collect()\n" + end)
    ((exit_record,),) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    assert (reason, 1) == (exit_record["reason"], exit_record["last_step"]), done.stderr
