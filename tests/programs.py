"""Python programs for tests, each in a process of its own that ends as it likes, although torch is imported only once.

A first process imports torch, what its optimizers need, and the exporter (seconds), and is forked for each program. The
child has a `__main__`, an environment and standard streams of its own, and runs off its end as any interpreter does.
What depends on how modules are imported, or on spawned children of its own, needs `subprocess` instead.
`warm_processes()` does the same for functions, which end as `multiprocessing` has it.
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
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

SERVER = """
import gc, json, os, sys, types
import torch, torch._dynamo, torch.distributed, rankscope_exporter
gc.collect()
gc.freeze()  # a program that ends looks for cycles in what is its own, and not three times in all of torch
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
os.setsid()
for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), *((path, os.O_WRONLY) for path in job["streams"])]):
    stream = os.open(path, flags)
    os.dup2(stream, number)
    os.close(stream)
os.environ.clear()
os.environ.update(job["environment"])
os.chdir(job["folder"])
sys.argv[:] = ["-c"]
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec(compile(job["code"], "<string>", "exec"), main.__dict__)
"""

BEFORE_TWO_RANKS = """
import json, os, tempfile
import torch.distributed as dist
folder = tempfile.mkdtemp()
rank = 1 if os.fork() == 0 else 0  # before any thread is started
"""

BEHIND_TWO_RANKS = """
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
"""The first rank prints what both have found. A rank that fails ends the program with a status of its own."""


class Server:
    """The process that has imported torch. One program at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self._process.kill)

    def run(self, code: str, environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run `code` and return its exit code and what it and its children wrote; kill all after so many seconds."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as readers:
            streams = [Path(folder) / name for name in ("out", "err")]
            for stream in streams:
                os.mkfifo(stream)
            texts = [readers.submit(stream.read_text, errors="replace") for stream in streams]
            job = {
                "code": code,
                "environment": environment,
                "folder": str(Path.cwd()),
                "streams": [str(stream) for stream in streams],
            }
            pid = int(self._ask(json.dumps(job)))
            watchdog = threading.Timer(seconds, os.killpg, (pid, signal.SIGKILL))
            watchdog.start()
            try:
                status = int(self._answer())
                out, err = (text.result() for text in texts)
            finally:
                watchdog.cancel()
        return subprocess.CompletedProcess(["python", "-c", code], status, out, err)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that runs programs has ended"
        return line


_servers: list[Server] = []


def run_program(code: str, *, seconds: float = 90.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as `python -c` would, in this environment with `environment` over it."""
    if not _servers:
        _servers.append(Server())
    return _servers[0].run(code, {**os.environ, "OMP_NUM_THREADS": "1", **environment}, seconds)


def run_two_ranks(code: str, *, seconds: float = 300.0) -> list[dict[str, Any]]:
    """Return what `main()`, as `code` defines it, returns on each of two ranks that are joined by gloo.

    `code` knows its `rank`, `dist`, `json` and a `folder` that both share.
    """
    done = run_program(f"{BEFORE_TWO_RANKS}{code}{BEHIND_TWO_RANKS}", seconds=seconds)
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def warm_processes() -> ForkServerContext:
    """Return a multiprocessing context whose processes find torch imported; their environment is that of the first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "numba",
    "rankscope_exporter",
)
