"""`rankscope up`: run the service, Prometheus and Alertmanager, configured for each other and supervised."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from rankscope.output.progress import ProgressView, fetch_runs
from rankscope.output.rows import columns
from rankscope.shell.errors import CommandError
from rankscope.shell.options import Listen, Notify, OptionalStore
from rankscope.shell.streams import live_console
from rankscope.up.machine import PortChoice, StateDir
from rankscope.up.plan import SERVICE, Program, StartPlan, make_plan
from rankscope.up.supervisor import StopSignals, Supervisor

CHECK_SECONDS: Final = 0.2
SHOW_SECONDS: Final = 1.0
HEAD: Final = ("program", "address", "state", "log")


def up(
    config: Annotated[Path | None, typer.Argument(help="TOML file of the service, as for `rankscope serve`.")] = None,
    store: OptionalStore = None,
    listen: Listen = None,
    notify: Notify = None,
    ports: Annotated[
        PortChoice,
        typer.Option(
            help="fixed: default ports (another port if one is in use); free: ports of the last start, or free ports."
        ),
    ] = "fixed",
    state: Annotated[Path | None, typer.Option(help="State folder. Default: rankscope-live next to the store.")] = None,
    scrape: Annotated[float, typer.Option(min=0.5, max=60, help="Scrape interval of Prometheus in seconds.")] = 5.0,
    retention: Annotated[str, typer.Option(help="Retention time of Prometheus.")] = "15d",
    without_prometheus: Annotated[
        bool, typer.Option("--without-prometheus", help="Run only the service, which can send notifications itself.")
    ] = False,
    without_alertmanager: Annotated[
        bool, typer.Option("--without-alertmanager", help="Run Prometheus without Alertmanager.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", "--dry-run", help="Print files and commands; start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only events, no progress of runs.")] = False,
) -> None:
    """Run the service, Prometheus and Alertmanager together, configured for each other, until Ctrl-C or SIGTERM.

    Prometheus discovers the ranks through the service. Programs that exit are restarted. All programs listen on
    localhost only, except that the service can be given another address. The data of all programs is kept for the next
    start.

    [bold]Examples[/bold]

    rankscope up --store history

    rankscope up service.toml --notify https://chat.example/hook --notify 'critical=smtp://mail.example:587?to=me@example'

    rankscope up --print-config
    """
    plan = make_plan(
        config=config,
        store=store,
        listen=listen,
        notify=tuple(notify or ()),
        ports=ports,
        state=state,
        scrape_seconds=scrape,
        retention=retention,
        with_prometheus=not without_prometheus,
        with_alertmanager=not (without_prometheus or without_alertmanager),
    )
    if print_config:
        _print(plan)
        return
    _run(plan, quiet=quiet)


def _print(plan: StartPlan) -> None:
    for name, text in plan.redacted_files().items():
        print(f"# {plan.folder.config(name)}")
        print(text, end="\n\n")
    for program in plan.programs:
        print(f"# {program.name}: {program.url}\n{shlex.join(program.command)}\n")


def _run(plan: StartPlan, *, quiet: bool) -> None:
    console, stop_signals = live_console(sys.stdout), StopSignals()
    plan.folder.create()
    with plan.folder.locked(), stop_signals.caught(), ProgressView(console) as view:
        plan.folder.write(plan.files)
        supervisor = Supervisor(
            plan.programs,
            plan.folder,
            print_line=view.print_line,
            stop_signals=stop_signals,
            environment=plan.environment,
            client_tls=plan.client_tls,
        )
        try:
            supervisor.start()
            urls = {program.name: program.url for program in plan.programs}
            plan.folder.save_notes({"ports": dict(plan.options.ports), "urls": urls})
            _print_report(plan, view)
            _watch(plan, supervisor, stop_signals, view, quiet=quiet)
        finally:
            view.print_line("stopping: the service stores the last records; press Ctrl-C again to stop immediately")
            supervisor.stop()
    if supervisor.given_up:
        raise CommandError(f"too many restarts: {', '.join(supervisor.given_up)}; the logs are in {plan.folder.path}")
    if stop_signals.count > 1:
        raise CommandError("stopped immediately: live ranks keep the records that were not stored", code=130)


def _print_report(plan: StartPlan, view: ProgressView) -> None:
    lines = [*plan.warnings, "", *overview(plan.programs, plan.left_out, plan.folder), ""]
    lines += [*plan.notification_lines, "\nFor the training job:"]
    lines += [f"  {line}" for line in exports(plan.advertised, plan.token_file)]
    for line in (*lines, "\nPress Ctrl-C to stop all programs."):
        view.print_line(line)


def _watch(
    plan: StartPlan, supervisor: Supervisor, stop_signals: StopSignals, view: ProgressView, *, quiet: bool
) -> None:
    """Print exits of programs and show progress.

    Returns after a stop signal, or when an essential program exited too often to be restarted.
    """
    url, shown_at = plan.options.service.url(plan.options.ports[SERVICE]), 0.0
    while not stop_signals.count and supervisor.look():
        if not quiet and time.monotonic() - shown_at >= SHOW_SECONDS:
            shown_at = time.monotonic()
            runs = fetch_runs(url, token=plan.token, client_tls=plan.client_tls)
            if runs is not None:
                view.show(runs, shown_at)
        time.sleep(CHECK_SECONDS)


def overview(programs: Iterable[Program], left_out: Iterable[str], folder: StateDir) -> list[str]:
    """Return one line per program. The programs `left_out` do not run."""
    rows = [(program.name, program.url, "ready", short_path(folder.log(program.name))) for program in programs]
    return columns(HEAD, [*rows, *((name, "-", "left out", "-") for name in left_out)])


def exports(service_url: str, token_file: Path | None) -> list[str]:
    """Return the `export` lines that the user pastes into the script of the training job."""
    lines = [f"export RANKSCOPE_INGEST_URL={service_url}"]
    return lines if token_file is None else [*lines, f"export RANKSCOPE_TOKEN_FILE={shlex.quote(str(token_file))}"]


def short_path(path: Path) -> str:
    """Return `path` relative to the current folder if it is below this folder, otherwise unchanged."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
