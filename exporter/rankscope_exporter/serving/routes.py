"""Answers of a rank: the record channel, plans, the live page, health and configuration; and its recent clients.

Requests and answers are values here; sockets are in `http_server`. `rankscope doctor` shows the recent clients.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.protocol.channel import (
    ARROW_STREAM,
    CONFIG_PATH,
    DEFAULT_MAX_BYTES,
    FIRST_HEADER,
    HEAD_HEADER,
    HEALTH_PATH,
    INCARNATION_HEADER,
    LAST_HEADER,
    LEASE_HEADER,
    LOST_HEADER,
    METRICS_PATH,
    NODE_METRICS_PATH,
    NOTHING,
    PLAN_PATH,
    RECORDS_PATH,
    RING_FILL_HEADER,
    ROWS_HEADER,
    SCHEMA_HEADER,
    STACKS_PATH,
    STATE_DRAINING,
    STATE_HEADER,
    STATE_RUNNING,
)
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.serving.http_server import Answer, Request
from rankscope_exporter.serving.persistence import Persistence, orphan_answer, stretch_answer
from rankscope_exporter.serving.ring import CursorError, Ring
from rankscope_exporter.serving.wire_encoder import encode

MOST_CLIENTS: Final = 8
_LONGEST_NAME: Final = 80
_WATCHED: Final = frozenset({METRICS_PATH, NODE_METRICS_PATH, RECORDS_PATH})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankServerSources:
    """Functions of other parts of the session that the server calls while it answers a request.

    The server calls all of them on its own threads. A rank without a function for a request answers 503.
    """

    take_stacks: Callable[[], Mapping[str, Any]] | None = None
    """POST /stacks: takes and publishes the stacks of all threads, and returns them as a JSON object."""
    change_sampling: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """PUT /config: changes the sampling, and returns the current and the pending state. Raises ConfigError."""
    sampling_state: Callable[[], Mapping[str, Any]] | None = None
    """GET /config: returns the current sampling, shown under `measuring`."""
    stretch: Callable[[], int | None] = lambda: None
    """Metrics page: the factor by which the overhead controller has multiplied the sampling interval."""
    collectives: Callable[[], Mapping[str, tuple[int, int]]] = dict
    """Metrics page: number of calls and of bytes by operation."""


class RecentClients:
    """The latest readers of each page. Asked and told by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}  # the one seen last is the last

    def note(self, path: str, agent: str) -> None:
        """Note that `agent` was given the page at `path`."""
        if path not in _WATCHED:
            return
        name = "".join(char if char.isprintable() else "?" for char in agent[:_LONGEST_NAME]) or "unnamed"
        with self._lock:
            self._seen.pop((path, name), None)
            self._seen[path, name] = self._clock()
            if len(self._seen) > MOST_CLIENTS:
                del self._seen[next(iter(self._seen))]

    def latest(self) -> list[dict[str, Any]]:
        """Return page, name and how long ago, the latest first."""
        with self._lock:
            seen = list(reversed(self._seen.items()))
        now = self._clock()
        return [{"page": path, "by": by, "seconds_ago": round(now - at, 1)} for (path, by), at in seen]


PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"
_MAX_BYTES_LIMIT: Final = 1 << 28  # a reader may ask for less memory in this process, not for any amount of it
_PATHS: Final = (RECORDS_PATH, PLAN_PATH + "<hash>", METRICS_PATH, HEALTH_PATH, CONFIG_PATH)
_WRITABLE: Final = ((STACKS_PATH, "POST"), (CONFIG_PATH, "POST"), (CONFIG_PATH, "PUT"))
_WHERE_PERMITTED: Final = (
    "only where it has a token: set RANKSCOPE_TOKEN for the rank, the same as [service] token, and send it as"
    " Authorization: Bearer <token>"
)
_STACKS_REFUSED: Final = f"stacks show where this process stands, and are given {_WHERE_PERMITTED}"
_SWITCH_REFUSED: Final = f"what is measured can be changed over HTTP {_WHERE_PERMITTED}"


class BadRequestError(ValueError):
    """A parameter cannot be understood; the text names it."""


