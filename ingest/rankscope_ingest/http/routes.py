"""The service's HTTP side: registration and pokes of ranks, discovery for Prometheus, its state as page and JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final, Protocol

from aiohttp import web

from rankscope_contract.protocol.channel import (
    EXPORTERS_PATH,
    HEALTH_PATH,
    METRICS_PATH,
    PAGE_PATH,
    POKE_PATH,
    REGISTER_PATH,
    REMOTE_READ_PATH,
    REMOTE_WRITE_PATH,
    RUN_STACKS_PATH,
    RUNS_PATH,
    SERVICE_DISCOVERY_PATH,
    STATUS_PATH,
    TARGETS_PATH,
    Registration,
    RegistrationReply,
)
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.detect.stall_handler import RankAnswer, parse_stacks_request
from rankscope_ingest.http.http_sd import per_node, per_rank
from rankscope_ingest.network.auth import OwnName, challenge, refuse_web_pages, token_guard
from rankscope_ingest.reporting.progress import RunProgress
from rankscope_ingest.runs.target import Target
from rankscope_ingest.status_page.assets import PAGE_HEADERS
from rankscope_ingest.status_page.model import Status
from rankscope_ingest.status_page.page import page
from rankscope_ingest.targets.registry import parse_registration

MAX_REQUEST_BYTES: Final = 1 << 20
_PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PATHS: Final = (
    PAGE_PATH,
    STATUS_PATH,
    REGISTER_PATH,
    POKE_PATH,
    SERVICE_DISCOVERY_PATH,
    TARGETS_PATH,
    RUNS_PATH,
    EXPORTERS_PATH,
    REMOTE_READ_PATH,
    REMOTE_WRITE_PATH,
    HEALTH_PATH,
    METRICS_PATH,
)
_STACKS_REFUSED: Final = (
    "stacks show where processes stand, and are given only where a token is set: set [service] token, and"
    " RANKSCOPE_TOKEN for the ranks and for this command"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Backend(Protocol):
    """The service as its HTTP side sees it."""

    async def register(self, registration: Registration) -> RegistrationReply:
        """Take a registration. Raises RegistrationError."""
        ...

    def poke(self, incarnation: str) -> bool:
        """Pull a target at once; False when it is unknown."""
        ...

    async def ask_stacks(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Have the live ranks of an attempt, or those named, say where they stand."""
        ...

    async def remote_read(self, request: web.Request) -> web.StreamResponse:
        """Answer Prometheus' remote read. Raises RegistrationError."""
        ...

    async def remote_write(self, request: web.Request) -> web.Response:
        """Take what Prometheus' remote write pushes. Raises RegistrationError."""
        ...

    def targets(self) -> Iterable[Target]:
        """Return all targets."""
        ...

    def exporters(self) -> Iterable[Mapping[str, object]]:
        """Return how each exporter of others stands."""
        ...

    async def standing(self) -> Status:
        """Return how everything stands."""
        ...

    def runs(self) -> Iterable[RunProgress]:
        """Return where each run stands."""
        ...

    def metrics_page(self) -> bytes:
        """Return the page for Prometheus."""
        ...

    def degraded(self) -> str | None:
        """Return why the service cannot do its work, or None."""
        ...


def make_application(backend: Backend, token: str | None, is_own_name: OwnName | None) -> web.Application:
    """Return the application; with a token, everything but the health page asks for it.

    Where `is_own_name` is given, it says which hosts in a request are this service.
    """
    routes = _Routes(backend, has_token=token is not None)
    guards = [_plain_errors, token_guard(token), refuse_web_pages(is_own_name)]
    application = web.Application(middlewares=guards, client_max_size=MAX_REQUEST_BYTES)
    application.add_routes(
        [
            web.post(REGISTER_PATH, routes.register),
            web.post(POKE_PATH, routes.poke),
            web.post(RUN_STACKS_PATH, routes.stacks),
            web.post(REMOTE_READ_PATH, backend.remote_read),
            web.post(REMOTE_WRITE_PATH, backend.remote_write),
            web.get(SERVICE_DISCOVERY_PATH, routes.discovery),
            web.get(PAGE_PATH, routes.page),
            web.get(STATUS_PATH, routes.status),
            web.get(TARGETS_PATH, routes.targets),
            web.get(RUNS_PATH, routes.runs),
            web.get(EXPORTERS_PATH, routes.exporters),
            web.get(HEALTH_PATH, routes.health),
            web.get(METRICS_PATH, routes.metrics),
        ]
    )
    return application


