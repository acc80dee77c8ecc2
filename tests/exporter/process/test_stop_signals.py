"""Where the configuration names a signal, the rank says its last word first; the process ends as it would anyway."""

from __future__ import annotations

import textwrap

import pytest
from tests.programs import run_program

from rankscope_exporter import ConfigError, MonitorConfig

PREAMBLE = """
import json, os, signal, sys, threading, time, torch
from rankscope_exporter import Monitor, MonitorConfig
from torch import nn
def attached(**settings):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = {"console": False, "statistics": "torch", "exit_wait_seconds": 0, "stop_signals": ["SIGTERM"]}
    settings = {**own, **settings}
    monitor = Monitor(MonitorConfig(**settings), total_steps=9).attach(net, optimizer)
    publish = monitor._session.channel.publish
    def tell(record):
        for event in record.events:
            if event.type == "exit":
                os.write(1, f"{json.loads(event.details)}\\n".encode())
        return publish(record)
    monitor._session.publisher.publish = tell
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return monitor
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
def say(*words):
    print(*words, flush=True)
"""
LAST_WORD = "{'reason': 'signal', 'last_step': 1, 'error': 'SIGTERM'}\n"
COMPLETED = "{'reason': 'completed', 'last_step': 1, 'error': None}\n"


def run(body: str, **environment: str) -> tuple[int, str]:
    done = run_program(PREAMBLE + textwrap.dedent(body), **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_last_word_is_said_and_the_process_dies_by_the_signal():
    assert (-15, LAST_WORD) == run("monitor = attached(); stop(); say('lived on')")


def test_a_service_that_is_down_holds_up_the_end_by_seconds_at_most():
    """Whoever asked for the end kills after some seconds, whatever exit_wait_seconds says."""
    code, said = run(
        """
        import rankscope_exporter.process.stop_signals as stop_signals
        stop_signals.STOP_WAIT_SECONDS = 0.3
        monitor = attached(exit_wait_seconds=600)
        threading.Timer(30, lambda: os._exit(3)).start()
        stop()
        """,
        RANKSCOPE_INGEST_URL="http://127.0.0.1:9",
    )

    assert (-15, LAST_WORD) == (code, said)


def test_after_detach_and_in_a_forked_child_the_signal_does_what_it_did():
    """A child that still had our handler would not end while it sits in C code."""
    assert (-15, "0 True\n" + COMPLETED + "0\n") == run("""
        monitor = attached()
        child = os.fork()
        if child == 0:
            say(int(signal.getsignal(signal.SIGTERM)), monitor.address is None)
            stop()
            os._exit(3)
        assert 15 == os.waitpid(child, 0)[1]
        monitor.detach()
        say(int(signal.getsignal(signal.SIGTERM)))
        stop()
        """)


def test_a_handler_of_the_script_goes_first_and_may_let_training_go_on():
    """It saves a checkpoint and leaves the loop: a stop on request, and what is measured until then counts."""
    assert (0, "asked True\n" + LAST_WORD + "True\n") == run("""
        def handler(number, frame):
            say("asked", monitor.address is not None)
        signal.signal(signal.SIGTERM, handler)
        with attached() as monitor:
            stop()
        say(signal.getsignal(signal.SIGTERM) is handler)
        """)


def test_a_handler_that_was_set_since_stays_and_one_that_calls_on_reaches_us():
    assert (-15, "mine\n" + LAST_WORD) == run("""
        monitor = attached()
        ours = signal.getsignal(signal.SIGTERM)
        def handler(number, frame):
            say("mine")
            ours(number, frame)
        signal.signal(signal.SIGTERM, handler)
        stop()
        """)


def test_a_signal_that_comes_while_our_own_code_runs_waits_until_it_has_left():
    """The training thread may hold a lock then that the last word needs."""
    assert (-15, "left\n" + LAST_WORD) == run("""
        monitor = attached()
        def inside():
            stop()
            time.sleep(0.2)
            say("left")
        monitor._session.hooks.between(inside)
        time.sleep(10)
        """)


def test_all_monitors_of_the_process_say_their_last_word():
    assert (-15, LAST_WORD * 2) == run("one, two = attached(), attached(); stop()")


def test_an_ignored_signal_stays_ignored():
    """nohup: nothing ends by it."""
    code, said = run("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        monitor = attached()
        say(int(signal.getsignal(signal.SIGTERM)))
        stop()
        monitor.detach()
        """)

    assert (0, "1\n" + COMPLETED) == (code, said)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "term", ""])
def test_a_signal_that_stops_no_job_is_refused_with_those_that_do(name):
    with pytest.raises(ConfigError, match=r"SIGTERM, SIGHUP, .*not '"):
        MonitorConfig(stop_signals=(name,))


def test_one_signal_means_one_thing_and_the_environment_may_name_it():
    named = MonitorConfig().with_environment({"RANKSCOPE_STOP_SIGNALS": "SIGTERM, SIGUSR1"})

    assert ("SIGTERM", "SIGUSR1") == named.stop_signals
    assert () == MonitorConfig().with_environment({}).stop_signals
    with pytest.raises(ConfigError, match="use it for only one of them"):
        MonitorConfig(stop_signals=("SIGUSR2",), stacks_signal="SIGUSR2")
