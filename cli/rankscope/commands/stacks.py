"""`rankscope stacks`: print the current Python stacks and collectives of all ranks of a run."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, TypeVar

import typer

from rankscope.shell.errors import USAGE, CommandError

T = TypeVar("T")
TIMEOUT_SECONDS: Final = 60.0
"""Timeout of the request in seconds.

The service polls several ranks in parallel, each with the service's own timeout."""


def stacks(
    run: Annotated[
        str | None, typer.Argument(help="Name of the run. Default: the only live run.", show_default=False)
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.", show_default=False)] = None,
    service: Annotated[
        str, typer.Option(envvar="RANKSCOPE_INGEST_URL", help="Address of the service.")
    ] = "http://127.0.0.1:9470",
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Also show the threads other than the main thread.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the unchanged response of the service.")] = False,
) -> None:
    """Print Python stacks and collectives of the ranks of a run, grouped by equal stacks.

    Ranks inside a collective wait for ranks outside it, so the ranks outside are shown first. If the run is stalled
    and flight records or stacks single out one rank, the command prints that rank as the cause. The command works for
    hanging and for running trainings, and does not disturb them. Each response is recorded as an event. A service
    with a token requires it, in RANKSCOPE_TOKEN or the file named by RANKSCOPE_TOKEN_FILE. TLS uses RANKSCOPE_CA_FILE,
    RANKSCOPE_CERT_FILE and RANKSCOPE_KEY_FILE, as on a rank.

    [bold]Examples[/bold]

    rankscope stacks my-run

    rankscope stacks my-run --rank 3 --all-threads
    """
    from rankscope.output.stacks_text import stacks_lines

    address = service.rstrip("/")
    response = _fetch_stacks(address, run or _only_run(address), rank or None)
    if as_json:
        print(json.dumps(response, ensure_ascii=False, indent=1))
        return
    try:
        print("\n".join(stacks_lines(response, all_threads=all_threads)))
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{service} returned a response that this release cannot read: {error}") from error


def _fetch_stacks(service: str, run: str, ranks: list[int] | None) -> dict[str, Any]:
    from rankscope_contract.wire.channel import RUN_STACKS_PATH

    document = _answer(service, RUN_STACKS_PATH, dict, {"run": run, "ranks": ranks})
    if not document.get("ranks"):
        raise CommandError(f"run {run!r} has no live rank{' among those selected' if ranks else ''}")
    return document


def _only_run(service: str) -> str:
    from rankscope_contract.wire.channel import RUNS_PATH

    alive = [str(entry["run"]) for entry in _answer(service, RUNS_PATH, list) if entry.get("ranks_alive")]
    if len(alive) == 1:
        return alive[0]
    raise CommandError(
        f"there is not exactly one live run at {service}: name the run. Live runs: {', '.join(alive) or 'none'}",
        code=USAGE,
    )


def _answer(service: str, path: str, kind: type[T], document: object = None) -> T:
    """Return the answer of the service, which is JSON of the type `kind`. Raises CommandError."""
    from rankscope.access.service import UnreachableError, environment_tls, environment_token, request

    token, tls = environment_token(), environment_tls()
    try:
        response = request(service + path, document, token=token, timeout_seconds=TIMEOUT_SECONDS, client_tls=tls)
    except UnreachableError as error:
        raise CommandError(f"{error}: name the service with --service or RANKSCOPE_INGEST_URL") from error
    answer = response.json()
    if response.status == 200 and isinstance(answer, kind):
        return answer
    text = response.body.decode("utf-8", "replace").strip() or f"status {response.status}"
    hint = f" (RANKSCOPE_TOKEN is {'set' if token else 'not set'} here)" if response.status == 401 else ""
    raise CommandError(f"{service}: {text}{hint}")
