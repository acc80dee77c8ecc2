"""`rankscope demo`: run a small training with injected faults, and check the stored rows and the alerts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from rankscope.demo.checks import ExpectedRun, Fault, are_reported
from rankscope.demo.receiver import AlertReceiver, Sender
from rankscope.demo.report import report
from rankscope.output.progress import ProgressView, fetch_runs
from rankscope.shell.errors import USAGE, CommandError
from rankscope.up.machine import ALERTMANAGER, PROMETHEUS
from rankscope.up.plan import SERVICE, StartPlan, make_plan
from rankscope.up.supervisor import StopSignals, Supervisor, start, tail
from rankscope_ingest.base.stop_signals import handling

RUN: Final = "demo"
RANKS: Final = 2
MARK: Final = ".rankscope-demo"
SCRIPT: Final = Path(__file__).parents[3] / "examples" / "gpt_ddp.py"
FAULTS: Final = (
    Fault(step=60, rank=1, tensor="blocks.2.mlp.0.weight", rule="AnomalyNan", skips_step=True),
    Fault(step=120, rank=0, tensor="positions.weight", rule="AnomalyTurbulence", skips_step=False),
)

QUIET_SECONDS: Final = 3.0
LATEST_SECONDS: Final = 15.0
STOP_SECONDS: Final = 15.0
SCRAPE_SECONDS: Final = 1.0

CONFIG: Final = """\
[service]
listen = "127.0.0.1:0"

[store]
path = "history"

[ingest]
flush_after_seconds = 5.0

