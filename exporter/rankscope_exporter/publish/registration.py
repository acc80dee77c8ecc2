"""Registers this rank with the service, and the spools that dead processes left in the spool folder of this rank.

The registration is repeated as a heartbeat from a daemon thread. Other threads only set a flag, so a slow network
delays no other thread. A poll by the service also shows that this rank is alive. The heartbeat is needed while the
service does not poll, for example after it was restarted. The module also contains the HTTP client for the service, and
the Prometheus file_sd entry of a rank without a service.

The rank serves only spools that name its service, and spools that name no service, until a store has all their records.
It registers each spool with the identity of the dead process and with its own URL, and answers polls for it on the same
record channel. One daemon thread handles all spools. The file lock of a spool ensures that only one rank, or the
service, serves it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.model.identity import Identity
from rankscope_contract.wire.channel import (
    POKE_PATH,
    REGISTER_PATH,
    SHARD_HEADER,
    STATE_DRAINING,
    Registration,
    RegistrationReply,
)
from rankscope_contract.wire.escaping import file_name
from rankscope_contract.wire.spool import Orphan, SpoolError, SpoolReader, folders, read_service
from rankscope_contract.wire.tls import HUNG_UP, MakeContext, explain_to_client
from rankscope_exporter.process.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.publish.serving_config import ServeConfig, client_tls
from rankscope_exporter.publish.spool import needed_plans

REGISTER_SECONDS: Final = 5.0
POKE_SECONDS: Final = 1.0
_REPLY_BYTES: Final = 65_536


class UnreachableError(Exception):
    """Error: the service did not answer, or its answer was invalid. The caller retries."""


class RefusedError(Exception):
    """Error: the service answered with an HTTP error status. The text has the status and the body of the answer."""


class ServiceClient:
    """HTTP client for the services of one store. It uses no proxy.

    Only the configured URL gets the token, and the service that it names as the one of a run, with the same scheme. If
    that service fails, the next registration goes to the configured URL again.
    """

    def __init__(self, url: str, token: str | None, tls: MakeContext | None = None) -> None:
        self._url = url.rstrip("/")
        self._urls: dict[str, tuple[str, ...]] = {}  # by run: the next URL first
        self._tls = tls
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def register(self, registration: Registration) -> RegistrationReply:
        """Register this rank and return the reply.

        Raises RefusedError for an error status, UnreachableError without a valid answer.
        """
        run, body = registration.run, registration.to_json()
        try:
            try:
                answer = self._post(self._url_of(run), REGISTER_PATH, body, REGISTER_SECONDS)
            except _OtherServiceError as other:
                self._urls[run] = (other.url, self._url)
                answer = self._post(other.url, REGISTER_PATH, body, REGISTER_SECONDS)
            return _checked(RegistrationReply.from_json(answer))
        except (RefusedError, UnreachableError, ValueError, RecursionError) as error:
            failed = self._url_of(run)
            self._urls[run] = (*self._urls.get(run, ())[1:], failed)
            if isinstance(error, (RefusedError, UnreachableError)):
                raise
            raise UnreachableError(f"{failed} sent an invalid registration reply: {error}") from error

    def poke(self, incarnation: str, run: str = "") -> None:
        """Request an immediate poll. Raises RefusedError (error status) or UnreachableError (no valid answer)."""
        self._post(self._url_of(run), POKE_PATH, json.dumps({"incarnation": incarnation}), POKE_SECONDS)

    def _url_of(self, run: str) -> str:
        return self._urls.get(run, (self._url,))[0]

    def _post(self, url: str, path: str, body: str, timeout_seconds: float) -> bytes:
        data = body.encode("utf-8", "replace")
        # ServeConfig has checked that the scheme is http or https, so urllib opens no local file.
        request = urllib.request.Request(url + path, data, self._headers, method="POST")  # noqa: S310 - see above
        # A new opener for each call: calls are seconds apart, and certificates may have been replaced since the last.
        # With these handlers alone, it follows no redirect and uses no proxy.
        opener = urllib.request.OpenerDirector()
        opener.add_handler(urllib.request.HTTPHandler())
        if self._tls is not None:
            opener.add_handler(urllib.request.HTTPSHandler(context=self._tls()))
        try:
            with opener.open(request, timeout=timeout_seconds) as response:
                answer = bytes(response.read(_REPLY_BYTES))
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: no valid host name
            raise UnreachableError(f"{url}: {_reason(error, url)}") from error
        if not 200 <= response.status < 300:
            text = answer.decode("utf-8", "replace").strip()
            text = f"{response.status}: {text or response.reason}"
            other = response.headers.get("Location", "").removesuffix(path)
            is_service = response.headers.get(SHARD_HEADER) and other.partition(":")[0] == url.partition(":")[0]
            raise _OtherServiceError(text, other) if response.status == 307 and is_service else RefusedError(text)
        return answer


class _OtherServiceError(RefusedError):
    """The service answered that the service at `url` stores the records of this run."""

    def __init__(self, text: str, url: str) -> None:
        super().__init__(text)
        self.url = url


def service_client(config: ServeConfig) -> ServiceClient | None:
    """Return the HTTP client for the service in `config`; None if no service is configured.

    Raises ServeError if a TLS file is invalid.
    """
    if config.ingest_url is None:
        return None
    is_tls = config.ingest_url.startswith("https:")
    tls = client_tls(config.ca_file, config.cert_file, config.key_file) if is_tls else None
    return ServiceClient(config.ingest_url, config.secret, tls)


def _reason(error: Exception, url: str) -> str:
    """Return the reason of a failed request; for TLS errors it names the setting to change."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLError):
        return str(explain_to_client(cause))
    if isinstance(cause, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        is_plain = url.startswith("http:")
        text = "it closed the connection; if it uses TLS (web_config), write https:// in ingest_url"
        return text if is_plain else HUNG_UP
    return str(getattr(error, "reason", None) or repr(error))


def _checked(reply: RegistrationReply) -> RegistrationReply:
    is_text = isinstance(reply.lease, str) and reply.lease.isascii() and reply.lease.isprintable()
    is_positive = isinstance(reply.heartbeat_seconds, int | float) and reply.heartbeat_seconds > 0
    if not (is_text and reply.lease and is_positive and isinstance(reply.committed, int)):
        raise ValueError("`lease` must be text, `heartbeat_seconds` above 0, and `committed` a whole number")
    return reply


JOB: Final = "rankscope"


class DiscoveryFile:
    """One JSON file in a folder that Prometheus watches with `file_sd_configs: [{files: ["<folder>/*.json"]}]`."""

    def __init__(self, folder: str, identity: Identity) -> None:
        # The name contains no incarnation: a restarted rank replaces the entry that a killed process left.
        self.path = Path(folder) / f"rankscope-{file_name(identity.run, str(identity.rank))}.json"
        self._labels = {"job": JOB, "instance": f"{identity.run}/{identity.rank}"}
        self._text = ""

    def write(self, target: str, scheme: str = "http") -> None:
        """Write an entry for the scrape target `target` (host:port) with `scheme`.

        Raises ServeError if the folder cannot be written.
        """
        labels = self._labels | ({"__scheme__": scheme} if scheme != "http" else {})
        self._text = json.dumps([{"targets": [target], "labels": labels}], indent=2) + "\n"
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self._text, encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise ServeError(
                f"cannot write the discovery file {self.path}: {error.strerror or error};"
                " set RANKSCOPE_DISCOVERY_DIR to a folder that this process may write"
            ) from error

    def remove(self) -> None:
        """Delete the file_sd entry of this rank, unless a newer process of the same rank has replaced it."""
        with contextlib.suppress(OSError):  # the file or the folder does not exist any more
            if self._text and self.path.read_text(encoding="utf-8") == self._text:
                self.path.unlink()


log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 4.0
DRAIN_HEARTBEAT_SECONDS: Final = 0.5
"""Seconds between two heartbeats while the rank waits for the commit of its last records.

Each reply contains the committed sequence number.
"""
MAX_HEARTBEAT_SECONDS: Final = 60.0
"""Longest time between two heartbeats, also of a rank that is polled."""
_SILENT_INTERVALS: Final = 1.5
"""Maximum time without a heartbeat after a poll by the service, in heartbeat intervals.

A rank without events is polled about once per interval, sometimes slightly late. In a measurement with the value 1, one
of 20 ranks sent an unnecessary heartbeat at every fourth poll.
"""
_MIN_HEARTBEAT_SECONDS: Final = 0.1
_JITTER: Final = random.Random()  # noqa: S311 - not a secret; a separate state, since training may seed the shared one


@dataclass(eq=False)
class RegistrationLoop:
    """Thread that sends registrations until it is stopped.

    It calls `describe` for the content of each request, and `on_reply` with each reply.
    """

    client: ServiceClient
    describe: Callable[[], Registration]
    on_reply: Callable[[RegistrationReply], None]
    on_fault: Callable[[str, BaseException], None]
    meter: CpuMeter

    def __post_init__(self) -> None:
        self._wake = threading.Condition()
        self._stopping = False
        self._poke_wanted = False
        self._is_due_now = False
        self._draining = False
        self._registered = False
        self._interval = 0.0  # seconds between two heartbeats, as the service requested
        self._sent_at = self._polled_at = -math.inf
        self._logged: set[str] = set()
        self.attempted = threading.Event()
        """Set when the first registration has succeeded or failed: a short run could end before it."""
        self._thread = OwnThread(target=self._run, name="rankscope-registration", on_fault=self.on_fault)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the registration thread. A request in progress ends at the latest after its timeout."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def poke(self) -> None:
        """Ask the registration thread to request an early poll from the service; the request may fail."""
        with self._wake:
            self._poke_wanted = True
            self._wake.notify()

    def drain(self) -> None:
        """Report to the service immediately that the rank waits for its last commit, and send heartbeats more often."""
        with self._wake:
            self._draining = self._is_due_now = self._poke_wanted = True
            self._wake.notify()

    def send_now(self) -> None:
        """Send the next heartbeat immediately, because its content has changed."""
        with self._wake:
            self._is_due_now = True
            self._wake.notify()

    def on_poll(self) -> None:
        """Store the time of a poll by the service. The thread reads it when a heartbeat is due, and is not woken."""
        self._polled_at = time.monotonic()

    def _run(self) -> None:
        failures = 0
        due = 0.0
        while True:
            with self._wake:
                while not self._stopping and not self._has_work(due := self._postponed(due)):
                    self._wake.wait(max(0.0, due - time.monotonic()))
                if self._stopping:
                    return
                register = not self._registered or self._is_due_now or time.monotonic() >= due
                poke, self._poke_wanted, self._is_due_now = self._poke_wanted, False, False
            if register:
                wait = self._register()
                self.attempted.set()
                failures = 0 if wait is not None else failures + 1
                due = time.monotonic() + (retry_seconds(failures) if wait is None else wait)
            if poke and self._registered:
                self._poke_service()
            self.meter.lap("registration")

    def _postponed(self, due: float) -> float:
        if not self._registered or self._draining:
            return due
        return next_heartbeat(due, sent_at=self._sent_at, polled_at=self._polled_at, interval_seconds=self._interval)

    def _has_work(self, due: float) -> bool:
        # Pokes also wait between failed attempts: otherwise they would add load to a service that is down.
        return time.monotonic() >= due or (self._registered and (self._poke_wanted or self._is_due_now))

    def _register(self) -> float | None:
        """Send one registration; return the seconds until the next heartbeat, None if the registration failed."""
        try:
            reply = self.client.register(self.describe())
        except (RefusedError, UnreachableError) as error:
            self._registered = False
            what = "refused this rank" if isinstance(error, RefusedError) else "cannot be reached"
            self._log_once(f"the service {what} ({error}); retrying")
            return None
        except Exception as error:  # noqa: BLE001 - top of the thread: reported, and tried again
            self._registered = False
            self.on_fault("registration", error)
            return None
        self._registered = True
        notice = str(reply.notice or "")
        self._logged &= {notice}
        if notice:
            self._log_once(notice)
        self.on_reply(reply)
        self._interval = min(max(reply.heartbeat_seconds, _MIN_HEARTBEAT_SECONDS), MAX_HEARTBEAT_SECONDS)
        self._sent_at = time.monotonic()
        return min(self._interval, DRAIN_HEARTBEAT_SECONDS) if self._draining else self._interval

    def _poke_service(self) -> None:
        try:
            rank = self.describe()
            self.client.poke(rank.incarnation, rank.run)
        except (RefusedError, UnreachableError) as error:
            log.debug("the request for an early poll failed: %s", error)
        except Exception as error:  # noqa: BLE001 - top of the thread, which continues with its heartbeats
            self.on_fault("requesting an early poll", error)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)


