"""Routes of the rank's HTTP server: record channel, plans, metrics, health, configuration and stacks.

Requests and answers are values in this module; `http_server` owns the sockets.
"""

from __future__ import annotations

import hmac
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.wire import channel
from rankscope_contract.wire.spool import Orphan, SpoolRecords
from rankscope_exporter.process.errors import ConfigError, ShareError
from rankscope_exporter.publish.exposition import Exposition
from rankscope_exporter.publish.http_server import Answer, Request
from rankscope_exporter.publish.registration import OrphanRecovery
from rankscope_exporter.publish.ring import CursorError, Ring, Window, stream
from rankscope_exporter.publish.spool import SpoolWriter

PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"
_NO_STORE: Final = {"Cache-Control": "no-store"}
_MAX_BYTES_LIMIT: Final = 1 << 28  # upper limit of `max_bytes`, so that a client cannot exhaust this process's memory
_AUTHORIZATION_HINT: Final = (
    "set RANKSCOPE_TOKEN for the rank, equal to [service] token, and send it as Authorization: Bearer <token>"
)
_STACKS_REFUSED: Final = (
    "stacks contain source locations of the training, and this rank accepts requests of all machines: "
    f"{_AUTHORIZATION_HINT}"
)
_CHANGE_REFUSED: Final = f"sampling can be changed over HTTP only on a rank with a token: {_AUTHORIZATION_HINT}"
_ENDING: Final = "this process is about to exit"


class BadRequestError(ValueError):
    """Error: a parameter or the body of a request is invalid. The text names the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankServerSources:
    """Functions of other components of the monitor, which the server calls on its own threads.

    A rank without a function for a request answers 503.
    """

    take_stacks: Callable[[], Mapping[str, Any]] | None = None
    """Function for POST /stacks.

    It reads and publishes the stacks of all threads, and returns a JSON object with the stacks.
    """
    change_sampling: Callable[[Mapping[str, Any]], None] | None = None
    """Function for PUT /config. It changes the sampling. Raises ConfigError if the request is invalid."""
    sampling_state: Callable[[], Mapping[str, Any]] | None = None
    """Function that returns the current and the pending sampling settings.

    They are the answer to PUT /config. The answer to GET /config contains them under the key `measuring`.
    """
    queued: Callable[[], int] = lambda: 0
    """Function that returns the number of records which the service must count as lost if this process dies now.

    They are the records of ended steps that are not published, and the dropped ones that no event has reported.
    """
    stretch: Callable[[], int | None] = lambda: None
    """Function for the metrics page.

    It returns the factor by which the overhead controller has multiplied the sampling interval.
    """
    collectives: Callable[[], Mapping[str, tuple[int, int]]] = dict
    """Function for the metrics page. It returns the number of calls and of bytes for each collective operation."""
    overhead: Callable[[], Mapping[str, float]] = dict
    """Function for the metrics page. It returns the CPU seconds of other components of the monitor."""
    dropped: Callable[[], Mapping[str, int]] = dict
    """Function for the metrics page. It returns the numbers of data that other components have dropped."""
    on_registered: Callable[[int], None] = lambda _: None
    """Function that is called when the service has accepted this rank for the first time, with the attempt number."""


class ServedRank(Protocol):
    """The rank whose data the routes send: a `RankServer`, which imports this module."""

    incarnation: str
    settings: Mapping[str, Any]
    sources: RankServerSources
    exposition: Exposition
    ring: Ring
    spool: SpoolWriter | None
    orphans: OrphanRecovery | None
    lease: str | None
    state: str
    is_closed: bool

    def on_poll(self, committed: int, *, has_notice: bool) -> None:
        """Mark records up to the sequence number `committed` as committed. Raises CursorError.

        Called for each poll by the service that holds the lease. `has_notice` states that it has a notice for the rank.
        """


MOST_CLIENTS: Final = 8
_LONGEST_NAME: Final = 80
_LISTED_PATHS: Final = frozenset({channel.METRICS_PATH, channel.RECORDS_PATH})


class RecentClients:
    """The clients that most recently requested a page of this rank, at most 8 (MOST_CLIENTS).

    All methods may be called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}  # the most recent client is the last entry

    def note(self, path: str, agent: str) -> None:
        """Record the time at which the client `agent` requested `path`."""
        if path not in _LISTED_PATHS:
            return
        name = "".join(char if char.isprintable() else "?" for char in agent[:_LONGEST_NAME]) or "unnamed"
        with self._lock:
            self._seen.pop((path, name), None)
            self._seen[path, name] = self._clock()
            if len(self._seen) > MOST_CLIENTS:
                del self._seen[next(iter(self._seen))]

    def latest(self) -> list[dict[str, Any]]:
        """Return path, client name and seconds since the last request of each client, the most recent client first."""
        with self._lock:
            seen = list(reversed(self._seen.items()))
        now = self._clock()
        return [{"page": path, "by": by, "seconds_ago": round(now - at, 1)} for (path, by), at in seen]


