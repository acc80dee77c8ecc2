"""`rankscope dashboards`: deploy boards and alert rules to a Grafana server, write their files, or draw a board."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.base.errors import USAGE, CommandError, command_errors
from rankscope.base.options import STANDARD_OUTPUT
from rankscope.base.provisioning import provision

if TYPE_CHECKING:
    from rankscope_dashboards.grafana.server import Server

dashboards = typer.Typer(
    help="""Deploy boards and alert rules to a Grafana server, write their files, or draw a board without a server.""",
    no_args_is_help=True,
)
dashboards.command("provision")(provision)

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
    from rankscope_dashboards.grafana.server import GrafanaError
    from rankscope_dashboards.grafana.shipped import shipped

    if add_route and receiver is None:
        raise CommandError("--add-route needs the contact point of the route: add --receiver NAME", code=USAGE)
    with command_errors(GrafanaError):
        points = [] if contact_points is None else read_contact_points(contact_points, os.environ)
        options = deployment.Options(
            urls=_given({"rankscope-live": prometheus_url, "rankscope-history": history_url or prometheus_url}),
            contact_points=points,
            receiver=receiver,
            add_route=add_route,
            force=force,
            dry_run=dry_run,
        )
        deployment.deploy(_server(url, token_file, org), shipped(pages_url=pages_url), options, print)


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
    from rankscope_dashboards.grafana.server import GrafanaError
    from rankscope_dashboards.grafana.shipped import shipped

    with command_errors(GrafanaError):
        options = deployment.Options(force=force, dry_run=dry_run)
        remaining = deployment.undeploy(_server(url, token_file, org), shipped(), options, print)
    if remaining:
        raise CommandError("some objects remain in Grafana:\n  " + "\n  ".join(remaining))


@dashboards.command("preview")
def preview(
    board: Annotated[str, typer.Argument(help="Name of the board, such as run_overview.", metavar="BOARD")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write, with the suffix html or png; - is standard output, as html.",
            show_default=False,
        ),
    ],
    run: Annotated[
        list[str] | None, typer.Option("--run", help="Run that the board shows; the board runs takes several.")
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option("--var", help="Value of a variable of the board, such as rank=0.", metavar="NAME=VALUE"),
    ] = None,
    prometheus_url: Annotated[str, typer.Option(help="Address of Prometheus.")] = "http://127.0.0.1:9090",
    start: Annotated[
        str | None, typer.Option("--from", help="Start: a time in ISO 8601, or now-6h. Default: that of the run.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="End: a time in ISO 8601, now or now-1h. Default: that of the run.")
    ] = None,
) -> None:
    """Draw a board without Grafana, with the results of its queries, as one HTML file or as a PNG.

    The range is that of the run if neither --from nor --to is given, and the last hour without a run. Other variables
    have the values with which Grafana opens the board. The file is labelled as a preview: it shows the queries, units
    and colours of the board, drawn by Rankscope. A PNG needs the program chromium.

    [bold]Examples[/bold]

    rankscope dashboards preview run_overview --run my-run -o overview.html

    rankscope dashboards preview tensors --run my-run --var kind=grad_reduced --from now-6h -o tensors.png
    """
    from rankscope.output.board_preview import PreviewChoice, chosen_variables, parse_time, write_preview
    from rankscope_dashboards.provisioning.tree import SHIPPED

    now = time.time()
    choice = PreviewChoice(
        tree=SHIPPED,
        board=board,
        prometheus_url=prometheus_url,
        variables=chosen_variables(run or (), variable or ()),
        start=None if start is None else parse_time("--from", start, now),
        end=None if end is None else parse_time("--to", end, now),
    )
    write_preview(choice, output, now)
    if output != STANDARD_OUTPUT:
        print(f"preview of {board}: {output.absolute().as_uri()}")


def _server(url: str, token_file: Path, org: int | None) -> Server:
    from rankscope_dashboards.grafana.server import Server, read_credentials
    from rankscope_ingest.base.proxies import ENVIRONMENT, proxy_of

    proxy = proxy_of(url, ENVIRONMENT, os.environ)
    return Server(url, read_credentials(token_file), organisation=org, proxy=proxy)


def _given(urls: Mapping[str, str | None]) -> dict[str, str]:
    return {uid: url for uid, url in urls.items() if url is not None}