def next_heartbeat(due: float, *, sent_at: float, polled_at: float, interval_seconds: float) -> float:
    """Return when the heartbeat due at `due` is sent: a poll postpones it, up to MAX_HEARTBEAT_SECONDS after the last.

    All times are monotonic seconds: `sent_at` is the time of the last heartbeat, `polled_at` the time of the last poll.
    """
    return max(due, min(polled_at + _SILENT_INTERVALS * interval_seconds, sent_at + MAX_HEARTBEAT_SECONDS))


def retry_seconds(failures: int, jitter: Callable[[], float] = _JITTER.random) -> float:
    """Return the seconds to wait, partly random: the ranks of a large job do not reconnect at the same time."""
    longest = min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * jitter())


OLDER_LAUNCHES_SECONDS: Final = 2.0
"""Maximum seconds for which this rank delays its registration until spools of dead processes are registered.

The service numbers the attempts of a run in the order in which they register, so earlier attempts must register first.
"""

SCAN_SECONDS: Final = 30.0
"""Seconds between two searches of the spool folder. Another rank of this host may have died since the last search."""

HEARTBEAT_SECONDS: Final = 0.5
"""Seconds between two registrations of a dead process.

The reply contains the committed sequence number, so a short interval lets the rank delete committed records soon.
"""

