"""`rankscope demo`: the main job on real input, from training to alert, with its outcome checked at the end."""

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
from rankscope.demo.checks import Fault, Plan, told_by_alertmanager
from rankscope.demo.receiver import Receiver, Way
from rankscope.output.progress import View, fetch_runs, view_for
from rankscope.up.processes import child, interrupted_by_termination, stop

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
    folder: Annotated[Path, typer.Option(help="Where everything the demo makes is put; made afresh.")] = Path(
        "demo-data"
    ),
    steps: Annotated[int, typer.Option(min=130, help="Training steps; the faults are at 60 and 120.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of model and data.")] = 1,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Train in peace; no alert may arrive.")] = False,
) -> None:
    """Train a small GPT on two ranks, break it twice, and see every step stored and every incident delivered.

    [bold]Example[/bold]: rankscope demo --steps 300 --seed 7
    """
    if not SCRIPT.is_file():
        raise CommandError(f"the demo needs a checkout of the repository: {SCRIPT} is missing", code=USAGE)
    console = Console(highlight=False)
    began = time.monotonic()
    _make_afresh(folder)
    faults = () if no_faults else FAULTS
    with interrupted_by_termination(), Receiver() as receiver:
        tensors, ways = _collect(console, folder, receiver, faults, _training_command(steps, seed, no_faults))
    from rankscope.demo.report import report

    plan = Plan(run=RUN, ranks=RANKS, steps=steps, tensors=tensors, faults=faults, ways=ways)
    good = report(console, folder, plan, receiver.alerts)
    console.print(f"\n{time.monotonic() - began:.0f} seconds in all.")
    if not good:
        raise CommandError(f"the demo did not show what it should: see the checks above and the logs in {folder}")


def _collect(
    console: Console, folder: Path, receiver: Receiver, faults: Sequence[Fault], command: list[str]
) -> tuple[int, Sequence[Way]]:
    """Train under the service until both have ended; return how many tensors the model has, and who was to tell."""
    (folder / "service.toml").write_text(CONFIG.format(notify_url=receiver.notify_url), encoding="utf-8")
    serve: list[str | Path] = [sys.executable, "-m", "rankscope", "serve", folder / "service.toml"]
    with child(serve, folder / "service.log", {}) as service:
        url = _wait_for_service(folder / "service.log", service)
        console.print(f"{'service':<14}{url}  (log: {folder / 'service.log'})")
        with _monitored(console, folder, url, receiver) as ways:
            environment = {"RANKSCOPE_INGEST_URL": url, "RANKSCOPE_RUN": RUN, "OMP_NUM_THREADS": "1"}
            with child(command, folder / "training.log", environment) as training, view_for(console) as view:
                view.say(f"{'training':<14}{RANKS} ranks  (log: {folder / 'training.log'})")
                _watch(training, url, receiver, view)
            if training.returncode != 0:
                raise CommandError(f"training ended with {training.returncode}: {_tail(folder / 'training.log')}")
            _wait_for_alerts(receiver, console, faults if Way.ALERTMANAGER in ways else ())
        if stop(service) != 0:
            raise CommandError(f"the service ended with {service.returncode}: {_tail(folder / 'service.log')}")
    return _tensors_in(folder / "training.log"), ways


@contextlib.contextmanager
def _monitored(console: Console, folder: Path, url: str, receiver: Receiver) -> Iterator[Sequence[Way]]:
    """Give the ways by which alerts will arrive: Prometheus and Alertmanager are used where the machine has them."""
    from rankscope.demo.prometheus import missing, monitored

    if remedies := missing():
        console.print(f"{'alerts':<14}by the service alone: {'; '.join(remedies)}", markup=False, soft_wrap=True)
        yield (Way.EMBEDDED,)
        return
    with monitored(folder / "live", folder / "history", url, receiver.webhook_url) as addresses:
        for name, address in addresses.items():
            console.print(f"{name:<14}{address}", markup=False)
        yield (Way.EMBEDDED, Way.ALERTMANAGER)


def _training_command(steps: int, seed: int, no_faults: bool) -> list[str]:
    first, second = FAULTS
    faults = ["--nan-step", first.step, "--nan-rank", first.rank, "--scale-step", second.step]
    faults += ["--scale-rank", second.rank]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *(str(SCRIPT), "--steps", str(steps), "--seed", str(seed)),
        *(["--no-faults"] if no_faults else [str(part) for part in faults]),
    ]


def _watch(training: subprocess.Popen[bytes], url: str, receiver: Receiver, view: View) -> None:
    """Show what moves until training has ended."""
    running = True
    while running:
        running = training.poll() is None
        runs = fetch_runs(url)
        if runs is not None:
            view.show(runs, time.monotonic())
        _tell(receiver, view.say)
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                training.wait(1.0)


def _wait_for_alerts(receiver: Receiver, console: Console, awaited: Sequence[Fault]) -> None:
    """Give a late or superfluous message time to show itself; Alertmanager's come after a scrape and its gathering."""
    began = time.monotonic()
    while time.monotonic() - began < QUIET_SECONDS or (
        time.monotonic() - began < LATEST_SECONDS and not all(told_by_alertmanager(receiver.alerts, awaited))
    ):
        _tell(receiver, lambda line: console.print(line, markup=False))
        time.sleep(0.2)


def _tell(receiver: Receiver, say: Callable[[str], None]) -> None:
    for alert in receiver.arrived():
        for line in alert.lines():
            say(line)


def _make_afresh(folder: Path) -> None:
    """Empty `folder`, but only when an earlier demo made it."""
    if folder.exists():
        if not (folder / MARK).exists():
            raise CommandError(f"{folder} exists and was not made by the demo: name another with --folder", code=USAGE)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def _wait_for_service(log: Path, service: subprocess.Popen[bytes]) -> str:
    """Return the address the service says it listens on."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and service.poll() is None:
        if found := re.search(r"listening on (http://\S+)", log.read_text(encoding="utf-8")):
            return found.group(1)
        time.sleep(0.1)
    raise CommandError(f"the service did not start: {_tail(log)}")


def _tensors_in(log: Path) -> int:
    found = re.search(r"model: (\d+) tensors", log.read_text(encoding="utf-8"))
    if found is None:
        raise CommandError(f"{log} does not say how many tensors the model has")
    return int(found.group(1))


def _tail(log: Path, lines: int = 5) -> str:
    return "\n  " + "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
