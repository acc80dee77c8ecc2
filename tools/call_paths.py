"""Count the calls, functions and files of Rankscope that an action passes through, by its public interface only.

    python tools/call_paths.py [--files ACTION]

The actions: `step` is a sampled training step of a model of three modules in the default configuration, with the
publication of its record. `record` is the poll and the commit of one record by the service. `log` is `rankscope import`
of a log of three lines; `sql` counts its scalars, and `page` requests the overview of its run.

The numbers do not depend on the load of the machine. What timers call is left out: the threads TIMERS, callbacks of an
event loop outside a task, and the functions IGNORED. What the publisher does in an idle second counts: on a slow
machine, it becomes idle in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("exporter", "ingest", "storage", "view", "dashboards", "cli")
TRAINING: Final = "step, training thread"
TIMERS: Final = ("rankscope-http", "rankscope-watchdog", "rankscope-hardware", "asyncio_")
IGNORED: Final = (
    *("<module>", "run_jobs.<locals>.repeat", "Pages._prepare", "_Connections.sweep"),
    *("PhaseCounters.due", "_AnswerEnds.log"),
)
"""Functions that do not count, with all that they call: imports, periodic work, and the end of an answer by HTTP."""
STEPS: Final = 3
"""Steps of which the calls of other threads are counted. A thread may end its work on the last one too late."""
LOG: Final = "".join(f"step {step} loss {3 - step / 10} lr 0.001\n" for step in (1, 2, 3))
SERVICE: Final = """
store.path = "store"
service.listen = "{address}"
ingest.poll_seconds = 1.0
ingest.flush_after_seconds = 1.5
"""

Calls = Counter[tuple[str, str, str]]  # thread, file, function


class Profile:
    """A profile function of threads that counts the calls of functions in the packages of Rankscope."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Calls = Counter()
        self._roots = tuple(f"{ROOT / folder}{os.sep}" for folder in FOLDERS)
        self._ignored = threading.local()

    def __call__(self, frame: Any, event: str, _argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._roots):
            return
        if code.co_qualname in IGNORED:  # coroutines are called and return several times
            self._ignored.depth = getattr(self._ignored, "depth", 0) + (1 if event == "call" else -1)
        elif event == "call" and self.is_on and not getattr(self._ignored, "depth", 0) and not _is_timer():
            self.calls[threading.current_thread().name, code.co_filename, code.co_qualname] += 1


def _is_timer() -> bool:
    if threading.current_thread().name.startswith(TIMERS):
        return True
    if asyncio._get_running_loop() is None:  # noqa: SLF001 - get_running_loop() raises, which costs too much here
        return False
    return asyncio.current_task() is None


def train(url: str) -> Calls:
    """Return the calls of a sampled step, and then send records to the service at `url`.

    Calls of other threads than the training thread are the mean of several steps.
    """
    calls = _count_step()
    _send_record(url)
    return calls


def _count_step() -> Calls:
    profile = Profile()
    threading.setprofile(profile)
    monitor, do_step = _training()
    for _ in range(5):
        do_step()
    monitor.current()  # waits for the publisher
    gc.collect()
    gc.disable()  # finalizers would run in any step
    profile.is_on = True
    sys.setprofile(profile)
    do_step()
    sys.setprofile(None)
    for _ in range(STEPS - 1):
        do_step()
    monitor.current()
    time.sleep(2.5)  # the publisher becomes idle after a second
    profile.is_on = False
    gc.enable()
    monitor.detach()
    main = threading.main_thread().name
    return Counter({call: n if call[0] == main else round(n / STEPS + 0.499) for call, n in profile.calls.items()})


def _training() -> tuple[Any, Callable[[], None]]:
    import torch

    import rankscope

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"console": False, "hardware": {"every_seconds": 3600.0}}
    monitor = rankscope.Monitor(settings, total_steps=10).attach(model, optimizer)

    def do_step() -> None:
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, tokens=32)
        monitor.end_step()

    return monitor, do_step


def _send_record(url: str) -> None:
    """Train two steps, and count in the service while it stores the record of the second."""
    os.environ |= {"RANKSCOPE_INGEST_URL": url, "RANKSCOPE_RUN": "r"}
    monitor, do_step = _training()

    def is_stored(step: int) -> bool:
        page = fetch(f"{monitor.address}/metrics").decode()
        return [step, 0] == [value_on(page, "rankscope_step"), value_on(page, "rankscope_ring_uncommitted_records")]

    def has_settled() -> bool:
        """Return whether the service has also committed the state of the run, which a periodic job determines."""
        page = fetch(f"{url}/metrics").decode()
        running = re.search(r'^rankscope_run_state{.*state="running".*} 1', page, re.MULTILINE)
        return running is not None and value_on(page, "rankscope_ingest_rows_pending") == 0

    do_step()
    wait_until(lambda: is_stored(1))
    wait_until(has_settled)
    switch(Path("on"))
    do_step()
    wait_until(lambda: is_stored(2))
    switch(Path("off"))
    monitor.detach()