AT_ONCE: Final = 16
"""Maximum number of spools that are served at the same time.

Each spool needs an open file in the training process, and after many crashes the folder may contain thousands.
"""

FINISH_SECONDS: Final = 5.0
"""Seconds for which a spool remains after its last record was committed.

In this time the client can still receive the answer that no record is left.
"""


@dataclass(eq=False)
class OrphanRecovery:
    """The spools of dead processes that this process serves. Methods may be called from any thread."""

    root: Path
    own_incarnation: str
    client: ServiceClient
    service: str
    on_fault: Callable[[str, BaseException], None]

    def __post_init__(self) -> None:
        self._changed = threading.Lock()
        self._orphans: dict[str, Orphan] = {}
        self._waiting: list[Path] = []  # found by the search, not yet served
        self._refused: set[str] = set()  # the service refused them once: they are tried after all others
        self._done_since: dict[str, float] = {}
        self._logged: set[str] = set()
        self._stopping = threading.Event()
        self._searched = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-spool", on_fault=self.on_fault)

    def start(self, url: str) -> None:
        """Start the thread, which registers the spools with the `url` of this rank."""
        self._url = url
        self._thread.start()

    def wait_searched(self) -> None:
        """Wait at most 2 s until the spools that the first search found are registered with the service."""
        self._searched.wait(OLDER_LAUNCHES_SECONDS)

    def stop(self) -> None:
        """Stop the thread and release the spools, so that another process on this host or a service can serve them."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)
        with self._changed:
            self.abandon()

    def abandon(self) -> None:
        """Release the spools. Takes no lock: a forked child may lack the thread that holds it."""
        for orphan in list(self._orphans.values()):
            orphan.release()
        self._orphans = {}

    def get(self, incarnation: str) -> Orphan | None:
        """Return the spool of the dead process `incarnation`; None if this rank does not serve it."""
        with self._changed:
            return self._orphans.get(incarnation)

    def plan(self, plan_hash: str) -> str | None:
        """Return the JSON text of a plan if a record in one of the spools uses it."""
        with self._changed:
            served = list(self._orphans.values())
        return next((text for orphan in served if (text := orphan.reader.plan(plan_hash)) is not None), None)

    def finished(self, orphan: Orphan) -> None:
        """Delete the spool `orphan` of a dead process.

        Called when all its records are committed. A second call has no effect.
        """
        with self._changed:
            if self._orphans.pop(orphan.incarnation, None) is None:
                return
        self._done_since.pop(orphan.incarnation, None)
        try:
            orphan.remove()
        except OSError as error:
            what = "cannot delete this folder of committed records"
            self._log_once(f"{orphan.folder}: {what}: {error.strerror or error}")

    def _run(self) -> None:
        failures = 0
        due = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= due:
                    self._search()
                    due = time.monotonic() + SCAN_SECONDS
                while self._waiting and len(self._orphans) < AT_ONCE:
                    self._take(self._waiting.pop(0))
                is_registered = self._register_all()
            except Exception as error:  # noqa: BLE001 - top of the thread: reported, and tried again
                self.on_fault("serving spools of dead processes", error)
                is_registered = False
            self._searched.set()
            failures = 0 if is_registered else failures + 1
            pause = HEARTBEAT_SECONDS if is_registered else retry_seconds(failures)
            self._stopping.wait(pause if self._orphans or self._waiting else max(0.0, due - time.monotonic()))

    def _search(self) -> None:
        try:
            found = folders(self.root)
        except FileNotFoundError:  # no process has written records yet
            return
        except OSError as error:
            self._log_once(f"the spool folder {self.root} cannot be read: {error.strerror or error}")
            return
        others = [folder for folder in found if folder.name != self.own_incarnation]
        self._waiting = sorted(others, key=lambda folder: folder.name in self._refused)

    def _take(self, folder: Path) -> None:
        """Lock and serve the spool in `folder`.

        Does nothing if the process that wrote the spool is alive, or if its records belong to a different service than
        that of this rank.
        """
        with self._changed:
            if folder.name in self._orphans or self._stopping.is_set():
                return
            service = read_service(folder)
            if service is not None and service != self.service:
                return  # the store of another service owns these records
            try:
                orphan = Orphan.take(SpoolReader(folder, pa, needed_plans))
            except (SpoolError, OSError) as error:
                self._log_once(f"spool skipped: {error}")
                return
            if orphan is not None:
                self._orphans[orphan.incarnation] = orphan
                log.info("%s: this rank now serves the records that a dead process left in this folder", folder)

    def _register_all(self) -> bool:
        """Send one registration for each spool, the oldest first. Return whether the service accepted all of them."""
        with self._changed:
            waiting = sorted(self._orphans.values(), key=lambda orphan: orphan.registration.started_at)
        is_accepted = True
        for orphan in waiting:
            if self.get(orphan.incarnation) is not orphan:
                continue  # finished in the meantime
            try:
                self._register(orphan)
            except RefusedError as error:  # the service may accept the others
                self._log_once(f"the service refused the records of {orphan.folder}, retrying: {error}")
                self._give_way(orphan)
                is_accepted = False
            except UnreachableError as error:
                what = f"records of dead processes in {self.root}"
                self._log_once(f"the service cannot be reached for {what}, retrying: {error}")
                return False
        return is_accepted

    def _register(self, orphan: Orphan) -> None:
        changed = replace(
            orphan.registration,
            url=self._url,
            served_by=self.own_incarnation,
            state=STATE_DRAINING,
            head=orphan.head,
            phase=None,
        )
        reply = self.client.register(changed)
        orphan.lease = reply.lease
        orphan.commit(reply.committed)
        if not orphan.is_done:
            return
        done_since = self._done_since.setdefault(orphan.incarnation, time.monotonic())
        if time.monotonic() - done_since >= FINISH_SECONDS:
            self.finished(orphan)

    def _give_way(self, orphan: Orphan) -> None:
        """Release a spool that the service has refused, and append it to the queue of spools that wait to be served.

        Another spool of this queue can then be served instead. If the queue is empty, the refused spool is not
        released.
        """
        self._refused.add(orphan.incarnation)
        if self._waiting:
            with self._changed:
                self._orphans.pop(orphan.incarnation, None)
            orphan.release()
            self._waiting.append(orphan.folder)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)
