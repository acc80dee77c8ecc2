"""One HTTP conversation with a rank: ask, check every promise of the answer, hand over a whole body or an error.

No redirects, no proxies, no cookies; only addresses inside the allowed networks; never more bytes than asked for plus
one record. What the status means is in DESIGN section 5.
"""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypedDict

import aiohttp
from yarl import URL

from rankscope_contract import SCHEMA_VERSION, __version__
from rankscope_contract.protocol.channel import (
    ARROW_STREAM,
    FIRST_HEADER,
    HEAD_HEADER,
    INCARNATION_HEADER,
    LAST_HEADER,
    LEASE_HEADER,
    NOTHING,
    PLAN_PATH,
    RECORDS_PATH,
    RING_FILL_HEADER,
    ROWS_HEADER,
    SCHEMA_HEADER,
    STACKS_PATH,
    STATE_DRAINING,
    STATE_HEADER,
)
from rankscope_contract.security.tls import MakeContext
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.network.dialing import Address, AllowedResolver, address_of, fetch_error, is_allowed

MAX_BODY_BYTES: Final = 1 << 28  # a single record may be larger than what was asked for, but not without end
MAX_PLAN_BYTES: Final = 1 << 26
MAX_STACKS_BYTES: Final = 1 << 20
MAX_TEXT_BYTES: Final = 2000
_CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStatus:
    """What every answer of a rank says about its ring; None where the header was left out."""

    head: int | None = None
    ring_fill: float = 0.0
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A whole body, not yet opened; the headers' promises about its content are checked against it by the caller."""

    data: bytes
    first: int
    last: int
    rows: int
    standing: RingStatus


@dataclass(frozen=True, slots=True)
class NothingNew:
    """Status 204."""

    standing: RingStatus


@dataclass(frozen=True, slots=True)
class Drained:
    """Status 503: everything is committed and the process is about to end."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Status 409: another incarnation answers at this address."""

    incarnation: str


Answer = Body | NothingNew | Drained | OtherProcess


class _Secured(TypedDict, total=False):
    """What aiohttp is told of a call in TLS."""

    ssl: ssl.SSLContext
    server_hostname: str | None


