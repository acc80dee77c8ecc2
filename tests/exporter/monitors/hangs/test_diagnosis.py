"""Stacks of all threads, in which order they are published, and the signal that publishes them."""

import dis
import os
import textwrap
import threading
import time
from typing import Any

import pytest
from tests.programs import run_program

from rankscope_contract.model.events import Event
from rankscope_contract.model.stacks import MAX_DETAILS_BYTES, Collective, FlightRecord, Frame, StackDump, ThreadStack
from rankscope_exporter.monitors.hangs import diagnosis
from rankscope_exporter.monitors.hangs.diagnosis import (
    Diagnosis,
    called,
    innermost_call,
    read_stacks,
    take_stacks,
    within,
)
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.record import StepRecord
from rankscope_ingest.runs.blame import WaitPlace, place_of

RECORDED = """\
Fatal Python error: none of our lines

Thread 0x00000000000000ff (most recent call first):
  File "/job/data.py", line 12 in fetch
  File "/job/a \\u20ac.py", line ??? in ???

Thread 0x0000000000000010 [worker] (most recent call first):

Current thread 0x0000000000000001 (most recent call first):
  File "/job/train.py", line 88 in step
  File "/job/train.py", line 12 in <module>

Extension modules: torch._C (total: 1)
"""


def test_output_of_faulthandler_is_parsed():
    dump = read_stacks(RECORDED, "signal", 0xFF, {0xFF: "MainThread", 1: "rankscope-http"})

    frames = (Frame("/job/data.py", 12, "fetch"), Frame("/job/a \\u20ac.py", 0, "???"))
    own = (Frame("/job/train.py", 88, "step"), Frame("/job/train.py", 12, "<module>"))
    training = ThreadStack(ident=0xFF, name="MainThread", is_training=True, frames=frames)
    ours = ThreadStack(ident=1, name="rankscope-http", is_ours=True, frames=own)
    assert StackDump(reason="signal", threads=(training, ThreadStack(ident=0x10, frames=()), ours)) == dump


def test_waiting_threads_are_shown_with_their_frames():
    lock, waiting = threading.Lock(), threading.Event()

    def wait_for_the_lock():
        waiting.set()
        with lock:
            pass

    with lock:
        thread = threading.Thread(target=wait_for_the_lock, name="blocked-worker", daemon=True)
        thread.start()
        waiting.wait(10)
        dump = take_stacks("call", threading.get_ident())
    thread.join(10)
    by_name = {stack.name: stack for stack in dump.threads}

    assert "wait_for_the_lock" in {frame.function for frame in by_name["blocked-worker"].frames}
    assert dump.threads[0].is_training
    assert __name__.rpartition(".")[2] in dump.training_thread.frames[0].file  # without the frames that take the stacks
    assert "test_waiting_threads_are_shown_with_their_frames" == dump.training_thread.frames[0].function


def test_dump_fits_its_limit_and_keeps_the_training_thread():
    frames = tuple(Frame(f"/a/very/long/path/to/some/module_{i}.py", i, "function") for i in range(100))
    threads = [ThreadStack(ident=i, frames=frames, name=f"worker-{i}", is_training=i == 0) for i in range(100)]
    cut = within(StackDump(reason="hang", threads=tuple(threads)), MAX_DETAILS_BYTES)

    assert len(cut.to_json().encode()) <= MAX_DETAILS_BYTES
    assert frames == cut.training_thread.frames
    assert 100 == len(cut.threads) + cut.left_out
    assert len(cut.threads) > 50

    frames = tuple(Frame("x" * 2000, i, "y" * 400) for i in range(100))
    monster = StackDump(reason="hang", threads=(ThreadStack(ident=1, is_training=True, frames=frames),))
    cut = within(monster, MAX_DETAILS_BYTES)
    assert frames[:5] == cut.training_thread.frames
    assert len(cut.to_json().encode()) <= MAX_DETAILS_BYTES


def loop_then_read(end: int, is_over: threading.Event) -> None:
    while not is_over.is_set():
        for _ in range(10_000):
            pass
    os.read(end, 1)


def test_training_thread_has_the_name_of_its_call_and_a_python_loop_has_none(eventually):
    (end, begin), is_over = os.pipe(), threading.Event()
    thread = threading.Thread(target=loop_then_read, args=(end, is_over), daemon=True)
    thread.start()

    def call() -> str | None:
        found = innermost_call(thread.ident or 0)
        return found[1] if found is not None and found[0].function == "loop_then_read" else None

    eventually(lambda: call() == "")
    is_over.set()
    eventually(lambda: call() == "posix.read")
    dump = take_stacks("hang", thread.ident or 0)
    os.write(begin, b"x")
    thread.join(10)
    os.close(begin)
    os.close(end)

    assert {"posix.read", None} == {stack.calls for stack in dump.threads}
    assert "posix.read" == dump.threads[0].calls
    assert WaitPlace.OUTSIDE is place_of(dump)
    assert None is innermost_call(1)  # no thread
    assert None is take_stacks("call", threading.get_ident()).threads[0].calls


