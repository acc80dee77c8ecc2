"""Train the corpus with the product as it is by default, and count the faults that reach a person.

    python -m benchmarks.detection [--seed 1] [--only NAME …] [--healthy 2] [--hangs] [--folder FOLDER]

Starts `rankscope serve`, which sends messages to a local receiver, and two ranks, which train all runs one after the
other. A fault is told if an incident at its step or up to 20 (60) steps later was delivered. Messages before a fault
and in healthy runs are false. The folder keeps the store and `results.json`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from benchmarks.detection.faults import Fault, corpus

ROOT: Final = pathlib.Path(__file__).parents[2]
AT: Final = 201
"""Step of each fault; a fault is observed for 60 steps."""

DELIVERED: Final = """
    SELECT run, step, rank, rule, kind, tensor, op, severity, value FROM events
    WHERE type = 'incident' AND json_extract_string(details, '$.state') = 'notified' ORDER BY run, step, ts"""


class Receiver(BaseHTTPRequestHandler):
    """Accepts each message."""

    def do_POST(self) -> None:
        """Answer with 200."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def free_port() -> int:
    """Return a free TCP port of the loopback address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def jobs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs: one for each chosen fault, and the healthy ones."""
    chosen = [one for one in corpus() if (args.hangs or not one.is_slow) and (not args.only or one.name in args.only)]
    jobs = [
        {"seed": args.seed * 1000 + place, "steps": AT + 60, "fault": one.name, "at": AT, "scaler": one.has_scaler}
        for place, one in enumerate(chosen if args.only is None or args.only else [])
    ]
    for number in range(args.healthy):
        is_last = number == args.healthy - 1 and args.healthy > 1
        jobs.append({"seed": args.seed * 1000 + 900 + number, "steps": 2000, "fault": None, "at": 0, "scaler": is_last})
    return [job | {"run": f"d{place:03}"} for place, job in enumerate(jobs)]


def run(jobs: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Train `jobs` on two ranks beside a service, whose store is in `folder`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    environment = own | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with ExitStack() as stack:
        receiver = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Receiver))
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        stack.callback(receiver.shutdown)
        service = f"127.0.0.1:{free_port()}"
        log = stack.enter_context((folder / "service.log").open("wb"))
        command = [sys.executable, "-m", "rankscope", "serve", "--store", str(folder / "store"), "--listen", service]
        command += ["--notify", f"json://127.0.0.1:{receiver.server_address[1]}"]
        served = stack.enter_context(_ended(subprocess.Popen(command, env=environment, stdout=log, stderr=log)))
        _wait_for(f"http://{service}/healthz", served)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        ranks = []
        for rank in range(2):
            variables = environment | address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            output = stack.enter_context((folder / f"rank-{rank}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.detection.training"],
                env=variables | {"RANKSCOPE_INGEST_URL": f"http://{service}"},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else output,
                stderr=output,
                text=True,
            )
            ranks.append(stack.enter_context(_ended(process)))
            assert process.stdin is not None
            process.stdin.write("".join(json.dumps(job) + "\n" for job in jobs))
            process.stdin.close()
        assert ranks[0].stdout is not None
        names = {job["run"]: job["fault"] or "healthy" for job in jobs}
        for number, line in enumerate(ranks[0].stdout, 1):
            done = json.loads(line)
            print(f"{number} of {len(jobs)}: {names[done['run']]}, {done['seconds']} s", file=sys.stderr, flush=True)
        codes = [process.wait(60) for process in ranks]
        assert codes == [0, 0], f"a rank has failed: see {folder}/rank-0.log"
        time.sleep(15)  # late incidents settle and are delivered
        served.terminate()
        served.wait(60)


class _ended(ExitStack):  # noqa: N801 - a function that is a context manager
    """End `process` at the end of the context."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        super().__init__()
        self.process = process
        self.callback(process.kill)

    def __enter__(self) -> subprocess.Popen[Any]:  # type: ignore[override]
        return self.process


def _wait_for(url: str, process: subprocess.Popen[Any]) -> None:
    for _ in range(150):
        assert process.poll() is None, "the service has ended: see service.log"
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(url)


def judged(job: dict[str, Any], messages: list[dict[str, Any]], fault: Fault | None) -> dict[str, Any]:
    """Return what reached a person in one run."""
    before = [one for one in messages if fault is None or (one["step"] or 0) < AT]
    told = [one for one in messages if one not in before]
    first = min(told, key=lambda one: one["step"], default=None)
    found: dict[str, Any] = {"run": job["run"], "fault": job["fault"], "false": before, "messages": len(told)}
    if fault is None or first is None:
        return found
    found |= {"after": first["step"] - AT, "first": first, "rules": [one["rule"] for one in told]}
    found["rank_is_right"] = None if fault.rank is None or first["rank"] is None else first["rank"] == fault.rank
    named = first["tensor"]
    found["tensor_is_right"] = None if fault.tensor is None or named is None else named.startswith(fault.tensor)
    return found


def report(jobs: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Print a line for each run, and the sums."""
    import rankscope

    rows = rankscope.connect(folder / "store").sql(DELIVERED)
    columns, messages = [one[0] for one in rows.description], collections.defaultdict(list)
    for row in rows.fetchall():
        messages[row[0]].append(dict(zip(columns, row, strict=True)))
    faults = {fault.name: fault for fault in corpus()}
    results = [judged(job, messages[job["run"]], faults.get(job["fault"])) for job in jobs]
    (folder / "results.json").write_text(json.dumps(results, indent=1, default=str))
    for result in results:
        if result["fault"] is None:
            print(f"healthy {result['run']}: {len(result['false'])} false: {[one['rule'] for one in result['false']]}")
            continue
        first, mark = result.get("first"), " (held out)" if faults[result["fault"]].held_out else ""
        if first is None:
            print(f"{result['fault']}{mark}: not told")
        else:
            where = f"rank {first['rank']}, {first['tensor'] or first['op']}"
            print(f"{result['fault']}{mark}: +{result['after']} {first['rule']}, {where}; {result['rules']}")
    told = [one for one in results if one["fault"]]
    for limit in (20, 60):
        within = [one for one in told if one.get("after", 10**6) <= limit]
        held_out = sum(faults[one["fault"]].held_out for one in within)
        print(f"told within {limit} steps: {len(within)} of {len(told)}, of those held out {held_out}")
    for what in ("rank", "tensor"):
        verdicts = [one[f"{what}_is_right"] for one in told if one.get(f"{what}_is_right") is not None]
        print(f"first message names the right {what}: {sum(verdicts)} of {len(verdicts)}")
    counts = [one["messages"] for one in told if one["messages"]]
    print(f"one message: {counts.count(1)} of {len(counts)} told faults")
    print(f"false messages: {sum(len(one['false']) for one in results)} in {sum(job['steps'] for job in jobs)} steps")


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of faults; without a name, none")
    parser.add_argument("--healthy", type=int, default=0, help="number of healthy runs of 2,000 steps")
    parser.add_argument("--hangs", action="store_true", help="the two faults that take seven minutes each, too")
    parser.add_argument("--folder", type=pathlib.Path, help="for store and results; by default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or pathlib.Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        jobs = jobs_of(args)
        run(jobs, folder)
        report(jobs, folder)


if __name__ == "__main__":
    main()
