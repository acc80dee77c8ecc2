"""`rankscope doctor`: check the whole installation and print a remedy for each problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from rankscope.access.service import load_settings
from rankscope.doctor.checks import run_checks
from rankscope.doctor.report import (
    CheckResult,
    Environment,
    State,
    as_json_text,
    find_endpoints,
    is_healthy,
    report_lines,
)
from rankscope.shell.errors import CommandError
from rankscope.shell.options import OptionalStore

CONFIGURATION: Final = "Configuration"


def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the service.")] = None,
    url: Annotated[str | None, typer.Option(envvar="RANKSCOPE_INGEST_URL", help="Address of the service.")] = None,
    store: OptionalStore = None,
    state: Annotated[
        Path | None, typer.Option(help="State folder of `rankscope up`. Default: rankscope-live next to the store.")
    ] = None,
    prometheus: Annotated[str | None, typer.Option(help="Address of Prometheus.")] = None,
    alertmanager: Annotated[str | None, typer.Option(help="Address of Alertmanager.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check the machine, service, store, ranks, Prometheus and Alertmanager; print problems with their remedies.

    The exit code is 1 if a check fails. The token comes from the configuration, $RANKSCOPE_TOKEN or the file named by
    $RANKSCOPE_TOKEN_FILE; it is never printed.

    [bold]Examples[/bold]

    rankscope doctor

    rankscope doctor --config service.toml

    rankscope doctor --url http://127.0.0.1:9470 --json
    """
    try:
        settings = load_settings(config, store, None, None)
        read = [CheckResult(CONFIGURATION, State.OK, f"{config} is valid")] if config else []
    except CommandError as error:
        # Run the other checks anyway, with the settings from outside of the file.
        settings = load_settings(None, store, None, None)
        remedy = "see docs/configuration.md for the valid keys"
        read = [CheckResult(CONFIGURATION, State.FAIL, str(error), remedy)]
    addresses = {"service": url, "prometheus": prometheus, "alertmanager": alertmanager}
    given = {name: address.rstrip("/") for name, address in addresses.items() if address}
    where = find_endpoints(settings, state, given=given, is_explicit=config is not None)
    outcome = [*read, *run_checks(Environment(where.client_tls), where)]
    print(as_json_text(outcome) if as_json else "\n".join(report_lines(outcome)))
    if not is_healthy(outcome):
        raise typer.Exit(1)