class Routes:
    """The application behind the HTTP server of a rank: one handler for each path and method."""

    def __init__(self, rank: ServedRank, *, token: str | None, is_guarded: bool) -> None:
        """`is_guarded`: only processes on this machine, or clients with a token or certificate, can send requests."""
        self._rank = rank
        self._token = token
        self._is_guarded = is_guarded
        self._clients = RecentClients()
        change = self._change_config
        self._table: Mapping[str, Mapping[str, Callable[[Request], Answer]]] = {
            channel.HEALTH_PATH: {"GET": self._health},
            channel.RECORDS_PATH: {"GET": self._records},
            channel.PLAN_PATH: {"GET": self._plan},
            channel.METRICS_PATH: {"GET": lambda request: _page(request, rank.exposition.pieces())},
            channel.CONFIG_PATH: {"GET": self._show_config, "PUT": change, "POST": change},
            channel.STACKS_PATH: {"POST": self._take_stacks},
        }

    def __call__(self, request: Request) -> Answer:
        """Return the answer to `request`."""
        handlers = self._table.get(channel.PLAN_PATH if request.path.startswith(channel.PLAN_PATH) else request.path)
        method = "GET" if request.method == "HEAD" else request.method  # the server sends no body for HEAD
        if handlers is not None and method not in handlers:
            allowed = ", ".join((*handlers, "HEAD") if "GET" in handlers else handlers)
            text = f"{request.method} is not allowed here; use {allowed}"
            return Answer.text(HTTPStatus.METHOD_NOT_ALLOWED, text, Allow=allowed)
        # /healthz contains nothing confidential, and probes of an orchestrator send no token.
        if request.path != channel.HEALTH_PATH and not self._is_authorized(request):
            hint = "send Authorization: Bearer <token> (RANKSCOPE_TOKEN)"
            return Answer.text(HTTPStatus.UNAUTHORIZED, hint, WWW_Authenticate="Bearer")
        if handlers is None:
            paths = ", ".join(f"{path}<hash>" if path == channel.PLAN_PATH else path for path in self._table)
            return Answer.text(HTTPStatus.NOT_FOUND, f"no such page; available: {paths}")
        self._clients.note(request.path, request.headers.get("user-agent", ""))
        try:
            return handlers[method](request)
        except BadRequestError as error:
            return Answer.text(HTTPStatus.BAD_REQUEST, str(error))

    def _is_authorized(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._token.encode()) and scheme.lower() == "bearer"

    def _health(self, _request: Request) -> Answer:
        rank = self._rank
        health = {"status": "ok", "state": rank.state, "incarnation": rank.incarnation, "head": rank.ring.head}
        return _json({**health, "readers": self._clients.latest()})

    def _records(self, request: Request) -> Answer:
        if refusal := _negotiate(request):
            return refusal
        query, rank = request.query, self._rank
        incarnation = query.get("incarnation", rank.incarnation)  # a client such as curl may leave it out
        after = _integer(query, "after", channel.NOTHING, least=channel.NOTHING)
        committed = _integer(query, "committed", None, least=channel.NOTHING)
        max_bytes = min(_integer(query, "max_bytes", channel.DEFAULT_MAX_BYTES, least=1), _MAX_BYTES_LIMIT)
        if incarnation != rank.incarnation:
            if rank.orphans is None or (orphan := rank.orphans.get(incarnation)) is None:
                return self._refuse(HTTPStatus.CONFLICT, f"this process is {rank.incarnation}")
            own = committed if _holds_lease(request, orphan.lease) else None
            return self._orphan_records(rank.orphans, orphan, after, own, max_bytes)
        try:
            if committed is not None and _holds_lease(request, rank.lease):
                rank.on_poll(committed, has_notice=channel.NOTICE_HEADER.lower() in request.headers)
            records = None if rank.spool is None else rank.spool.after(after, max_bytes, rank.ring.first)
            if records is not None:
                return _records_answer(records.data, records, self._state_headers(), after)
            window = rank.ring.after(after, max_bytes)
        except CursorError as error:
            return self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, str(error))
        if not window.encoded:
            if rank.state == channel.STATE_DRAINING and not rank.ring.uncommitted:
                text = "drained: all records are committed, the process exits"
                return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, text)
            return Answer(HTTPStatus.NO_CONTENT, headers=self._state_headers())
        return _records_answer(stream(window.first, window.encoded), window, self._state_headers(), after)

    def _orphan_records(
        self, orphans: OrphanRecovery, orphan: Orphan, after: int, committed: int | None, max_bytes: int
    ) -> Answer:
        """Return the records of a dead process after the sequence number `after`.

        Without such records, the status is 503 if all records are committed, and 204 otherwise. `committed` is the
        newest committed sequence number that the client sent; None if the client does not hold the lease.
        """
        try:
            if committed is not None:
                orphan.commit(committed)
            records = orphan.after(after, max_bytes)
        except OSError as error:
            return Answer.text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{orphan.folder}: {error.strerror or error}")
        headers = self._state_headers() | {
            channel.INCARNATION_HEADER: orphan.incarnation,
            channel.HEAD_HEADER: str(orphan.head),
            channel.RING_FILL_HEADER: "1.000",
            channel.STATE_HEADER: channel.STATE_DRAINING,
        }
        if records is not None:
            return _records_answer(records.data, records, headers, after)
        if not orphan.is_done:
            return Answer(HTTPStatus.NO_CONTENT, headers=headers)
        orphans.finished(orphan)
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, (b"drained: all records are committed\n",), headers=headers)

    def _state_headers(self) -> dict[str, str]:
        return {
            channel.SCHEMA_HEADER: str(SCHEMA_VERSION),
            channel.INCARNATION_HEADER: self._rank.incarnation,
            channel.HEAD_HEADER: str(self._rank.ring.head),
            channel.QUEUED_HEADER: str(self._rank.sources.queued()),
            channel.RING_FILL_HEADER: f"{self._rank.ring.fill:.3f}",
            channel.STATE_HEADER: self._rank.state,
        }

    def _refuse(self, status: int, text: str) -> Answer:
        return Answer(status, ((text + "\n").encode(),), headers=self._state_headers())

    def _plan(self, request: Request) -> Answer:
        plan_hash = request.path.removeprefix(channel.PLAN_PATH)
        plan = self._rank.ring.plan(plan_hash)
        on_disk = (source.plan(plan_hash) for source in (self._rank.spool, self._rank.orphans) if source is not None)
        text = next(filter(None, on_disk), None) if plan is None else plan.json
        if text is None:
            return Answer.text(HTTPStatus.NOT_FOUND, "no record of this process uses this plan")
        return Answer(HTTPStatus.OK, (text.encode(),), _JSON, {"Cache-Control": "max-age=31536000, immutable"})

    def _take_stacks(self, _request: Request) -> Answer:
        if not self._is_guarded:
            return Answer.text(HTTPStatus.FORBIDDEN, _STACKS_REFUSED)
        take = self._rank.sources.take_stacks
        if take is None or self._rank.is_closed:
            return Answer.text(HTTPStatus.SERVICE_UNAVAILABLE, _ENDING)
        return _json(take(), indent=None)

    def _show_config(self, _request: Request) -> Answer:
        state = self._rank.sources.sampling_state
        return _json(self._rank.settings if state is None else {**self._rank.settings, "measuring": state()})

    def _change_config(self, request: Request) -> Answer:
        if self._token is None:
            return Answer.text(HTTPStatus.FORBIDDEN, _CHANGE_REFUSED)
        sources, document = self._rank.sources, _document(request)
        if sources.change_sampling is None or sources.sampling_state is None or self._rank.is_closed:
            return Answer.text(HTTPStatus.SERVICE_UNAVAILABLE, _ENDING)
        try:
            sources.change_sampling(document)
            return _json(sources.sampling_state(), HTTPStatus.ACCEPTED)
        except ConfigError as error:
            raise BadRequestError(str(error)) from error
        except ShareError as error:
            return Answer.text(HTTPStatus.BAD_GATEWAY, str(error))