class _Routes:
    def __init__(self, backend: Backend, *, has_token: bool) -> None:
        self._backend = backend
        self._has_token = has_token

    async def register(self, request: web.Request) -> web.Response:
        registration = parse_registration(await request.read())
        reply = await self._backend.register(registration)
        return web.Response(text=reply.to_json(), content_type="application/json")

    async def poke(self, request: web.Request) -> web.Response:
        try:
            incarnation = json.loads(await request.read())["incarnation"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RegistrationError(400, 'a poke is a JSON object such as {"incarnation": "…"}') from error
        if not self._backend.poke(str(incarnation)):
            raise RegistrationError(404, f"no process {incarnation!r} is registered: register first")
        return web.Response(status=204)

    async def stacks(self, request: web.Request) -> web.Response:
        if not self._has_token:
            raise RegistrationError(403, _STACKS_REFUSED)
        run, ranks = parse_stacks_request(await request.read())
        progress = {progress.run: progress for progress in self._backend.runs()}
        if run not in progress:
            raise RegistrationError(404, f"no run {run!r} is known here; there are {', '.join(progress) or 'none'}")
        known = progress[run]
        answers = await self._backend.ask_stacks(run, known.attempt, ranks)
        return _json(asdict(known) | {"ranks": [answer.to_document() for answer in answers]})

    async def discovery(self, request: web.Request) -> web.Response:
        found = {"rank": per_rank, "node": per_node}.get(request.query.get("per", "rank"))
        if found is None:
            raise RegistrationError(400, "per is rank or node: /sd?per=node lists one page per host")
        return _json(found(self._backend.targets()))

    async def page(self, _: web.Request) -> web.Response:
        text = page(await self._backend.standing())
        return web.Response(text=text, content_type="text/html", headers=PAGE_HEADERS)

    async def status(self, _: web.Request) -> web.Response:
        return _json(asdict((await self._backend.standing()).service))

    async def targets(self, _: web.Request) -> web.Response:
        return _json([asdict(target) for target in (await self._backend.standing()).targets])

    async def runs(self, _: web.Request) -> web.Response:
        return _json([run.document() for run in (await self._backend.standing()).runs])

    async def exporters(self, _: web.Request) -> web.Response:
        return _json(list(self._backend.exporters()))

    async def health(self, _: web.Request) -> web.Response:
        trouble = self._backend.degraded()
        status = {"status": "ok"} if trouble is None else {"status": "degraded", "reason": trouble}
        return _json(status, status=200 if trouble is None else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._backend.metrics_page(), headers={"Content-Type": _PAGE_TYPE})


def _json(document: Any, *, status: int = 200) -> web.Response:
    return web.json_response(document, status=status, dumps=_dumps)


def _dumps(document: Any) -> str:
    """Return JSON in which a NaN loss is the text "NaN": JSON has no such number, and null would mean absent."""
    return json.dumps(_without_nonfinite(document), ensure_ascii=False, allow_nan=False)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124 - NaN
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    return [_without_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors with what is wrong and how to mend it: as text to a rank, which prints it; else as JSON."""
    try:
        return await handler(request)
    except RegistrationError as error:
        return _refusal(request, error.status, str(error))
    except web.HTTPNotFound:
        return _refusal(request, 404, f"no such page; there are {', '.join(_PATHS)}")
    except web.HTTPMethodNotAllowed as error:
        return _refusal(request, 405, f"use {' or '.join(sorted(error.allowed_methods))} here")
    except web.RequestPayloadError:
        return _refusal(request, 400, "the body is not in the encoding that its Content-Encoding names, or was cut off")
    except web.HTTPRequestEntityTooLarge:
        return _refusal(request, 413, f"a request may have {MAX_REQUEST_BYTES} bytes; leave out configuration")


def _refusal(request: web.Request, status: int, text: str) -> web.Response:
    headers = {"WWW-Authenticate": challenge(request)} if status == 401 else None
    if request.method == "POST":
        return web.Response(status=status, text=text, headers=headers)
    return web.json_response({"error": text}, status=status, headers=headers)
