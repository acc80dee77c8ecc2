"""`rankscope stacks`: where every rank of a run stands right now."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rankscope.base.errors import USAGE, CommandError

ASK_SECONDS: Final = 60.0
"""The service waits for each rank for as long as its own timeout says; several at once."""


def stacks(
    run: Annotated[
        str | None, typer.Argument(help="Name of the run; may be left out when only one is alive.", show_default=False)
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.", show_default=False)] = None,
    service: Annotated[
        str, typer.Option(envvar="RANKSCOPE_INGEST_URL", help="Address of the service.")
    ] = "http://127.0.0.1:9470",
    all_threads: Annotated[bool, typer.Option("--all-threads", help="Show the other threads too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the service answers, as it is.")] = False,
) -> None:
    """Ask the ranks of a run where they stand: Python stacks and collectives, equal ones together, the cause first.

    Whoever waits in a collective waits for those that are not in it, so these come first. It works for a training that
    hangs as well as for one that runs, which it does not disturb; each answer is recorded as an event. A token is
    needed: the service's own, in RANKSCOPE_TOKEN or the file that RANKSCOPE_TOKEN_FILE names. For TLS
    RANKSCOPE_CA_FILE, RANKSCOPE_CERT_FILE and RANKSCOPE_KEY_FILE are read as by a rank.

    [bold]Examples[/bold]

    rankscope stacks my-run

    rankscope stacks my-run --rank 3 --all-threads
    """
    from rankscope.output.stacks_text import lines

    address = service.rstrip("/")
    answer = _asked(address, run or _only_run(address), rank or None)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False, indent=1))
        return
    try:
        print("\n".join(lines(answer, all_threads=all_threads)))
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{service} gave no answer of this release: {error}") from error


def _asked(service: str, run: str, ranks: list[int] | None) -> dict[str, Any]:
    from rankscope.base.http_client import UnreachableError, post
    from rankscope.base.service_settings import environment_trust
    from rankscope_contract.channel import RUN_STACKS_PATH

    try:
        answer = post(
            service + RUN_STACKS_PATH,
            {"run": run, "ranks": ranks},
            token=_token(),
            timeout_seconds=ASK_SECONDS,
            trust=environment_trust(),
        )
    except UnreachableError as error:
        raise CommandError(f"{error}: is the service there? Name it with --service or RANKSCOPE_INGEST_URL") from error
    document = answer.json()
    if answer.status != 200 or not isinstance(document, dict):
        text = answer.body.decode("utf-8", "replace").strip() or f"status {answer.status}"
        raise CommandError(f"{service}: {_hinted(answer.status, text)}")
    if not document.get("ranks"):
        raise CommandError(f"run {run!r} has no live rank{' of these' if ranks else ''} that could be asked")
    return document


def _only_run(service: str) -> str:
    from rankscope.base.http_client import UnreachableError, get
    from rankscope.base.service_settings import environment_trust
    from rankscope_contract.channel import RUNS_PATH

    try:
        answer = get(service + RUNS_PATH, token=_token(), trust=environment_trust())
    except UnreachableError as error:
        raise CommandError(f"{error}: is the service there? Name it with --service or RANKSCOPE_INGEST_URL") from error
    runs = answer.json()
    if answer.status != 200 or not isinstance(runs, list):
        raise CommandError(f"{service}: {_hinted(answer.status, f'status {answer.status}')}")
    alive = [entry["run"] for entry in runs if entry.get("ranks_alive")]
    if len(alive) == 1:
        return str(alive[0])
    raise CommandError(f"name the run: {', '.join(alive) or 'none'} alive at {service}", code=USAGE)


def _hinted(status: int, text: str) -> str:
    return f"{text} (RANKSCOPE_TOKEN is {'set' if _token() else 'not set'} here)" if status == 401 else text


def _token() -> str | None:
    path = os.environ.get("RANKSCOPE_TOKEN_FILE")
    if os.environ.get("RANKSCOPE_TOKEN") or not path:
        return os.environ.get("RANKSCOPE_TOKEN") or None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CommandError(f"RANKSCOPE_TOKEN_FILE {path}: {error.strerror or error}", code=USAGE) from error
