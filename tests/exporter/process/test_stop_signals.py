"""Tests of stop signals: the rank reports its exit before a configured signal ends the process as usual."""

from __future__ import annotations

import textwrap

import pytest
from tests.programs import run_program

from rankscope_exporter import ConfigError, MonitorConfig

PREAMBLE = """
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


def run(body: str, **environment: str) -> tuple[int, str]:
    done = run_program(PREAMBLE + textwrap.dedent(body), **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_every_monitor_reports_the_exit_before_the_signal_ends_the_process():
    assert (-15, SIGNAL_EXIT * 2) == run("one, two = attached(), attached(); stop(); report('still running')")


def test_unreachable_service_delays_a_stop_signal_by_a_few_seconds():
    """Launchers send SIGKILL some seconds after the signal. The wait does not depend on `exit_wait_seconds`."""
    code, output = run(
        """
        import rankscope_exporter.process.stop_signals as stop_signals
        stop_signals.STOP_WAIT_SECONDS = 0.3
        monitor = attached(exit_wait_seconds=600)
        threading.Timer(30, lambda: os._exit(3)).start()
        stop()
        """,
        RANKSCOPE_INGEST_URL="http://127.0.0.1:9",
    )

    assert (-15, SIGNAL_EXIT) == (code, output)


def test_signal_handler_is_restored_by_detach_and_in_forked_children():
    """A child with the handler of the monitor would not end while it runs C code."""
    assert (-15, "0 True\n" + COMPLETED + "0\n") == run("""
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
    assert (0, "asked True\n" + SIGNAL_EXIT + "True\n") == run("""
        def handler(number, frame):
            report("asked", monitor.address is not None)
        signal.signal(signal.SIGTERM, handler)
        with attached() as monitor:
            stop()
        report(signal.getsignal(signal.SIGTERM) is handler)
        """)


def test_later_handler_of_the_script_decides_whether_the_process_ends():
    """Lightning, for example, calls the earlier handler, ends its loop and returns."""
    assert (0, "mine\ncontinues\n" + SIGNAL_EXIT) == run("""
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
import rankscope_exporter.process.stop_signals as stop_signals
stop_signals.STUCK_SECONDS = 0.2
monitor = attached()
monitor._session.diagnosis._publish = monitor._session.publisher.publish
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

    assert (-15, unfinished) == run(STUCK)


def test_signals_of_an_event_loop_still_reach_the_loop():
    """An event loop and the monitor use the same mechanism of the interpreter, of which there is one per process."""
    assert (0, "in the loop\n" + SIGNAL_EXIT) == run("""
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
    assert (0, "0 0\n" + COMPLETED) == run("""
        def work():
            with attached() as monitor:
                report(monitor.faults, int(signal.getsignal(signal.SIGTERM)))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """)


def test_signal_during_monitor_code_is_handled_after_that_code():
    """The training thread may hold a lock that the report of the exit needs."""
    assert (-15, "left\n" + SIGNAL_EXIT) == run("""
        monitor = attached()
        def inside():
            stop()
            time.sleep(0.2)
            report("left")
        monitor._session.hooks.between(inside)
        time.sleep(10)
        """)


def test_ignored_signal_remains_ignored():
    """With nohup, the signal does not end the process."""
    assert (0, "1\n" + COMPLETED) == run("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        monitor = attached()
        report(int(signal.getsignal(signal.SIGTERM)))
        stop()
        monitor.detach()
        """)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "term", ""])
def test_invalid_stop_signal_is_rejected_with_the_allowed_signals(name):
    with pytest.raises(ConfigError, match=r"SIGTERM, SIGHUP, .*not"):
        MonitorConfig(stop_signals=(name,))


def test_stop_signals_from_the_environment_and_conflicts():
    texts = {"SIGTERM, SIGUSR1": ("SIGTERM", "SIGUSR1"), "": ("SIGTERM",), "off": ()}
    found = {text: MonitorConfig().with_environment({"RANKSCOPE_STOP_SIGNALS": text}) for text in texts}

    assert texts == {text: config.stop_signals for text, config in found.items()}
    assert () == MonitorConfig(stop_signals=()).with_environment({}).stop_signals
    with pytest.raises(ConfigError, match="remove it from one of them"):
        MonitorConfig(stop_signals=("SIGUSR2",), stacks_signal="SIGUSR2")
