"""HTTP routes of the service.

They serve the pages, the registration of ranks, requests to poll a rank immediately, Python stacks of ranks, remote
read and remote write, service discovery for Prometheus, the JSON API, the health page and the metrics page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from rankscope_contract.wire import channel
from rankscope_contract.wire.channel import Registration, RegistrationReply
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.detect.stall_tracker import RankAnswer, parse_stacks_request
from rankscope_ingest.http.pages import Pages
from rankscope_ingest.network.auth import OwnName, challenge, refuse_web_pages, token_guard
from rankscope_ingest.remote_write.handler import written_headers
from rankscope_ingest.runs.models import Health, Target
from rankscope_ingest.status_page.collect import Parts, Status
from rankscope_ingest.status_page.page import page
from rankscope_ingest.targets.registry import parse_registration
from rankscope_view.pages.rendering import Place
from rankscope_view.site import HEADERS

_JOB: Final = "rankscope"


def per_rank(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return the http_sd entry of the metrics page of each live rank."""
    found = []
    for target in targets:
        # Another process may serve the records of a dead process, but not the metrics page of the dead process.
        if target.health is Health.GONE or target.registration.served_by is not None:
            continue
        address = urlsplit(target.registration.url)
        scheme = {"__scheme__": "https"} if address.scheme == "https" else {}
        found.append({"targets": [address.netloc], "labels": {"job": _JOB, "instance": target.name, **scheme}})
    return found