def _records_answer(data: Any, records: SpoolRecords | Window, headers: dict[str, str], after: int) -> Answer:
    """Return an answer with `records`. Those missing between the cursor `after` and the first are reported as lost."""
    first, last = records.first, records.last
    numbers = {channel.FIRST_HEADER: first, channel.LAST_HEADER: last, channel.ROWS_HEADER: last - first + 1}
    headers |= {name: str(number) for name, number in numbers.items()}
    if first > after + 1:
        headers[channel.LOST_HEADER] = f"{after + 1}-{first - 1}"
    return Answer(HTTPStatus.OK, (data,), channel.ARROW_STREAM, headers)


def _document(request: Request) -> Mapping[str, Any]:
    if request.body is None:
        raise BadRequestError("the request body has no length, or is longer than 64 KiB")
    try:
        document = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not a JSON document: {error}") from error
    if not isinstance(document, dict):
        raise BadRequestError('the body must be a JSON object of settings, such as {"quantities": ["gradients"]}')
    return document


def _page(request: Request, pieces: Sequence[Any]) -> Answer:
    if not _accepts_gzip(request.headers.get("accept-encoding", "")):
        return Answer(HTTPStatus.OK, pieces, PAGE_TYPE, {"Vary": "Accept-Encoding"})
    # Level 1 takes a third of the CPU time of level 6, and the page is only slightly larger.
    deflate = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = [*(deflate.compress(piece) for piece in pieces), deflate.flush()]
    return Answer(HTTPStatus.OK, packed, PAGE_TYPE, {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})


