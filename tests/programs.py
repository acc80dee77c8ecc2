"""Python programs for tests, each in a process forked from one that has imported torch and the exporter.

The child has a separate `__main__`, environment and standard streams. At its end it waits for threads, calls the
functions of `atexit`, and destroys its own objects, but no modules unless the test needs a `whole_exit`. Programs that
depend on the import of modules, or that spawn children, need `subprocess` instead.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import rankscope.__main__

SERVER = """
import atexit, gc, json, os, sys, threading, types
import IMPORTED
gc.collect()
gc.freeze()  # an exiting program then searches only its own objects for cycles, not three times all of torch
def exit_code(pid, options=0):
    pid, status = os.waitpid(pid, options)
    return os.waitstatus_to_exitcode(status) if pid else ""
for line in sys.stdin:
    job = json.loads(line)
    if "poll" in job:
        print(exit_code(job["poll"], os.WNOHANG), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    if job["waits"]:
        print(exit_code(pid), flush=True)
else:
    sys.exit()
os.setsid()
for number, path in enumerate([os.devnull, *job["streams"]]):
    stream = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
    os.dup2(stream, number)
    os.close(stream)
os.environ.clear()
os.environ.update(job["environment"])
if "coverage" in sys.modules and (recorder := sys.modules["coverage"].Coverage.current()):  # make test-mutants
    recorder.switch_context(os.environ["PYTEST_CURRENT_TEST"])
os.chdir(job["folder"])
sys.argv[:] = job["arguments"]
sys.modules["__main__"] = main = types.ModuleType("__main__")
if "script" in job:
    main.__file__ = job["script"]
    sys.path[0] = os.path.dirname(job["script"])
status = 0
try:
    exec(compile(job["code"], job.get("script", "<string>"), "exec"), main.__dict__)
except SystemExit as end:
    if job["whole_exit"] or not isinstance(end.code, int | None):
        raise
    status = end.code or 0
if not job["whole_exit"]:
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)
"""

BEFORE_TWO_RANKS = """
import json, os, tempfile
import torch.distributed as dist
folder = tempfile.mkdtemp()
rank = 1 if os.fork() == 0 else 0  # before any thread is started
"""

AFTER_TWO_RANKS = """
def run_rank():
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = main()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()

if rank == 1:
    try:
        run_rank()
        os._exit(0)
    finally:
        os._exit(1)
run_rank()
_, status = os.wait()
assert 0 == status
for one in range(2):
    print(open(f"{folder}/{one}.json").read())