class Host(Protocol):
    """What the routes need to know of the process they speak for."""

    incarnation: str
    ring: Ring
    persistence: Persistence

    @property
    def draining(self) -> bool:
        """Whether the rank waits for its last records to be committed."""
        ...

    @property
    def lease(self) -> str | None:
        """The lease that may move `committed`."""
        ...

    def polled(self, committed: int) -> None:
        """Note a poll of the holder of the lease, and what its store has. Raises CursorError."""
        ...

    def plan(self, plan_hash: str) -> str | None:
        """Return the text of a plan."""
        ...

    def health(self) -> Mapping[str, Any]:
        """Return what /healthz shows."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Return what /config shows."""
        ...

    def page(self) -> Sequence[Any]:
        """Return the metrics page in pieces."""
        ...

    def node_page(self) -> Sequence[Any] | None:
        """Return the page of the node's ranks in pieces; None where none was asked for."""
        ...

    def stacks(self) -> Mapping[str, Any] | None:
        """Take stacks, record them, and return what was taken; None where nobody takes any."""
        ...

    def switch(self, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Change what is measured and return what is and will be; None where nobody can. Raises ConfigError."""
        ...

    def count_unencodable(self, rows: int) -> None:
        """Note rows that were left out of a stream."""
        ...


@dataclass(frozen=True, slots=True)
class _Poll:
    incarnation: str | None  # None: whoever answers, for people with curl
    after: int
    committed: int | None
    max_bytes: int

    @classmethod
    def of(cls, query: Mapping[str, str]) -> _Poll:
        return cls(
            query.get("incarnation"),
            _integer(query, "after", NOTHING, least=NOTHING),
            _integer(query, "committed", None, least=NOTHING),
            min(_integer(query, "max_bytes", DEFAULT_MAX_BYTES, least=1), _MAX_BYTES_LIMIT),
        )


class Routes:
    """The application behind the rank's HTTP server."""

    def __init__(self, host: Host, token: str | None) -> None:
        self._host = host
        self._token = token
        self._readers = RecentClients()

    def __call__(self, request: Request) -> Answer:
        """Return the answer to a GET, or to what else there is."""
        if request.method != "GET" and (request.path, request.method) not in _WRITABLE:
            text = f"{request.method}: only GET is offered here"
            return Answer.text(HTTPStatus.METHOD_NOT_ALLOWED, text, Allow="GET")
        if request.path == HEALTH_PATH:  # says nothing worth a secret, and probes have none
            return _json({**self._host.health(), "readers": self._readers.latest()})
        if not self._is_authorized(request):
            return Answer.text(
                HTTPStatus.UNAUTHORIZED,
                "send Authorization: Bearer <token> (RANKSCOPE_TOKEN)",
                WWW_Authenticate="Bearer",
            )
        self._readers.note(request.path, request.headers.get("user-agent", ""))
        if request.path.startswith(PLAN_PATH):
            return self._plan(request.path.removeprefix(PLAN_PATH))
        route = self._routes().get(request.path)
        if route is None:
            return Answer.text(HTTPStatus.NOT_FOUND, "no such page; there are " + ", ".join(_PATHS))
        try:
            return route(request)
        except BadRequestError as error:
            return Answer.text(HTTPStatus.BAD_REQUEST, str(error))

    def _routes(self) -> dict[str, Callable[[Request], Answer]]:
        return {
            STACKS_PATH: self._stacks,
            RECORDS_PATH: self._records,
            METRICS_PATH: self._metrics,
            NODE_METRICS_PATH: self._node_metrics,
            CONFIG_PATH: self._config,
        }

    def _is_authorized(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._token.encode()) and scheme.lower() == "bearer"

    def _records(self, request: Request) -> Answer:
        refusal = _negotiate(request)
        if refusal is not None:
            return refusal
        poll = _Poll.of(request.query)
        if poll.incarnation not in (None, self._host.incarnation):
            orphan = self._host.persistence.orphan(str(poll.incarnation))
            if orphan is not None:
                committed = poll.committed if _holds_lease(request, orphan.lease) else None
                answer = orphan_answer(orphan, self._state_headers(), poll.after, committed, poll.max_bytes)
                if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    self._host.persistence.finished(orphan)
                return answer
            return self._respond(HTTPStatus.CONFLICT, f"this process is {self._host.incarnation}")
        try:
            if poll.committed is not None and _holds_lease(request, self._host.lease):
                self._host.polled(poll.committed)
            stretch = self._host.persistence.after(poll.after, poll.max_bytes, self._host.ring.first)
            if stretch is not None:
                return stretch_answer(stretch, self._state_headers(), poll.after)
            window = self._host.ring.after(poll.after, poll.max_bytes)
        except CursorError as error:
            return self._respond(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, str(error))
        if not window.records:
            done = self._host.draining and not self._host.ring.uncommitted
            if done:
                return self._respond(
                    HTTPStatus.SERVICE_UNAVAILABLE, "drained: everything is committed, the process ends"
                )
            return Answer(HTTPStatus.NO_CONTENT, headers=self._state_headers())
        encoded = encode(window.first, window.records)
        self._host.count_unencodable(encoded.unencodable)
        headers = self._state_headers() | {
            FIRST_HEADER: str(window.first),
            LAST_HEADER: str(window.last),
            ROWS_HEADER: str(len(window.records)),
        }
        if window.lost is not None:
            headers[LOST_HEADER] = f"{window.lost[0]}-{window.lost[1]}"
        return Answer(HTTPStatus.OK, (encoded.body,), ARROW_STREAM, headers)

    def _state_headers(self) -> dict[str, str]:
        ring = self._host.ring
        return {
            SCHEMA_HEADER: str(SCHEMA_VERSION),
            INCARNATION_HEADER: self._host.incarnation,
            HEAD_HEADER: str(ring.head),
            RING_FILL_HEADER: f"{ring.fill:.3f}",
            STATE_HEADER: STATE_DRAINING if self._host.draining else STATE_RUNNING,
        }

    def _respond(self, status: int, text: str) -> Answer:
        return Answer(status, ((text + "\n").encode(),), headers=self._state_headers())

    def _plan(self, plan_hash: str) -> Answer:
        plan = self._host.plan(plan_hash)
        if plan is None:
            return Answer.text(HTTPStatus.NOT_FOUND, "no record of this process uses such a plan")
        return Answer(HTTPStatus.OK, (plan.encode(),), _JSON, {"Cache-Control": "max-age=31536000, immutable"})

    def _stacks(self, request: Request) -> Answer:
        if request.method != "POST":
            return Answer.text(HTTPStatus.METHOD_NOT_ALLOWED, "use POST here: it has stacks taken", Allow="POST")
        if self._token is None:
            return Answer.text(HTTPStatus.FORBIDDEN, _STACKS_REFUSED)
        taken = self._host.stacks()
        if taken is None:
            return Answer.text(HTTPStatus.SERVICE_UNAVAILABLE, "this process is about to end")
        text = json.dumps(taken, ensure_ascii=False)
        return Answer(HTTPStatus.OK, ((text + "\n").encode("utf-8", "replace"),), _JSON, {"Cache-Control": "no-store"})

    def _config(self, request: Request) -> Answer:
        if request.method == "GET":
            return _json(self._host.settings())
        if self._token is None:
            return Answer.text(HTTPStatus.FORBIDDEN, _SWITCH_REFUSED)
        try:
            state = self._host.switch(_document(request))
        except ConfigError as error:
            raise BadRequestError(str(error)) from error
        if state is None:
            return Answer.text(HTTPStatus.SERVICE_UNAVAILABLE, "this process is about to end")
        return _json(state, HTTPStatus.ACCEPTED)

    def _metrics(self, request: Request) -> Answer:
        return _page(request, self._host.page())

    def _node_metrics(self, request: Request) -> Answer:
        pieces = self._host.node_page()
        if pieces is None:
            return Answer.text(
                HTTPStatus.NOT_FOUND, "no node page here: set node_page (RANKSCOPE_NODE_PAGE=1) on the ranks"
            )
        return _page(request, pieces)


def _document(request: Request) -> Mapping[str, Any]:
    if request.body is None:
        raise BadRequestError("the body has no length, or is longer than 64 KiB")
    try:
        document = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON document: {error}") from error
    if not isinstance(document, dict):
        raise BadRequestError('the body is a JSON object of settings, such as {"quantities": ["gradients"]}')
    return document


def _page(request: Request, pieces: Sequence[Any]) -> Answer:
    if not _accepts_gzip(request.headers.get("accept-encoding", "")):
        return Answer(HTTPStatus.OK, pieces, PAGE_TYPE, {"Vary": "Accept-Encoding"})
    # Level 1: a third of level 6's CPU for a page that is only a little larger.
    deflate = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = [*(deflate.compress(piece) for piece in pieces), deflate.flush()]
    return Answer(HTTPStatus.OK, packed, PAGE_TYPE, {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})


def _holds_lease(request: Request, lease: str | None) -> bool:
    given = request.headers.get(LEASE_HEADER.lower(), "")
    return lease is not None and hmac.compare_digest(given.encode(), lease.encode())


def _negotiate(request: Request) -> Answer | None:
    """Return a refusal when the reader cannot understand what would be sent."""
    accepted = request.headers.get("accept", "*/*")
    if not any(kind in accepted for kind in (ARROW_STREAM, "*/*", "application/*")):
        return Answer.text(HTTPStatus.NOT_ACCEPTABLE, f"records travel as {ARROW_STREAM}")
    wanted = request.headers.get(SCHEMA_HEADER.lower(), str(SCHEMA_VERSION))
    if str(SCHEMA_VERSION) in (version.strip() for version in wanted.split(",")):
        return None
    return Answer.text(
        HTTPStatus.NOT_ACCEPTABLE,
        f"schema version {wanted} is not spoken here; supported: {SCHEMA_VERSION}",
        **{SCHEMA_HEADER: str(SCHEMA_VERSION)},
    )


def _integer(query: Mapping[str, str], name: str, default: Any, *, least: int) -> Any:
    text = query.get(name)
    if text is None:
        return default
    try:
        value = int(text) if text.isascii() and len(text) < 20 else None
    except ValueError:
        value = None
    if value is None or value < least:
        raise BadRequestError(f"{name}={text!r}: a whole number of at least {least} is needed")
    return value


def _accepts_gzip(header: str) -> bool:
    for choice in header.lower().split(","):
        coding, _, weight = choice.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _json(document: Mapping[str, Any], status: int = HTTPStatus.OK) -> Answer:
    # NaN has no JSON form: settings and health hold none, and a fault here must not look like a valid page.
    text = json.dumps(document, ensure_ascii=False, indent=2, default=str)
    return Answer(status, ((text + "\n").encode("utf-8", "replace"),), _JSON, {"Cache-Control": "no-store"})