def _holds_lease(request: Request, lease: str | None) -> bool:
    given = request.headers.get(channel.LEASE_HEADER.lower(), "")
    return lease is not None and hmac.compare_digest(given.encode(), lease.encode())


def _negotiate(request: Request) -> Answer | None:
    """Return an error answer if the client does not accept the content type or schema version of the record channel.

    Return None if it accepts both.
    """
    accepted = request.headers.get("accept", "*/*")
    if not any(kind in accepted for kind in (channel.ARROW_STREAM, "*/*", "application/*")):
        return Answer.text(
            HTTPStatus.NOT_ACCEPTABLE, f"records are sent only as {channel.ARROW_STREAM}: add it to Accept"
        )
    wanted = request.headers.get(channel.SCHEMA_HEADER.lower(), str(SCHEMA_VERSION))
    if str(SCHEMA_VERSION) in (version.strip() for version in wanted.split(",")):
        return None
    text = f"schema version {wanted} is not supported; supported: {SCHEMA_VERSION}"
    return Answer.text(HTTPStatus.NOT_ACCEPTABLE, text, **{channel.SCHEMA_HEADER: str(SCHEMA_VERSION)})


def _integer(query: Mapping[str, str], name: str, default: Any, *, least: int) -> Any:
    text = query.get(name)
    if text is None:
        return default
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None or int(text) < least:
        raise BadRequestError(f"{name}={text!r}: must be a whole number of at least {least}")
    return int(text)


def _accepts_gzip(header: str) -> bool:
    for choice in header.lower().split(","):
        coding, _, weight = choice.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _json(document: Mapping[str, Any], status: int = HTTPStatus.OK, indent: int | None = 2) -> Answer:
    # Settings and health contain no NaN, which JSON cannot represent.
    text = json.dumps(document, ensure_ascii=False, indent=indent, default=str)
    return Answer(status, ((text + "\n").encode("utf-8", "replace"),), _JSON, _NO_STORE)
