"""`rankscope doctor`: what works, what does not, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankscope.base.errors import CommandError
from rankscope.base.service_settings import load_settings

if TYPE_CHECKING:
    from rankscope.doctor.endpoints import Whereabouts
    from rankscope.doctor.environment import Surroundings
    from rankscope.doctor.result import Finding

CONFIGURATION: Final = "Configuration"


def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the service.")] = None,
    url: Annotated[str | None, typer.Option(envvar="RANKSCOPE_INGEST_URL", help="Address of the service.")] = None,
    store: Annotated[Path | None, typer.Option("--store", "-s", help="Folder of the store.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder of `rankscope up`; rankscope-live beside the store.")
    ] = None,
    prometheus: Annotated[str | None, typer.Option(help="Address of Prometheus.")] = None,
    alertmanager: Annotated[str | None, typer.Option(help="Address of Alertmanager.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
) -> None:
    """Look at everything between the ranks and the people who are told; say what is wrong and what to type next.

    The exit code is 1 when something does not work. A service that asks for a token is asked with the one in the
    configuration, or in $RANKSCOPE_TOKEN or the file in $RANKSCOPE_TOKEN_FILE; it is never shown.

    [bold]Examples[/bold]

    rankscope doctor

    rankscope doctor --config service.toml

    rankscope doctor --url http://127.0.0.1:9470 --json
    """
    from rankscope.doctor import findings
    from rankscope.doctor.endpoints import found, told
    from rankscope.doctor.environment import Machine

    try:
        settings = load_settings(config, store, None, None)
        read = [findings.ok(CONFIGURATION, f"{config} can be read")] if config else []
    except CommandError as error:
        # Everything else can be looked at all the same, with what there is without the file.
        settings = load_settings(None, store, None, None)
        read = [findings.fail(CONFIGURATION, str(error), "docs/configuration.md lists the keys")]
    where = found(settings, state, given=told(url, prometheus, alertmanager), is_explicit=config is not None)
    outcome = [*read, *examined(Machine(where.trust), where)]
    print(findings.as_json(outcome) if as_json else "\n".join(findings.lines(outcome)))
    if not findings.healthy(outcome):
        raise typer.Exit(1)


def examined(world: Surroundings, where: Whereabouts) -> Iterator[Finding]:
    """Yield everything that was found, from the machine to the people."""
    from rankscope.doctor import machine, monitoring, ranks, service

    yield from machine.machine(world)
    yield from service.service(world, where.service, where.token)
    yield from service.store(world, where.store)
    yield from ranks.ranks(world, where.service, where.token)
    yield from monitoring.prometheus(world, where.prometheus)
    yield from monitoring.alertmanager(world, where.alertmanager)
    yield from machine.ports(world, where.ports)
