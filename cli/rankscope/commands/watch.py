"""`rankscope watch`: follow logs on this machine and over SSH, and report slow, stalled and failed trainings."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, urlsplit

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rankscope.access.service import load_settings, service_errors
from rankscope.output.progress import log_to
from rankscope.output.rows import printable
from rankscope.shell.errors import FAILED, USAGE, CommandError
from rankscope.shell.options import Notify, OptionalStore
from rankscope.shell.streams import live_console

if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig, WatchSection
    from rankscope_ingest.watch.watcher import LogStatus

NOT_NORMAL: Final = 4
"""Exit code: at least one training is not normal."""

Logs = Annotated[
    list[str] | None,
    typer.Argument(help="Logs to follow: a path, or ssh://user@host:port/path.", metavar="LOG...", show_default=False),
]
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file of the service; its sections \\[\\[watch]], \\[notify] and \\[store] apply."),
]
Runs = Annotated[
    list[str] | None,
    typer.Option("--run", help="Name of the run: once for all logs, or once for each. Default: the name of each log."),
]
PollSeconds = Annotated[float | None, typer.Option(help="Time between two reads of a log.", show_default="10")]
StalledFactor = Annotated[
    float | None, typer.Option(help="Stalled: no row for this multiple of the usual time.", show_default="3")
]
SlowFactor = Annotated[
    float | None, typer.Option(help="Slow: a step takes this multiple of the median.", show_default="2")
]
KnownHosts = Annotated[
    Path | None, typer.Option(help="File with the keys of hosts. Default: as in the SSH configuration.")
]
Format = Annotated[str | None, typer.Option("--format", help="Format of the logs. Default: detected from the content.")]
Loss = Annotated[str | None, typer.Option(help="Name of the quantity in the logs that is the loss. Default: chosen.")]
Pattern = Annotated[
    list[str] | None, typer.Option(metavar="REGEX", help="Regular expression for lines, as in `rankscope import`.")
]
Shard = Annotated[
    str | None, typer.Option(help="Shard of the store to write to; not the shard of a running service. Default: 0/1.")
]
Once = Annotated[bool, typer.Option("--once", help="Read each log once, print the states, and exit.")]
UntilFinished = Annotated[
    bool, typer.Option("--until-finished", help="Exit when each training has finished, failed or was stopped.")
]


_STYLES: Final = {
    "training": "green",
    "finished": "blue",
    "slow": "yellow",
    "waiting": "yellow",
    "stalled": "red",
    "failed": "red",
    "stopped": "bright_black",
}


def _status_line(status: LogStatus) -> str:
    """Return the state of a log, the reason and the source of the clock as one line."""
    if status.unreadable is not None:
        return printable(f"{status.run}  {status.state}  cannot read the log: {status.unreadable}")
    parts = [
        status.reason.removeprefix(f"{status.state} "),
        *([] if not status.clock or status.clock in status.reason else [status.clock]),
    ]
    return printable(f"{status.run}  {status.state}  {'; '.join(parts)}")


class WatchView(Live):
    """Prints a line when the state of a log changes, and on a terminal a table below these lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, auto_refresh=False, transient=True)
        self._statuses: dict[str, LogStatus] = {}

    def change(self, status: LogStatus) -> None:
        """Print a line if the state of the log has changed, and update the table."""
        before = self._statuses.get(status.address)
        self._statuses[status.address] = status
        if before is None or before.state != status.state:
            self._print(_status_line(status), _STYLES.get(status.state, "red"))
        self.update(self._table(), refresh=True)

    def print_line(self, line: str) -> None:
        """Print a line above the table."""
        self.console.print(Text(printable(line)), soft_wrap=True)

    def ask(self, prompt: str) -> str | None:
        """Ask for a password without echo. Return None if no password was entered."""
        self.stop()
        try:
            return getpass.getpass(printable(prompt)) or None
        except (EOFError, KeyboardInterrupt):
            return None
        finally:
            self.start()

    def _print(self, line: str, style: str) -> None:
        moment = time.strftime("%H:%M:%S")
        self.console.print(Text(f"{moment}  {line}", style=style if self.console.is_terminal else ""), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for status in self._statuses.values():
            state = status.state
            steps = "" if status.step is None else f"step {status.step:,}"
            total = "" if status.planned_steps is None else f" / {status.planned_steps:,}"
            silence = "" if status.silence is None else f"last row {status.silence:.0f} s ago"
            cells = (printable(status.run), state, f"{steps}{total if steps else ''}", silence)
            row = [Text(cell, style=_STYLES.get(state, "red") if cell is state else "") for cell in cells]
            table.add_row(*row, Text(f"{status.values:,} values stored"))
        return table


def watch(
    logs: Logs = None,
    store: OptionalStore = None,
    config: Config = None,
    run: Runs = None,
    notify: Notify = None,
    poll_seconds: PollSeconds = None,
    stalled_factor: StalledFactor = None,
    slow_factor: SlowFactor = None,
    known_hosts: KnownHosts = None,
    format_: Format = None,
    loss: Loss = None,
    pattern: Pattern = None,
    once: Once = False,
    until_finished: UntilFinished = False,
    shard: Shard = None,
) -> None:
    """Follow logs of trainings, store their rows, and report trainings that are slow, stalled, finished or failed.

    Nothing is installed on the machine of the training. Keys, agent, jump hosts and host aliases are those of
    ~/.ssh/config; the key of the host must be known. If the server accepts no key, the password is asked for. So is the
    password of mail, if the mailto URL has a user and no password.

    A log that cannot be read is reported, and the command connects again. The position is in the store: after a
    restart, no row is stored twice and no message is sent twice. Ctrl-C ends the command.

    Exit codes of --once and --until-finished: 0 normal or finished; 1 a log cannot be read; 2 wrong usage; 4 a training
    is slow, stalled, stopped, failed, has an open incident, or ends with an error. A service that takes over the shard
    ends the command with 3.

    [bold]Examples[/bold]

    rankscope watch train.log

    rankscope watch ssh://me@node7/data/run7/train.log --run pretraining --notify mailto://user@mail.host

    rankscope watch ssh://node7/data/a.log ssh://node8/data/b.log --run a --run b --notify feishu://TOKEN

    rankscope watch --config service.toml --until-finished

    rankscope watch ssh://node7/~/train.log --once
    """
    settings = load_settings(config, store, None, notify, shard)
    changes = {
        "poll_seconds": poll_seconds,
        "stalled_factor": stalled_factor,
        "slow_factor": slow_factor,
        "known_hosts": None if known_hosts is None else str(known_hosts),
        "format": format_,
        "loss": loss,
        "pattern": tuple(pattern) if pattern else None,
        "settle_seconds": 0.0 if once else None,
    }
    sections = _sections(
        settings, logs or [], run or [], {key: value for key, value in changes.items() if value is not None}
    )
    with WatchView(live_console(sys.stdout)) as view, log_to(view.print_line), service_errors():
        statuses = asyncio.run(_follow(settings, sections, view, once=once, until_finished=until_finished))
    if once or until_finished:
        _check(statuses)


def _sections(
    settings: ServiceConfig, logs: Sequence[str], runs: Sequence[str], changes: dict[str, Any]
) -> list[WatchSection]:
    """Return the logs of the configuration file and of the command line, with the thresholds of the command line."""
    from pydantic import ValidationError

    from rankscope_ingest.base.config import WatchSection

    if len(runs) > 1 and len(runs) != len(logs):
        raise CommandError(f"{len(runs)} runs for {len(logs)} logs: give --run once, or once for each log", code=USAGE)
    names: list[str | None] = [runs[0]] * len(logs) if len(runs) == 1 else [*runs] or [None] * len(logs)
    given = [section.model_dump() for section in settings.watch]
    given += [{"log": log, "run": name} for log, name in zip(logs, names, strict=True)]
    if not given:
        raise CommandError(
            "no log: give a path, an address such as ssh://user@host/data/train.log, or --config FILE with [[watch]]",
            code=USAGE,
        )
    try:
        return [WatchSection(**(section | changes)) for section in given]
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        option = str(fault["loc"][-1]).replace("_", "-")
        raise CommandError(f"--{option}: {fault['msg']} (given: {fault['input']!r})", code=USAGE) from error


def _check(statuses: Sequence[LogStatus]) -> None:
    """Raise CommandError if a log cannot be read, or if a training is not normal."""
    problems = [status for status in statuses if not status.is_normal]
    if not problems:
        return
    unreadable = any(status.unreadable for status in problems)
    names = ", ".join(sorted({status.run for status in problems}))
    raise CommandError(
        f"{names}: {'a log cannot be read' if unreadable else 'not normal'}, see above",
        code=FAILED if unreadable else NOT_NORMAL,
    )


def with_password(url: str, ask: Callable[[str], str | None]) -> str:
    """Return a mail URL with the password that the user enters; any other URL, or one with a password, unchanged."""
    parts = urlsplit(url)
    if parts.scheme not in {"mailto", "mailtos"} or not parts.username or parts.password is not None:
        return url
    password = ask(f"Password of {parts.username} for mail to {parts.hostname}: ")
    return url if password is None else url.replace("@", f":{quote(password, safe='')}@", 1)


async def _follow(
    settings: ServiceConfig, sections: Sequence[WatchSection], view: WatchView, *, once: bool, until_finished: bool
) -> list[LogStatus]:
    from rankscope_ingest.base.stop_signals import stop_on_signals
    from rankscope_ingest.notify.notifiers import make_notifiers
    from rankscope_ingest.watch.watcher import Hooks, check_logs, watching
    from rankscope_storage.api.store import Store as StoreFolder
    from rankscope_storage.base.location import located

    section, ask = settings.notify, view.ask if sys.stdin.isatty() else None
    urls = [url.get_secret_value() for url in section.urls] if section.mode == "embedded" else []
    urls = urls if ask is None else [with_password(url, ask) for url in urls]
    proxy = section.proxy.get_secret_value()
    notifiers = make_notifiers(urls, timeout_seconds=section.timeout_seconds, proxy=proxy)
    logs = check_logs(sections)  # a wrong address must not create a store
    hooks = Hooks(on_change=view.change, ask=ask)
    owner = f"watch, process {os.getpid()} on {socket.gethostname()}"
    path = located(settings.store.path)
    store = StoreFolder.open(path, create=True, mantissa_bits=settings.store.mantissa_bits)
    stop = asyncio.Event()
    with store.claim(settings.store.shard, owner=owner) as writer, stop_on_signals(stop):
        view.print_line(f"store: {path}")
        for log, (_, name) in zip(sections, logs, strict=True):
            view.print_line(f"following {log.log} as the run {name}, every {log.poll_seconds:g} s")
            wait = f"; a log that has just begun is stored after {log.settle_seconds:g} s, when its format is certain"
            view.print_line(f"{name}: reading the log{'' if once else wait}")
        for notifier in notifiers:
            view.print_line(f"notifications: {notifier.label}")
        async with watching(sections, writer, path, notifiers, hooks=hooks) as session:
            if once:
                await session.poll()
            else:
                await session.run(stop, until_ended=until_finished)
        return session.statuses