def switch(file: Path) -> None:
    """Start or stop the count of the process that follows `file`, and wait until it has."""
    file.touch()
    wait_until(lambda: not file.exists())


def run_command(words: list[str], *, is_switched: bool) -> Calls:
    """Run `rankscope WORDS` and count its calls; with `is_switched`, between the files `on` and `off`."""
    profile = Profile()
    profile.is_on = not is_switched

    def follow() -> None:
        while True:
            for path in map(Path, ("on", "off")):
                if path.exists():
                    profile.is_on = path.name == "on"
                    path.unlink()
            time.sleep(0.01)

    if is_switched:
        threading.Thread(target=follow, daemon=True, name="asyncio_switch").start()
    threading.setprofile(profile)
    sys.setprofile(profile)
    sys.argv = ["rankscope", *words]
    with contextlib.suppress(SystemExit):
        import_module("rankscope.__main__").main()
    sys.setprofile(None)
    return profile.calls


class Child:
    """A process in `folder` that runs this file and writes the calls that it counts."""

    def __init__(self, folder: Path, *words: str) -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / "log.txt"
        self._result = folder / f"{'-'.join(words[:2])}.json".replace("/", "-")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--child", str(self._result), *words],
                cwd=folder,
                env={**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self, *, by_signal: bool = False) -> Calls:
        """Wait for the process, and return its calls. Raises AssertionError with its output if it has failed."""
        if by_signal:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(240)
        assert self._result.exists(), self._log.read_text()
        return Counter({(thread, file, name): n for thread, file, name, n in json.loads(self._result.read_text())})


def child(result: str, action: str, *words: str) -> None:
    """Do one action in this process, and write its calls to the file `result`."""
    calls = {
        "train": train,
        "run": lambda *words: run_command([*words], is_switched=False),
        "serve": lambda *words: run_command([*words], is_switched=True),
    }[action](*words)
    Path(result).write_text(json.dumps([[*call, n] for call, n in calls.items()]))


def measure(folder: Path) -> dict[str, Calls]:
    """Return the calls of each action. The processes write to `folder`."""
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as children:

        def start(name: str, *words: str) -> Child:
            process = Child(folder / name, *words)
            children.callback(process.kill)
            return process

        address = f"127.0.0.1:{free_port()}"
        (folder / "train").mkdir()
        (folder / "train" / "service.toml").write_text(SERVICE.format(address=address))
        service = start("train", "serve", "serve", "service.toml", "--quiet")
        step = start("train", "train", f"http://{address}")
        found = _measure_log(start, folder / "log")
        found["step"] = step.end()
        found["record"] = service.end(by_signal=True)
    main = threading.main_thread().name
    found[TRAINING] = Counter({call: n for call, n in found["step"].items() if call[0] == main})
    return found


def _measure_log(start: Callable[..., Child], folder: Path) -> dict[str, Calls]:
    folder.mkdir()
    (folder / "three.log").write_text(LOG)
    log = start("log", "run", "import", "three.log", "--run", "l", "--store", "store").end()
    address = f"127.0.0.1:{free_port()}"
    pages = start("log", "serve", "view", "store", "--listen", address)
    sql = start("log", "run", "sql", "--store", "store", "select count(*) from scalars")
    wait_until(lambda: fetch(f"http://{address}/"))
    found = {"log": log, "sql": sql.end()}
    time.sleep(3)  # after two seconds, the pages prepare themselves, and the first page then needs fewer calls
    switch(folder / "on")
    fetch(f"http://{address}/runs/l")
    switch(folder / "off")
    return found | {"page": pages.end(by_signal=True)}


def numbers(calls: Calls) -> dict[str, int]:
    """Return the number of calls, and those of the different functions and files."""
    functions = {(file, name) for _, file, name in calls}
    return {"calls": calls.total(), "functions": len(functions), "files": len({file for file, _ in functions})}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fetch(url: str) -> bytes:
    """Return the body of an answer; nothing if no server answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bytes(answer.read())
    except OSError:
        return b""


def value_on(page: str, metric: str) -> float | None:
    """Return the first value of a metric on a metrics page."""
    found = re.search(rf"^{metric}(?:{{.*}})? (.*)$", page, re.MULTILINE)
    return None if found is None else float(found[1])


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", metavar="ACTION", help="list the files of this action")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    for name, calls in found.items():
        print(f"{name:24}" + "  ".join(f"{what} {number:6}" for what, number in numbers(calls).items()))
    for file in sorted({file for _, file, _ in found.get(given.files, ())}):
        print(Path(file).relative_to(ROOT))


if __name__ == "__main__":
    main()
