"""`rankscope up`: the service, Prometheus and Alertmanager, configured for each other and kept running."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from rankscope.base.errors import CommandError
from rankscope.output.rows import columns
from rankscope.up.ports import Ports

if TYPE_CHECKING:
    from rankscope.output.progress import View
    from rankscope.up.plan import Arrangement
    from rankscope.up.programs import Piece
    from rankscope.up.supervisor import Requests, Supervision

LOOK_EVERY_SECONDS: Final = 0.2
SHOW_EVERY_SECONDS: Final = 1.0
HEAD: Final = ("what", "address", "state", "log")


NotifyAddresses = Annotated[
    list[str] | None,
    typer.Option(
        help="Address that Alertmanager notifies: https://… for a webhook, smtp://host:port?to=… for mail; may be "
        "repeated. Prefix critical= sends only critical alerts."
    ),
]


def up(
    config: Annotated[Path | None, typer.Argument(help="TOML file of the service, as for `rankscope serve`.")] = None,
    store: Annotated[Path | None, typer.Option("--store", "-s", help="Folder of the store.")] = None,
    listen: Annotated[str | None, typer.Option(help="Where the service listens, host:port.")] = None,
    notify: NotifyAddresses = None,
    ports: Annotated[Ports, typer.Option(help="The usual ports (another one where one is taken), or free ones.")] = (
        Ports.FIXED
    ),
    state: Annotated[
        Path | None, typer.Option(help="Folder for configuration, data and logs; rankscope-live beside the store.")
    ] = None,
    scrape: Annotated[float, typer.Option(min=0.5, max=60, help="Seconds between two looks of Prometheus.")] = 5.0,
    retention: Annotated[str, typer.Option(help="How long Prometheus keeps what it has seen.")] = "15d",
    without_prometheus: Annotated[
        bool, typer.Option("--without-prometheus", help="The service alone; it tells people itself.")
    ] = False,
    without_alertmanager: Annotated[
        bool, typer.Option("--without-alertmanager", help="Prometheus without somebody who tells people.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", "--dry-run", help="Show files and commands; start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress of runs, only what is worth a line.")] = False,
) -> None:
    """Run the service, Prometheus and Alertmanager together, configured for each other, until Ctrl-C or SIGTERM.

    Prometheus finds the ranks through the service. What ends is started again. Everything listens on this machine
    alone; only the service may be told otherwise. Data stays for the next start.

    [bold]Examples[/bold]

    rankscope up --store history

    rankscope up service.toml --notify https://chat.example/hook --notify 'critical=smtp://mail.example:587?to=me@example'

    rankscope up --print-config
    """
    from rankscope.up.plan import Choices, arranged

    choices = Choices(
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
    arrangement = arranged(choices)
    if print_config:
        _print(arrangement)
        return
    _run(arrangement, quiet=quiet)


def _print(arrangement: Arrangement) -> None:
    for name, text in arrangement.shown().items():
        print(f"# {arrangement.folder.config(name)}")
        print(text, end="\n\n")
    for piece in arrangement.pieces:
        print(f"# {piece.name}: {piece.url}\n{shlex.join(piece.command)}\n")


def _run(arrangement: Arrangement, *, quiet: bool) -> None:
    from rankscope.output.progress import view_for
    from rankscope.up.supervisor import Requests, Supervision

    console, requests = Console(highlight=False), Requests()
    arrangement.folder.make()
    with arrangement.folder.held(), requests.caught(), view_for(console) as view:
        arrangement.prepare()
        say = _surviving(view.say)
        supervision = Supervision(
            arrangement.pieces,
            say=say,
            requests=requests,
            environment=arrangement.environment,
            trust=arrangement.trust,
        )
        try:
            supervision.start()
            _tell(arrangement, supervision, view)
            _watch(arrangement, supervision, requests, view, quiet=quiet)
        finally:
            say("ending: the service takes the ranks' last records; once more Ctrl-C ends all at once")
            supervision.stop()
    if supervision.given_up:
        raise CommandError(f"given up: {', '.join(supervision.given_up)}; the logs are in {arrangement.folder.path}")
    if requests.count > 1:
        raise CommandError("ended at once: what the service had not stored yet, live ranks still have", code=130)


def _surviving(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` that does not mind a terminal that is gone: what was started must be ended all the same."""

    def try_to_say(line: str) -> None:
        with contextlib.suppress(OSError):
            say(line)

    return try_to_say


def _tell(arrangement: Arrangement, supervision: Supervision, view: View) -> None:
    for line in arrangement.notes:
        view.say(line)
    view.say("")
    for line in overview(arrangement.pieces, supervision.states(), arrangement.left_out):
        view.say(line)
    view.say("")
    for line in arrangement.facts:
        view.say(line)
    view.say("\nFor the training job:")
    for line in exports(arrangement.advertised, arrangement.token_file):
        view.say(f"  {line}")
    view.say("\nCtrl-C ends all of it.")


def _watch(arrangement: Arrangement, supervision: Supervision, requests: Requests, view: View, *, quiet: bool) -> None:
    """Keep all running, and show what the runs do, until we are asked to end or the service is lost."""
    from rankscope.output.progress import fetch_runs

    url, shown_at = service_url(arrangement.pieces), 0.0
    while not requests.count and supervision.look():
        if not quiet and time.monotonic() - shown_at >= SHOW_EVERY_SECONDS:
            shown_at = time.monotonic()
            runs = fetch_runs(url, token=arrangement.token, trust=arrangement.trust)
            if runs is not None:
                view.show(runs, shown_at)
        time.sleep(LOOK_EVERY_SECONDS)


def overview(pieces: Iterable[Piece], states: Mapping[str, str], left_out: Mapping[str, str]) -> list[str]:
    """Return one line per program; `left_out` says why others do not run."""
    rows = [(piece.name, piece.url, states[piece.name], shown(piece.log)) for piece in pieces]
    return columns(HEAD, [*rows, *((name, "-", why, "-") for name, why in left_out.items())])


def exports(service_url: str, token_file: Path | None) -> list[str]:
    """Return the lines that go into the training job."""
    lines = [f"export RANKSCOPE_INGEST_URL={service_url}"]
    return lines if token_file is None else [*lines, f"export RANKSCOPE_TOKEN_FILE={shlex.quote(str(token_file))}"]


def shown(path: Path) -> str:
    """Return a path as short as one would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def service_url(pieces: Iterable[Piece]) -> str:
    """Return where ranks register."""
    from rankscope.up.programs import SERVICE

    return next(piece.url for piece in pieces if piece.name == SERVICE)