"""
"""The first rank prints the results of both ranks. A failing rank ends the program with a separate exit status."""


class Started:
    """A program that runs in parallel with the test, in a separate session. It has the methods of `Popen`."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        with self._server.lock:
            if self.returncode is None:
                self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return its exit code. The caller must kill a program that does not end in time."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that has imported the modules of its programs."""

    def __init__(self, *imported: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER.replace("IMPORTED", ", ".join(imported))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self._process.kill)
        self.lock = threading.RLock()  # threads of tests also poll: each question must get its own answer

    def run(
        self,
        code: str,
        environment: dict[str, str],
        seconds: float,
        folder: Path | None = None,
        *,
        whole_exit: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `code`; return its exit code and all output, also of its children. Kill all after the timeout."""
        with tempfile.TemporaryDirectory() as pipes, ThreadPoolExecutor(2) as readers:
            streams = [Path(pipes) / name for name in ("out", "err")]
            for stream in streams:
                os.mkfifo(stream)
            texts = [readers.submit(stream.read_text, errors="replace") for stream in streams]
            with self.lock:
                pid = self._fork(code, ["-c"], streams, environment, folder, waits=True, whole_exit=whole_exit)
                watchdog = threading.Timer(seconds, os.killpg, (pid, signal.SIGKILL))
                watchdog.start()
                try:
                    status = int(self._answer())
                    out, err = (text.result() for text in texts)
                finally:
                    watchdog.cancel()
        return subprocess.CompletedProcess(["python", "-c", code], status, out, err)

    def start(self, code: str, argv: Sequence[str], log: Path, environment: dict[str, str], **script: str) -> Started:
        """Start `code` and return immediately. Its output is appended to `log`."""
        log.touch()
        return Started(self, self._fork(code, argv, [log, log], environment, None, **script))

    def exit_code(self, pid: int) -> int | None:
        """Return the exit status of a started program, or None while it runs. Call it once after the end."""
        answer = self._ask(json.dumps({"poll": pid})).strip()
        return int(answer) if answer else None

    def _fork(
        self,
        code: str,
        arguments: Sequence[str],
        streams: Sequence[Path],
        environment: dict[str, str],
        folder: Path | None,
        *,
        waits: bool = False,
        whole_exit: bool = False,
        **more: str,
    ) -> int:
        job = {
            "code": code,
            "arguments": list(arguments),
            "environment": environment,
            "folder": str(folder or Path.cwd()),
            "streams": [str(stream) for stream in streams],
            "waits": waits,
            "whole_exit": whole_exit,
        }
        return int(self._ask(json.dumps(job | more)))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        with self.lock:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that runs programs has ended"
        return line


OF_TRAINING = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.profiler", "psutil", "rankscope"),
    *("rankscope_exporter", "tests.preloaded"),
)
OF_COMMANDS = (
    *("numpy", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet", "duckdb", "deltalake", "rich.table"),
    "tests.preloaded_commands",
    *("rankscope_ingest.__main__", "rankscope_ingest.service.main"),
    *("rankscope_storage.connection", "rankscope_storage.api.store", "rankscope_storage.formats"),
)
"""Modules that most commands import, mainly those of the service. The import takes longer than the commands."""

SERVICE = """
import sys
from {module} import main
sys.exit(main())
"""


COMMAND = """
import os, sys, traceback
sys.argv[:] = [{path!r}, *{arguments!r}]
from rankscope.__main__ import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
except BaseException:
    code = 1
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""
"""A command that ends without the destruction of all modules, which takes as long as many commands."""


@cache
def server_of(*imported: str) -> Server:
    """Return the process that has imported these modules. There is one for each test process."""
    return Server(*imported)


def run_program(
    code: str,
    *,
    folder: Path | None = None,
    seconds: float = 90.0,
    imported: Sequence[str] = OF_TRAINING,
    whole_exit: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `code` like `python -c` after the import of `imported`; `whole_exit`: exit like any interpreter."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return server_of(*imported).run(code, told, seconds, folder, whole_exit=whole_exit)


def run_command(
    *arguments: object, folder: Path | None = None, seconds: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `rankscope ARGUMENTS`, in this environment updated by `environment`. It has no standard input."""
    code = COMMAND.format(path=rankscope.__main__.__file__, arguments=list(map(str, arguments)))
    return server_of(*OF_COMMANDS).run(code, {**os.environ, **environment}, seconds, folder)


def start_script(script: Path, *arguments: object, log: Path, **environment: str) -> Started:
    """Start a script like `python script`, in parallel with the test, which must end it."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    server, argv = server_of(*OF_TRAINING), [str(script), *map(str, arguments)]
    return server.start(script.read_text(), argv, log, told, script=str(script))


def start_module(module: str, *arguments: object, log: Path, **environment: str) -> Started:
    """Start `main()` of a module of the services like `python -m`, in parallel with the test, which must end it."""
    code, argv = SERVICE.format(module=module), [module, *map(str, arguments)]
    return server_of(*OF_COMMANDS).start(code, argv, log, {**os.environ, **environment})


def run_two_ranks(code: str, *, seconds: float = 300.0) -> list[dict[str, Any]]:
    """Return the results of `main()` in `code` on two Gloo ranks. It can use `rank`, `dist`, `json` and `folder`."""
    done = run_program(f"{BEFORE_TWO_RANKS}{code}{AFTER_TWO_RANKS}", seconds=seconds)
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def warm_processes() -> ForkServerContext:
    """Return a multiprocessing context whose processes have imported torch, with the environment of the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "tests.preloaded",
)
