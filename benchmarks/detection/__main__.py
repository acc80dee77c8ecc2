"""Train the corpus with the product as it is by default, and count the faults that reach a person.

    python -m benchmarks.detection [--seed 1] [--quick] [--only NAME …] [--healthy 2] [--slowdowns 12] [--hangs]
        [--width 48] [--folder FOLDER]

Starts `rankscope serve`, which sends messages to a local receiver, and two ranks, which train all runs one after the
other. A fault is reported if an incident at its step or up to 20 (60) steps later was delivered, and the healthy run
of the same seed had no such message. Messages of rules about time are counted only for faults of time: ranks that
share cores with other work are slow now and then. The folder keeps the store for `rankscope rules replay`, and
`results.json`. Runs that are done are in `runs.jsonl`; the same command trains only the others.
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

from benchmarks.detection.faults import MOST_SLOWDOWNS, Fault, corpus, every_fault, message_cases, slowdown

from rankscope_storage.base.rule_names import RUN_SLOW, RUN_STALLED, SLOW_RANK

ROOT: Final = pathlib.Path(__file__).parents[2]
AT: Final = 201
"""Step of each fault."""
LONG: Final = 2000
"""Steps of a healthy run that is no twin of a run with a fault."""
SEEDS: Final = 8
TWIN_STEPS: Final = 2
OF_TIME: Final = frozenset({SLOW_RANK, RUN_SLOW, RUN_STALLED, "DataWait"})

DELIVERED: Final = """
    SELECT run, step, rank, rule, kind, tensor, op, severity, value FROM events
    WHERE type = 'incident' AND json_extract_string(details, '$.state') = 'notified' ORDER BY run, ts"""


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
    """Return the runs: one for each chosen fault, its healthy twins, and long healthy runs."""
    chosen = [*corpus(), *message_cases()]
    if args.only is not None:
        chosen = [one for one in every_fault().values() if one.name in args.only]
    elif args.quick:
        chosen = chosen[::7]
    chosen = [one for one in chosen if args.hangs or not one.is_slow] + [*map(slowdown, range(args.slowdowns))]
    jobs = [
        _job(args, place % SEEDS, AT + one.steps, scaler=one.has_scaler) | {"fault": one.name}
        for place, one in enumerate(chosen)
    ]
    twins = {(job["seed"], job["scaler"]): job | {"fault": None, "steps": AT + 60} for job in jobs}
    long = [_job(args, 900 + place, LONG, scaler=0 < place == args.healthy - 1) for place in range(args.healthy)]
    return [*twins.values(), *jobs, *long]


def _job(args: argparse.Namespace, place: int, steps: int, *, scaler: bool) -> dict[str, Any]:
    seed = args.seed * 1000 + place
    return {"seed": seed, "steps": steps, "at": AT, "scaler": scaler, "width": args.width, "fault": None}


def run(jobs: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Train `jobs` on two ranks. The store of their service is in `folder`."""
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
        for number, line in enumerate(ranks[0].stdout, 1):
            done = json.loads(line)
            with (folder / "runs.jsonl").open("a") as runs:
                runs.write(line)
            name = done["fault"] or "healthy"
            print(f"{number} of {len(jobs)}: {name}, {done['seconds']} s", file=sys.stderr, flush=True)
        codes = [process.wait(60) for process in ranks]
        assert codes == [0, 0], f"a rank has failed: see {folder}/rank-0.log"
        has_lists = any(one.name == job["fault"] for one in message_cases() for job in jobs)
        time.sleep(75 if has_lists else 15)  # late incidents settle and are delivered; lists, at the end of a minute
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


def judged(
    job: dict[str, Any], messages: list[dict[str, Any]], twin: list[dict[str, Any]], fault: Fault
) -> dict[str, Any]:
    """Return the messages that the fault explains, in order of delivery, the verdict on the first, and the others."""
    told = [
        one
        for one in messages
        if (one["step"] is None or one["step"] >= AT)
        and (one["rule"] in OF_TIME) == fault.of_time
        and (fault.of_time or not any(_is_same(one, other) for other in twin))
    ]
    found = {"fault": fault.name, "run": job["run"], "seed": job["seed"], "messages": told}
    found["false"] = [one for one in messages if one not in told and not any(_is_same(one, other) for other in twin)]
    if not told:
        return found
    first = told[0]
    expected = {"rank": fault.rank, "tensor": fault.tensor, "op": fault.phase if first["rule"] == SLOW_RANK else None}
    return found | {
        "after": min((AT if one["step"] is None else one["step"]) - AT for one in told),
        "is_right": {
            name: str(first[name]).startswith(str(value))
            for name, value in expected.items()
            if value is not None and first[name] is not None
        },
    }


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    alike = all(one[name] == other[name] for name in ("rule", "tensor", "op"))
    return alike and abs((one["step"] or 0) - (other["step"] or 0)) <= TWIN_STEPS