MAX_REQUEST_BYTES: Final = 1 << 20
_PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STACKS_REFUSED: Final = (
    "stacks show the code that processes execute, and this service accepts requests of all machines: set [service]"
    " token, and RANKSCOPE_TOKEN for the ranks and for this command"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Backend(Parts, Protocol):
    """The methods of the service that the HTTP routes call."""

    async def register(self, registration: Registration) -> RegistrationReply:
        """Accept the registration or heartbeat of a rank. Raises RegistrationError if it is rejected."""

    def poke(self, incarnation: str) -> bool:
        """Poll the rank with this incarnation immediately; return False if it is not registered."""

    async def ask_stacks(self, run: str, attempt: int, ranks: Collection[int] | None) -> list[RankAnswer]:
        """Return the Python stacks of the live ranks of an attempt.

        `ranks` are the ranks from which stacks are requested; None means all live ranks.
        """

    async def remote_read(self, request: web.Request) -> web.StreamResponse:
        """Respond to a remote read request. Raises RegistrationError if the request is rejected or the query fails."""

    async def remote_write(self, request: web.Request) -> web.Response:
        """Respond to a remote write request. Raises RegistrationError if the request is rejected."""

    async def current_status(self) -> Status:
        """Return the status of the service, its runs, its targets and its exporters."""

    def metrics_page(self) -> bytes:
        """Return the service's own metrics in the Prometheus text format."""


def make_application(
    backend: Backend, pages: Pages, token: str | None, is_own_name: OwnName | None, *, is_guarded: bool
) -> web.Application:
    """Return the aiohttp application of the service.

    If the service has a token, all paths except the health page require the token. `is_own_name` returns whether a host
    name in a request is a name of this service. If it is None, all host names are accepted. `is_guarded` is false if
    other machines can send requests without a token or certificate; such a service sends no stacks.
    """
    routes = _Routes(backend, replace(pages.place, is_live=True), is_guarded=is_guarded)
    guards = [errors_as_text, token_guard(token), refuse_web_pages(is_own_name), refuse_compressed]
    application = web.Application(middlewares=guards, client_max_size=MAX_REQUEST_BYTES)
    application.add_routes(
        [
            web.post(channel.REGISTER_PATH, routes.register),
            web.post(channel.POKE_PATH, routes.poke),
            web.post(channel.RUN_STACKS_PATH, routes.stacks),
            web.post(channel.REMOTE_READ_PATH, backend.remote_read),
            web.post(channel.REMOTE_WRITE_PATH, backend.remote_write),
            web.get(channel.SERVICE_DISCOVERY_PATH, routes.discovery),
            *(web.get(base + channel.SERVICE_PAGE_PATH, routes.page) for base in dict.fromkeys(("", pages.base))),
            web.get(channel.STATUS_PATH, routes.status),
            web.get(channel.TARGETS_PATH, routes.targets),
            web.get(channel.RUNS_PATH, routes.runs),
            web.get(channel.EXPORTERS_PATH, routes.exporters),
            web.get(channel.HEALTH_PATH, routes.health),
            web.get(channel.METRICS_PATH, routes.metrics),
        ]
    )
    pages.add_to(application)
    return application


def alarms(backend: Backend) -> list[str]:
    """Return the problems of the service that the list of runs shows at its top."""
    found = []
    if reason := backend.degraded():
        found.append(f"The service is degraded: {reason}")
    if undelivered := backend.undelivered():
        found.append(f"Notifications: {undelivered}")
    found += [f"Run names: {run.notice}" for run in backend.runs() if run.notice]
    if failing := [target for target in backend.targets() if target.health is Health.FAILING]:
        names = ", ".join(target.name for target in failing[:3])
        found.append(f"{len(failing):,} rank{'' if len(failing) == 1 else 's'} cannot be polled: {names}")
    if lost := sum(progress.records_lost for progress in backend.runs()):
        found.append(f"{lost:,} {'record was' if lost == 1 else 'records were'} lost")
    return found


class _Routes:
    def __init__(self, backend: Backend, place: Place, *, is_guarded: bool) -> None:
        self._backend = backend
        self._place = place
        self._is_guarded = is_guarded

    async def register(self, request: web.Request) -> web.Response:
        registration = parse_registration(await request.read())
        reply = await self._backend.register(registration)
        return web.Response(text=reply.to_json(), content_type="application/json")

    async def poke(self, request: web.Request) -> web.Response:
        try:
            incarnation = json.loads(await request.read())["incarnation"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RegistrationError(
                400, 'a poke (a request to poll a rank now) must be a JSON object such as {"incarnation": "…"}'
            ) from error
        if not self._backend.poke(str(incarnation)):
            raise RegistrationError(
                404, f"no process with incarnation {incarnation!r} is registered: register the process first"
            )
        return web.Response(status=204)

    async def stacks(self, request: web.Request) -> web.Response:
        if not self._is_guarded:
            raise RegistrationError(403, _STACKS_REFUSED)
        run, ranks = parse_stacks_request(await request.read())
        progress = {progress.run: progress for progress in self._backend.runs()}
        if run not in progress:
            raise RegistrationError(404, f"run {run!r} is unknown; known runs: {', '.join(progress) or 'none'}")
        known = progress[run]
        answers = await self._backend.ask_stacks(run, known.attempt, ranks)
        return _json(asdict(known) | {"ranks": [answer.to_document() for answer in answers]})

    async def discovery(self, request: web.Request) -> web.Response:
        if (per := request.query.get("per", "rank")) != "rank":
            raise RegistrationError(400, f"per={per} is not supported: use /sd, which lists each rank")
        return _json(per_rank(self._backend.targets()))

    async def page(self, _: web.Request) -> web.Response:
        status = await self._backend.current_status()
        text = await asyncio.to_thread(page, self._place, status)
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def status(self, _: web.Request) -> web.Response:
        return _json(asdict((await self._backend.current_status()).service))

    async def targets(self, _: web.Request) -> web.Response:
        return _json([asdict(target) for target in (await self._backend.current_status()).targets])

    async def runs(self, _: web.Request) -> web.Response:
        return _json([run.document() for run in (await self._backend.current_status()).runs])

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
    """Return `document` as JSON with NaN and infinite numbers as text, such as "NaN".

    JSON has no such numbers, and null means an absent value.
    """
    return json.dumps(_without_nonfinite(document), ensure_ascii=False, allow_nan=False)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124 - NaN
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    return [_without_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


@web.middleware
async def errors_as_text(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors of request handlers to responses that state the reason and how the sender can correct it.

    The response to a POST is text, because ranks print it. Other responses are JSON.
    """
    try:
        return await handler(request)
    except RegistrationError as error:
        return _refusal(request, error.status, str(error))
    except web.HTTPNotFound:
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        return _refusal(request, 404, f"{request.path} does not exist; the paths are {', '.join(paths)}")
    except web.HTTPMethodNotAllowed as error:
        return _refusal(request, 405, f"use {' or '.join(sorted(error.allowed_methods))} for {request.path}")
    except web.RequestPayloadError:
        return _refusal(request, 400, "the body is truncated, or its chunks are malformed")
    except web.HTTPRequestEntityTooLarge:
        return _refusal(
            request,
            413,
            f"the request exceeds {MAX_REQUEST_BYTES} bytes; send a smaller body, for example less run configuration",
        )


@web.middleware
async def refuse_compressed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject a request with a compressed body. Remote read and remote write check the compression themselves."""
    encoding = request.headers.get("Content-Encoding", "identity")
    is_remote = request.path in {channel.REMOTE_READ_PATH, channel.REMOTE_WRITE_PATH}
    if request.method == "POST" and encoding.lower() != "identity" and not is_remote:
        raise RegistrationError(400, f"the Content-Encoding {encoding!r} is not supported: do not compress the body")
    return await handler(request)


def _refusal(request: web.Request, status: int, text: str) -> web.Response:
    headers = {"WWW-Authenticate": challenge(request)} if status == 401 else {}
    if request.path == channel.REMOTE_WRITE_PATH:
        headers |= written_headers(request)
    if request.method == "POST":
        return web.Response(status=status, text=text, headers=headers)
    return web.json_response({"error": text}, status=status, headers=headers)
