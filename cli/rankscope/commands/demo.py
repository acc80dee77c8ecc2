"""`rankscope demo`: run a small training with injected faults, and check the stored rows and the alerts."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from rankscope.base.errors import USAGE, CommandError
from rankscope.demo.checks import ExpectedRun, Fault, reported_by_alertmanager
from rankscope.demo.receiver import AlertReceiver, Sender
from rankscope.output.progress import View, fetch_runs, view_for
from rankscope.up.supervisor import child, interrupted_by_termination, stop

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
    with interrupted_by_termination(), AlertReceiver() as receiver:
        tensors, senders = _collect(console, folder, receiver, faults, _training_command(steps, batch, seed, no_faults))
    from rankscope.demo.report import report

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
    serve: list[str | Path] = [sys.executable, "-m", "rankscope", "serve", folder / "service.toml"]
    with child(serve, folder / "service.log", {}) as service:
        url = _wait_for_service(folder / "service.log", service)
        console.print(f"{'service':<14}{url}  (log: {folder / 'service.log'})")
        console.print(f"{'page':<14}{url}/runs/{RUN}  (live until the demo ends)")
        with _run_prometheus(console, folder, url, receiver) as senders:
            environment = {"RANKSCOPE_INGEST_URL": url, "RANKSCOPE_RUN": RUN, "OMP_NUM_THREADS": "1"}
            environment["RANKSCOPE_SPOOL_DIR"] = str((folder / "rankscope-records").absolute())
            with child(command, folder / "training.log", environment) as training, view_for(console) as view:
                view.print_line(f"{'training':<14}{RANKS} ranks  (log: {folder / 'training.log'})")
                _watch(training, url, receiver, view)
            if training.returncode != 0:
                raise CommandError(f"training exited with code {training.returncode}: {_tail(folder / 'training.log')}")
            _wait_for_alerts(receiver, console, faults if Sender.ALERTMANAGER in senders else ())
        if stop(service) != 0:
            raise CommandError(f"the service exited with code {service.returncode}: {_tail(folder / 'service.log')}")
    return _tensors_in(folder / "training.log"), senders


@contextlib.contextmanager
def _run_prometheus(console: Console, folder: Path, url: str, receiver: AlertReceiver) -> Iterator[Sequence[Sender]]:
    """Run Prometheus and Alertmanager if both are installed; yield the programs that send alerts."""
    from rankscope.demo.report import missing_executables, run_prometheus

    if remedies := missing_executables():
        console.print(f"{'alerts':<14}from the service only: {'; '.join(remedies)}", markup=False, soft_wrap=True)
        yield (Sender.EMBEDDED,)
        return
    with run_prometheus(folder / "live", folder / "history", url, receiver.webhook_url) as addresses:
        for name, address in addresses.items():
            console.print(f"{name:<14}{address}", markup=False)
        yield (Sender.EMBEDDED, Sender.ALERTMANAGER)


def _training_command(steps: int, batch: int, seed: int, no_faults: bool) -> list[str]:
    first, second = FAULTS
    faults = ["--nan-step", first.step, "--nan-rank", first.rank, "--scale-step", second.step]
    faults += ["--scale-rank", second.rank]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *(str(SCRIPT), "--steps", str(steps), "--batch", str(batch), "--seed", str(seed)),
        *(["--no-faults"] if no_faults else [str(part) for part in faults]),
    ]


def _watch(training: subprocess.Popen[bytes], url: str, receiver: AlertReceiver, view: View) -> None:
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
        time.monotonic() - began < LATEST_SECONDS and not all(reported_by_alertmanager(receiver.alerts, awaited))
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


def _wait_for_service(log: Path, service: subprocess.Popen[bytes]) -> str:
    """Return the URL of the service, which the service writes to its log.

    Raises CommandError if the service exits or does not write the URL within 60 s.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and service.poll() is None:
        if found := re.search(r"listening on (http://\S+)", log.read_text(encoding="utf-8")):
            return found.group(1)
        time.sleep(0.1)
    raise CommandError(f"the service did not start: {_tail(log)}")


def _tensors_in(log: Path) -> int:
    found = re.search(r"model: (\d+) tensors", log.read_text(encoding="utf-8"))
    if found is None:
        raise CommandError(f"{log} contains no line with the number of tensors of the model")
    return int(found.group(1))


def _tail(log: Path, lines: int = 5) -> str:
    return "\n  " + "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