def report(done: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Print a line for each run, and the sums; write them into `results.json`."""
    import rankscope

    rows = rankscope.connect(folder / "store").sql(DELIVERED)
    columns, messages = [one[0] for one in rows.description], collections.defaultdict(list)
    for row in rows.fetchall():
        messages[row[0]].append(dict(zip(columns, row, strict=True)))
    faults, healthy = every_fault(), [job for job in done if job["fault"] is None]
    twins = {(job["seed"], job["scaler"]): messages[job["run"]] for job in healthy if job["steps"] < LONG}
    results = [
        judged(job, messages[job["run"]], twins[job["seed"], job["scaler"]], faults[job["fault"]])
        for job in done
        if job["fault"] is not None
    ]
    false = [(job, messages[job["run"]]) for job in healthy]
    (folder / "results.json").write_text(json.dumps(results, indent=1, default=str))
    for result in results:
        print(_line(result, faults[result["fault"]]))
    counted = {one.name for one in corpus()}
    _sums("corpus", [one for one in results if one["fault"] in counted], faults)
    _sums("further cases", [one for one in results if one["fault"] not in counted], faults)
    for job, found in false:
        for one in found:
            print(f"false in healthy run {job['run']}: {one['rule']}, step {one['step']}, {one['tensor'] or one['op']}")
    steps = sum(job["steps"] for job in healthy)
    print(f"false messages in healthy runs: {sum(len(found) for _, found in false)} in {steps} steps")
    others = collections.Counter(one["rule"] for result in results for one in result["false"])
    print(f"messages in runs with faults that the fault does not explain: {dict(others)}")


def _line(result: dict[str, Any], fault: Fault) -> str:
    name = fault.name + " (held out)" * fault.held_out
    if not result["messages"]:
        return f"{name}: not reported"
    first, others = result["messages"][0], collections.Counter(one["rule"] for one in result["messages"])
    wrong = "".join(f", wrong {what}" for what, is_right in result["is_right"].items() if not is_right)
    where = f"rank {first['rank']}, {first['tensor'] or first['op']}"
    return f"{name}: +{result['after']} {first['rule']}, {where}{wrong}; {dict(others)}"


def _sums(title: str, results: list[dict[str, Any]], faults: dict[str, Fault]) -> None:
    if not results:
        return
    for limit in (20, 60):
        within = [one for one in results if one.get("after", 10**6) <= limit]
        held_out = sum(faults[one["fault"]].held_out for one in within)
        print(f"{title}: reported within {limit} steps: {len(within)} of {len(results)}, of those held out {held_out}")
    told = [one for one in results if one["messages"]]
    for what, label in (("rank", "rank"), ("tensor", "tensor"), ("op", "phase of a slow rank")):
        verdicts = [one["is_right"][what] for one in told if what in one["is_right"]]
        print(f"{title}: first message names the right {label}: {sum(verdicts)} of {len(verdicts)}")
    right = sum(len(one["messages"]) == faults[one["fault"]].messages for one in told)
    print(f"{title}: number of messages is that of causes: {right} of {len(told)}")


def _key(job: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in sorted(job.items()) if name not in ("run", "seconds")})


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of faults; without a name, none")
    parser.add_argument("--quick", action="store_true", help="every seventh fault")
    parser.add_argument("--healthy", type=int, default=0, help="number of healthy runs of 2,000 steps")
    parser.add_argument("--slowdowns", type=int, default=0, choices=range(MOST_SLOWDOWNS + 1), metavar="NUMBER")
    parser.add_argument("--width", type=int, default=32, help="of the model, a multiple of 4")
    parser.add_argument("--hangs", action="store_true", help="the two faults that take seven minutes each, too")
    parser.add_argument("--folder", type=pathlib.Path, help="for store and results; by default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or pathlib.Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        jobs, runs = jobs_of(args), folder / "runs.jsonl"
        runs.touch()
        done = {_key(one) for one in _lines(runs)}
        began = int(time.time())  # a try has other names of runs than the one before
        missing = [job | {"run": f"{began:x}-{place:03}"} for place, job in enumerate(jobs) if _key(job) not in done]
        if missing:
            run(missing, folder)
        chosen = {_key(job) for job in jobs}
        report([one for one in _lines(runs) if _key(one) in chosen], folder)


if __name__ == "__main__":
    main()
