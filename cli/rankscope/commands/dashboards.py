"""`rankscope dashboards`: deploy boards and alert rules to a Grafana server, or write their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.shell.errors import USAGE, CommandError, command_errors
from rankscope.shell.options import named_folder

if TYPE_CHECKING:
    from rankscope_dashboards.grafana.server import Server

dashboards = typer.Typer(
    help="""Deploy boards and alert rules to a Grafana server, or write their files.""",
    no_args_is_help=True,
)

Url = Annotated[
    str,
    typer.Option("--url", envvar="RANKSCOPE_GRAFANA_URL", help="Address of Grafana, such as https://host:3000."),
]
TokenFile = Annotated[
    Path,
    typer.Option(
        "--token-file",
        envvar="RANKSCOPE_GRAFANA_TOKEN_FILE",
        help="File with a service account token of role Admin, or with user:password.",
        show_default=False,
    ),
]
Organisation = Annotated[
    int | None, typer.Option("--org", help="Number of the organisation. A token belongs to exactly one.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the changes as a diff, and send no write request.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace or delete our own objects even if they were changed on the server.")
]


@dashboards.command("provision")
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


@dashboards.command("deploy")
def deploy(
    url: Url,
    token_file: TokenFile,
    prometheus_url: Annotated[
        str | None, typer.Option(help="Address of Prometheus, as Grafana reaches it.", show_default=False)
    ] = None,
    history_url: Annotated[
        str | None,
        typer.Option(
            help="Address of a Prometheus that reads the store. Default: that of --prometheus-url.", show_default=False
        ),
    ] = None,
    pages_url: Annotated[
        str, typer.Option(help="Address of the pages of the service, to which panels link.", show_default=False)
    ] = "",
    contact_points: Annotated[
        Path | None,
        typer.Option(help="Contact points in Grafana's provisioning format; $NAME is a variable of the environment."),
    ] = None,
    receiver: Annotated[
        str | None, typer.Option(help="Contact point of our alert rules.", metavar="NAME", show_default=False)
    ] = None,
    add_route: Annotated[
        bool, typer.Option("--add-route", help="Add a route to --receiver if the release drops the receiver of rules.")
    ] = False,
    org: Organisation = None,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Create or update folders, data sources, boards, alert rules and contact points in Grafana.

    Objects that a user has changed are reported and remain as they are. A second call changes nothing, and a call after
    an interruption completes the deployment. Options that are given once must be given at each call.

    [bold]Examples[/bold]

    rankscope dashboards deploy --url https://grafana:3000 --token-file token --prometheus-url http://prometheus:9090

    rankscope dashboards deploy --url https://grafana:3000 --token-file token --receiver on-call --dry-run
    """
    from rankscope_dashboards.grafana import deployment
    from rankscope_dashboards.grafana.contact_points import read_contact_points
    from rankscope_dashboards.grafana.content import read_content
    from rankscope_dashboards.grafana.server import GrafanaError

    if add_route and receiver is None:
        raise CommandError("--add-route needs the contact point of the route: add --receiver NAME", code=USAGE)
    with command_errors(GrafanaError):
        points = [] if contact_points is None else read_contact_points(contact_points, os.environ)
        urls = {"rankscope-live": prometheus_url, "rankscope-history": history_url or prometheus_url}
        options = deployment.Options(
            urls={uid: address for uid, address in urls.items() if address is not None},
            contact_points=points,
            receiver=receiver,
            add_route=add_route,
            force=force,
            dry_run=dry_run,
        )
        deployment.deploy(_server(url, token_file, org), read_content(pages_url=pages_url), options, print)


@dashboards.command("undeploy")
def undeploy(
    url: Url, token_file: TokenFile, org: Organisation = None, dry_run: DryRun = False, force: Force = False
) -> None:
    """Delete exactly the objects that `deploy` has created. A folder that holds anything else remains.

    Objects that a user has changed remain, unless --force is given. The exit code is 1 if anything remains.

    [bold]Example[/bold]

    rankscope dashboards undeploy --url https://grafana:3000 --token-file token
    """
    from rankscope_dashboards.grafana import deployment
    from rankscope_dashboards.grafana.content import read_content
    from rankscope_dashboards.grafana.server import GrafanaError

    with command_errors(GrafanaError):
        options = deployment.Options(force=force, dry_run=dry_run)
        remaining = deployment.undeploy(_server(url, token_file, org), read_content(), options, print)
    if remaining:
        raise CommandError("some objects remain in Grafana:\n  " + "\n  ".join(remaining))


def _server(url: str, token_file: Path, org: int | None) -> Server:
    from rankscope_dashboards.grafana.server import Server, read_credentials
    from rankscope_ingest.base.proxies import ENVIRONMENT, proxy_of

    proxy = proxy_of(url, ENVIRONMENT)
    return Server(url, read_credentials(token_file), organisation=org, proxy=proxy)


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