class Lazy:
    """Its attributes may run any code."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


NAMES = {"time": time, "sleep": time.sleep, "begin": lambda _: None, "work": Lazy()}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *(("sleep(1)", "time.sleep"), ("time.sleep(1)", "time.sleep"), ("time.sleep(*[1])", "time.sleep")),
        *(("local.read(1)", ".read"), ("time.sleep(seconds=1)", "time.sleep"), ("float(x)", "builtins.float")),
        *(("work.wait()", ".wait"), ("begin(x).wait()", ".wait"), ("begin(1)(2)", None), ("table[0](2)", None)),
        *(("unknown(1)", None), ("time.unknown(1)", ".unknown")),
    ],
)
def test_name_belongs_to_the_last_call_of_the_line(source, name):
    """In a chain of calls, the last call starts first and ends last in the source."""
    code = compile(source, "<test>", "exec")
    call = [one.offset for one in dis.get_instructions(code) if one.opname.startswith("CALL")][-1]

    assert name == called(code, call, NAMES)


RECORD = FlightRecord(
    reason="hang",
    collectives=(Collective(op="all_reduce", backend="gloo", group="dp", seq=5, is_pending=True, age_seconds=9.0),),
    recorded=1,
)
HANG = Event(type="hang")


class Published(list[StepRecord]):
    """The published records of a diagnosis, and its errors. Events of the type `refused` cannot be published."""

    def __init__(self, refused: str = "", **options: Any) -> None:
        self.refused = refused
        self.boundary = ErrorBoundary()
        self.diagnosis = Diagnosis(3, self.publish, lambda: 41, self.boundary, **options)

    def publish(self, record: StepRecord) -> None:
        if record.events[0].type == self.refused:
            failing()
        self.append(record)

    def types(self) -> list[str]:
        return [event.type for record in self for event in record.events]


def failing(*_args: object) -> None:
    raise OSError("no such device")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a process with a readable flight record."""
    monkeypatch.setattr(diagnosis, "take_flight_record", lambda _reason, _report: RECORD)


def test_hanging_flight_record_blocks_one_thread(monkeypatch):
    never, asked = threading.Event(), []

    def hold(_reason, _report):
        asked.append(threading.current_thread())
        never.wait(30)

    monkeypatch.setattr(diagnosis, "take_flight_record", hold)
    monkeypatch.setattr(diagnosis, "FLIGHT_SECONDS", 0.05)
    published = Published()
    taken = [published.diagnosis.take("hang", first=HANG) for _ in range(3)]
    never.set()

    assert [None] * 3 == [each.flight for each in taken]
    assert ["hang", "stacks"] * 3 == published.types()
    assert {41} == {record.step for record in published}
    assert 1 == len(asked)


def test_signal_handler_gets_stacks_during_a_publication():
    """Two consecutive signals: the second handler interrupts the first one on the training thread."""
    published, asked = [], []

    def publish(record):
        published.append(record)
        asked.append(taking.take("call"))

    def interrupted():
        asked.append(taking.take("call"))

    taking = Diagnosis(0, publish, lambda: 7, ErrorBoundary())
    training = threading.Thread(target=interrupted, daemon=True)
    training.start()
    training.join(30)

    assert (2, 1) == (len(asked), len(published))
    assert "interrupted" in [frame.function for thread in asked[0].stacks.threads for frame in thread.frames]


def test_caller_does_not_wait_for_a_blocked_thread(monkeypatch):
    monkeypatch.setattr(diagnosis, "LOCK_SECONDS", 0.05)
    held, freed = threading.Event(), threading.Event()
    taking = Diagnosis(0, lambda _: (held.set(), freed.wait(30)), lambda: 7, ErrorBoundary())
    watchdog = threading.Thread(target=taking.publish, args=(HANG,), daemon=True)
    watchdog.start()
    held.wait(30)
    taken = taking.take("call")
    freed.set()
    watchdog.join(30)

    assert 7 == taken.step
    assert taken.stacks.threads


def test_flight_record_is_published_if_stacks_fail(recorded, monkeypatch):
    monkeypatch.setattr(diagnosis, "take_stacks", failing)
    published = Published()
    taken = published.diagnosis.take("hang", first=HANG)

    assert (RECORD, (), 1) == (taken.flight, taken.stacks.threads, published.boundary.count)
    assert ["hang", "flight_record"] == published.types()


@pytest.mark.parametrize("refused", ["hang", "stacks", "flight_record"])
def test_failed_event_does_not_stop_the_others(refused, recorded):
    published = Published(refused)
    taken = published.diagnosis.take("hang", first=HANG)

    assert [kind for kind in ("hang", "stacks", "flight_record") if kind != refused] == published.types()
    assert (RECORD, 1) == (taken.flight, published.boundary.count)


def test_failed_recorder_is_reported_after_the_reading(monkeypatch):
    """A report takes locks that a hanging training thread may hold."""
    held, published = threading.Event(), Published()

    def take(_reason, report):
        report("reading the flight record of nccl", TimeoutError("no answer within 1.5 s"))
        return RECORD

    monkeypatch.setattr(diagnosis, "take_flight_record", take)
    published.boundary.on_first = lambda *_: held.wait(60)
    taken = published.diagnosis.take("hang")
    held.set()

    assert RECORD == taken.flight
    assert ["stacks", "flight_record"] == published.types()


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