[notify]
urls = ["{notify_url}"]
"""


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for all files. An earlier demo folder is replaced.")] = Path(
        "demo-data"
    ),
    steps: Annotated[int, typer.Option(min=130, help="Training steps. Faults are injected at steps 60 and 120.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step. With fewer, a step is faster.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the model and the data.")] = 1,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Inject no faults and expect no alert.")] = False,
) -> None:
    """Train a small GPT on two ranks, inject two faults, and check that every step is stored and every alert arrives.

    [bold]Example[/bold]: rankscope demo --steps 300 --seed 7
    """
    if not SCRIPT.is_file():
        raise CommandError(f"the demo needs a checkout of the repository: {SCRIPT} is missing", code=USAGE)
    console = Console(highlight=False)
    began = time.monotonic()
    _create_folder(folder)
    faults = () if no_faults else FAULTS
    # SIGTERM and SIGHUP stop the programs, too.
    with handling(_interrupt, signal.SIGINT), AlertReceiver() as receiver:
        tensors, senders = _collect(console, folder, receiver, faults, _training_command(steps, batch, seed, no_faults))
    expected = ExpectedRun(run=RUN, ranks=RANKS, steps=steps, tensors=tensors, faults=faults, senders=senders)
    good = report(console, folder, expected, receiver.alerts)
    console.print(f"\n{time.monotonic() - began:.0f} seconds in total.")
    if not good:
        raise CommandError(f"some checks of the demo failed: see the checks above and the logs in {folder}")


def _collect(
    console: Console, folder: Path, receiver: AlertReceiver, faults: Sequence[Fault], command: list[str]
) -> tuple[int, Sequence[Sender]]:
    """Run the service and the training of the demo until both exit.

    Returns the number of tensors of the model, and the programs that are expected to send alerts.
    """
    (folder / "service.toml").write_text(CONFIG.format(notify_url=receiver.notify_url), encoding="utf-8")
    plan = _plan(console, folder, receiver.webhook_url)
    plan.folder.create()
    plan.folder.write(plan.files)
    exits: list[str] = []
    supervisor = Supervisor(plan.programs, plan.folder, print_line=exits.append, stop_signals=StopSignals())
    try:
        supervisor.start()
        for program in plan.programs:
            log = plan.folder.log(program.name)
            console.print(f"{program.name:<14}{program.url}  (log: {log})", markup=False, soft_wrap=True)
        url = plan.programs[0].url
        console.print(f"{'page':<14}{url}/runs/{RUN}  (live until the demo ends)")
        _train(command, folder, url, receiver, console)
        _wait_for_alerts(receiver, console, faults if plan.options.alertmanager else ())
        supervisor.look()
    finally:
        supervisor.stop()
    if exits:
        raise CommandError(exits[0])
    if (end := supervisor.ends[SERVICE]) != "(exit status 0)":
        raise CommandError(f"the service exited {end}. {tail(plan.folder.log(SERVICE))}")
    return _tensors_in(folder / "training.log"), tuple(Sender) if plan.options.alertmanager else (Sender.EMBEDDED,)


def _plan(console: Console, folder: Path, webhook_url: str) -> StartPlan:
    """Return the plan of the programs: the service, and Prometheus with Alertmanager if both are installed."""
    missing = [one.remedy for one in (PROMETHEUS, ALERTMANAGER) if one.find() is None]
    if missing:
        console.print(f"{'alerts':<14}from the service only: {'; '.join(missing)}", markup=False, soft_wrap=True)
    return make_plan(
        config=folder / "service.toml",
        notify=() if missing else (webhook_url,),
        state=folder / "live",
        scrape_seconds=SCRAPE_SECONDS,
        with_prometheus=not missing,
        with_alertmanager=not missing,
    )


def _train(command: list[str], folder: Path, url: str, receiver: AlertReceiver, console: Console) -> None:
    """Run the training until it exits, and show its progress. Raises CommandError if it fails."""
    log = folder / "training.log"
    environment = {"RANKSCOPE_INGEST_URL": url, "RANKSCOPE_RUN": RUN, "OMP_NUM_THREADS": "1"}
    environment["RANKSCOPE_SPOOL_DIR"] = str((folder / "rankscope-records").absolute())
    training = start(command, log, environment)
    try:
        with ProgressView(console) as view:
            view.print_line(f"{'training':<14}{RANKS} ranks  (log: {log})")
            _watch(training, url, receiver, view)
    finally:
        _stop(training)
    if training.returncode != 0:
        raise CommandError(f"training exited with code {training.returncode}. {tail(log)}")


def _stop(training: subprocess.Popen[bytes]) -> None:
    """Stop the training, and the ranks that outlive it."""
    training.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(training.pid, signal.SIGKILL)
    training.wait()


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _training_command(steps: int, batch: int, seed: int, no_faults: bool) -> list[str]:
    first, second = FAULTS
    faults = ["--nan-step", first.step, "--nan-rank", first.rank, "--scale-step", second.step]
    faults += ["--scale-rank", second.rank]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *(str(SCRIPT), "--steps", str(steps), "--batch", str(batch), "--seed", str(seed)),
        *(["--no-faults"] if no_faults else [str(part) for part in faults]),
    ]


def _watch(training: subprocess.Popen[bytes], url: str, receiver: AlertReceiver, view: ProgressView) -> None:
    """Show progress and alerts until the training exits."""
    running = True
    while running:
        running = training.poll() is None
        runs = fetch_runs(url)
        if runs is not None:
            view.show(runs, time.monotonic())
        _print_report(receiver, view.print_line)
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                training.wait(1.0)


def _wait_for_alerts(receiver: AlertReceiver, console: Console, awaited: Sequence[Fault]) -> None:
    """Wait for alert messages that are late, and for messages that are not expected.

    Alertmanager sends a message after a scrape and the group wait. Until a message about each fault in `awaited` has
    arrived, the function therefore waits, up to LATEST_SECONDS.
    """
    began = time.monotonic()
    while time.monotonic() - began < QUIET_SECONDS or (
        time.monotonic() - began < LATEST_SECONDS and not are_reported(awaited, receiver.alerts)
    ):
        _print_report(receiver, lambda line: console.print(line, markup=False))
        time.sleep(0.2)


def _print_report(receiver: AlertReceiver, print_line: Callable[[str], None]) -> None:
    for alert in receiver.new_alerts():
        for line in alert.lines():
            print_line(line)


def _create_folder(folder: Path) -> None:
    """Create an empty `folder`; replace a folder of an earlier demo.

    Raises CommandError if the folder exists and was not created by the demo.
    """
    if folder.exists():
        if not (folder / MARK).exists():
            raise CommandError(f"{folder} was not created by the demo: name another folder with --folder", code=USAGE)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def _tensors_in(log: Path) -> int:
    found = re.search(r"model: (\d+) tensors", log.read_text(encoding="utf-8"))
    if found is None:
        raise CommandError(f"{log} contains no line with the number of tensors of the model")
    return int(found.group(1))