class Fetcher:
    """A pool of connections to all ranks."""

    def __init__(
        self,
        *,
        networks: Sequence[Network],
        token: str | None,
        timeout_seconds: float,
        tls: MakeContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self._networks = networks
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=min(_CONNECT_SECONDS, timeout_seconds))
        self._tls = tls
        self._server_name = server_name
        self.resolver = AllowedResolver(networks)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # One pool without a limit: a slow rank must not keep another one waiting for a connection.
        connector = aiohttp.TCPConnector(limit=0, resolver=self.resolver, use_dns_cache=False)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"User-Agent": f"Rankscope/{__version__}"},  # so that a rank can say who reads it
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def records(
        self, url: str, *, incarnation: str, after: int, committed: int, lease: str | None, max_bytes: int
    ) -> Answer:
        """Ask for `max_bytes` of the records after `after`, or for one record. Raises FetchError."""
        headers = {"Accept": ARROW_STREAM, SCHEMA_HEADER: str(SCHEMA_VERSION)}
        query = {"incarnation": incarnation, "after": str(after), "max_bytes": str(max_bytes)}
        if lease is not None:
            headers[LEASE_HEADER] = lease
            query["committed"] = str(committed)
        response = await self._get(url + RECORDS_PATH, headers, query)
        async with Reading(response, url):
            return await self._read_records(response, incarnation)

    async def plan(self, url: str, plan_id: str) -> str:
        """Return the text of a plan, whose hash the caller checks. Raises FetchError."""
        response = await self._get(url + PLAN_PATH + plan_id, {"Accept": "application/json"}, {})
        async with Reading(response, url):
            if response.status != 200:
                raise await _refusal(response)
            data = await _whole_body(response, MAX_PLAN_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise FetchError("garbage", f"plan {plan_id} is not UTF-8 text") from error

    async def stacks(self, url: str) -> dict[str, Any]:
        """Have a rank take its stacks, and return what it answers. Raises FetchError."""
        response = await self._ask("POST", url + STACKS_PATH, {"Accept": "application/json"}, {})
        async with Reading(response, url):
            if response.status != 200:
                raise await _refusal(response)
            data = await _whole_body(response, MAX_STACKS_BYTES)
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FetchError("garbage", f"the stacks of {url} are no JSON") from error
        if not isinstance(document, dict):
            raise FetchError("garbage", f"the stacks of {url} are no JSON object")
        return document

    async def _get(self, url: str, headers: Mapping[str, str], query: Mapping[str, str]) -> aiohttp.ClientResponse:
        return await self._ask("GET", url, headers, query)

    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "use `async with`"
        target, address = _place(url)
        if address is not None and not is_allowed(address, self._networks):
            raise FetchError("forbidden", f"{target.host} is outside [service] allowed_networks")
        if self._token is not None:
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        async with Reading(None, url):
            return await self._session.request(
                method, target.with_query(query), headers=headers, allow_redirects=False, **self._secured(target)
            )

    def _secured(self, target: URL) -> _Secured:
        if target.scheme != "https" or self._tls is None:
            return {}
        return {"ssl": self._tls(), "server_hostname": self._server_name}

    async def _read_records(self, response: aiohttp.ClientResponse, incarnation: str) -> Answer:
        if response.status == 503 and response.headers.get(STATE_HEADER) == STATE_DRAINING:
            return Drained()
        if response.status == 409 and INCARNATION_HEADER in response.headers:
            return OtherProcess(response.headers[INCARNATION_HEADER])
        if response.status not in {200, 204}:
            raise await _refusal(response)
        if response.headers.get(INCARNATION_HEADER) != incarnation:
            raise FetchError("garbage", f"the answer carries no {INCARNATION_HEADER} of the process that was asked")
        if response.headers.get(SCHEMA_HEADER, str(SCHEMA_VERSION)) != str(SCHEMA_VERSION):
            raise FetchError("schema", _schema_text(response))
        standing = _standing(response)
        if response.status == 204:
            return NothingNew(standing)
        if response.content_type != ARROW_STREAM:
            raise FetchError("garbage", f"Content-Type is {response.content_type!r}, not {ARROW_STREAM}")
        return Body(
            data=await _whole_body(response, MAX_BODY_BYTES),
            first=_integer(response, FIRST_HEADER),
            last=_integer(response, LAST_HEADER),
            rows=_integer(response, ROWS_HEADER),
            standing=standing,
        )


class Reading:
    """Turns what aiohttp and the system raise while a response is awaited or read into FetchError, and closes it."""

    def __init__(self, response: aiohttp.ClientResponse | None, url: str) -> None:
        self._response = response
        self._url = url

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            # A response that was read to its end gives its connection back; any other one must not be reused.
            if error is None:
                self._response.release()
            else:
                self._response.close()
        if (told := fetch_error(error, self._url)) is not None:
            raise told from error


@functools.lru_cache(maxsize=4096)
def _place(url: str) -> tuple[URL, Address | None]:
    """Return `url` taken apart, and the address it spells out; a rank is asked at the same ones every two seconds."""
    target = URL(url)
    return target, address_of(target.host or "")


async def _whole_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return exactly Content-Length bytes; a body without a length, or beyond `limit`, is not read at all."""
    length = response.content_length
    if length is None or "Transfer-Encoding" in response.headers:
        raise FetchError("garbage", "the answer has no Content-Length: a cut body could not be told from a whole one")
    if length > limit:
        raise FetchError("garbage", f"the answer has {length} bytes; at most {limit} are taken")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise FetchError("garbage", "the answer has a Content-Encoding that was not asked for")
    data = await response.read()
    if len(data) != length:
        raise FetchError("cut", f"{len(data)} of {length} bytes arrived")
    return data


async def _refusal(response: aiohttp.ClientResponse) -> FetchError:
    status = response.status
    if 300 <= status < 400:
        return FetchError("redirect", f"status {status}: redirects are not followed")
    said = (await response.content.read(MAX_TEXT_BYTES)).decode(errors="replace").strip()
    if status == 401:
        return FetchError("unauthorized", "the rank wants a token: set the same [service] token here as on the ranks")
    if status == 406:
        return FetchError("schema", _schema_text(response, said))
    if status == 416:
        return FetchError("cursor", f"the rank is behind the store: {said}")
    if status == 429:
        return FetchError("busy", f"the rank asks to wait: {said}", retry_after_seconds=_retry_after(response))
    return FetchError("status", f"status {status}: {said}")


def _schema_text(response: aiohttp.ClientResponse, said: str = "") -> str:
    spoken = response.headers.get(SCHEMA_HEADER, "unknown")
    return (
        f"the rank speaks schema version {spoken}, this service {SCHEMA_VERSION}: "
        f"install the same Rankscope release on both. {said}"
    ).rstrip()


def _standing(response: aiohttp.ClientResponse) -> RingStatus:
    fill = response.headers.get(RING_FILL_HEADER, "0")
    try:
        ring_fill = min(max(float(fill), 0.0), 1.0)
    except ValueError as error:
        raise FetchError("garbage", f"{RING_FILL_HEADER} is {fill!r}") from error
    head = _integer(response, HEAD_HEADER) if HEAD_HEADER in response.headers else None
    return RingStatus(
        head=head,
        ring_fill=ring_fill if ring_fill == ring_fill else 0.0,  # noqa: PLR0124 - NaN alone differs from itself
        is_draining=response.headers.get(STATE_HEADER) == STATE_DRAINING,
    )


def _integer(response: aiohttp.ClientResponse, header: str) -> int:
    text = response.headers.get(header, "")
    if len(text) > 20 or not text.removeprefix("-").isascii() or not text.removeprefix("-").isdecimal():
        raise FetchError("garbage", f"{header} is {text!r}, not a number")
    return max(int(text), NOTHING)


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None
