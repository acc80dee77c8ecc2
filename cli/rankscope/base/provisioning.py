"""`rankscope dashboards provision`: write the configuration files of Grafana, Prometheus, Alertmanager and compose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.base.errors import command_errors
from rankscope.base.options import named_folder


def provision(
    into: Annotated[
        Path,
        typer.Option("--into", parser=named_folder, help="Folder for the files. It must be empty or written before."),
    ],
    prometheus_url: Annotated[
        str, typer.Option(help="Address of Prometheus, as Grafana reaches it.")
    ] = "http://127.0.0.1:9090",
    history_url: Annotated[
        str, typer.Option(help="Address of a Prometheus that reads the store. Default: that of --prometheus-url.")
    ] = "",
    pages_url: Annotated[
        str, typer.Option(help="Address of the pages of runs, for links from boards. Default: no links.")
    ] = "",
    runbooks_url: Annotated[
        str, typer.Option(help="Address of the runbooks page, for links from alerts. Default: no links.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Write into any folder, and overwrite changed files.")] = False,
) -> None:
    """Write the provisioning files of Grafana, and the configuration of Prometheus, Alertmanager and compose.

    A later call updates the files. It refuses to overwrite files that you have changed, and never touches other files.

    [bold]Examples[/bold]

    rankscope dashboards provision --into grafana --prometheus-url http://prometheus.example:9090

    rankscope dashboards provision --into stack --pages-url https://telemetry.example:9470
    """
    from rankscope_dashboards.provisioning import tree

    folder = into.expanduser().resolve()
    with command_errors(usage=(ValueError,)):
        settings = tree.TreeSettings(
            prometheus_url=prometheus_url,
            history_url=history_url,
            pages_url=pages_url,
            runbooks_url=runbooks_url,
            boards_path=str(folder / tree.BOARDS),
        )
        files = tree.tree_files(tree.packaged_boards(), settings)
    with command_errors(tree.TreeError, OSError):
        tree.write_tree(folder, files, force=force)
    print(_next_steps(folder, len(files)))


def _next_steps(folder: Path, count: int) -> str:
    return f"""wrote {count} files to {folder}

Existing Grafana: copy or link the files, then restart Grafana
  {folder}/datasources/rankscope.yaml  to the folder datasources of Grafana's provisioning folder
  {folder}/dashboards/rankscope.yaml   to the folder dashboards; the boards remain in {folder}/dashboards/rankscope
  {folder}/alerting/rules.yaml         to the folder alerting, unless Alertmanager sends the notifications
Existing Prometheus: add {folder}/prometheus/rankscope.rules.yml to rule_files
Notifications of Grafana: {folder}/examples/alerting has examples of contact points and routes

New containers: Grafana on port 3000 of this host, the service on port 9470
  pip wheel --no-deps --wheel-dir {folder}/compose CHECKOUT
  export RANKSCOPE_TOKEN=... GRAFANA_PASSWORD=...
  docker compose -f {folder}/compose.yaml up --build -d"""
