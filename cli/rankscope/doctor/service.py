"""Check the service (response, health, clock, token) and its store (readable, writable, free space)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

from rankscope.access.service import Response, UnreachableError
from rankscope.doctor.checks import CheckResult, Environment, fail, ok, warn
from rankscope_contract.wire.channel import HEALTH_PATH, SERVICE_PAGE_PATH, STATUS_PATH, TARGETS_PATH

AREA: Final = "Service"
STORE: Final = "Store"

SKEW_SECONDS: Final = 2.0  # the Date header has a resolution of one second
LOW_BYTES: Final = 5 << 30
NO_BYTES: Final = 512 << 20
MAX_SENDERS: Final = 10  # of refused senders of remote write


def service(environment: Environment, url: str, token: str | None) -> Iterator[CheckResult]:
    """Yield the results of the checks of the service at `url`."""
    try:
        response = environment.get(url + HEALTH_PATH)
    except UnreachableError as error:
        yield fail(
            AREA,
            f"no response: {error}",
            "run rankscope up or rankscope serve, or name the address of the service with --url",
        )
        return
    document = response.json()
    if not isinstance(document, dict) or "status" not in document:
        yield fail(
            AREA,
            f"the server at {url} is not Rankscope (status {response.status})",
            "see the processes that listen on the ports, below in this report",
        )
        return
    if document["status"] == "ok":
        yield ok(AREA, f"{url} responds")
    else:
        yield fail(AREA, f"{url} is degraded: {document.get('reason')}", "see the log of the service")
    yield from _clock(environment, response)
    yield _token(environment.get(url + TARGETS_PATH, token), token)
    yield from _others(environment, url, token)


def store(environment: Environment, path: str) -> Iterator[CheckResult]:
    """Yield the results of the checks of the store: it can be opened and written, and its disk has free space."""
    from rankscope_storage.base.errors import is_url

    if is_url(path):
        yield fail(STORE, f"{path} is a URL; a store is a local folder", "name a folder with --store or [store] path")
        return
    folder = Path(path)
    if not folder.exists():
        yield warn(STORE, f"{folder} does not exist yet", "rankscope serve creates it; name another store with --store")
    else:
        yield _opened(folder)
        yield _writable(environment, folder)
    yield _free_space(environment.free_bytes(folder))


def skew_seconds(environment: Environment, response: Response) -> float | None:
    """Return the number of seconds by which the server's clock is ahead of this machine's clock.

    Returns None if the response has no valid Date header.
    """
    try:
        sent_at = parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError):
        return None
    sent_at = sent_at if sent_at.tzinfo else sent_at.replace(tzinfo=UTC)
    # The Date header is truncated to whole seconds: add half a second, the expected error.
    return sent_at.timestamp() + 0.5 - datetime.fromtimestamp(environment.now(), UTC).timestamp()


def _clock(environment: Environment, response: Response) -> Iterator[CheckResult]:
    skew = skew_seconds(environment, response)
    if skew is None:
        return
    if abs(skew) > SKEW_SECONDS:
        ahead = "ahead of" if skew > 0 else "behind"
        yield warn(
            AREA,
            f"the clock of the service is {abs(skew):.0f} s {ahead} the clock of this machine",
            "synchronise both clocks with NTP: timedatectl",
        )
    else:
        yield ok(AREA, "the clock of the service agrees with the clock of this machine")


def _token(response: Response, token: str | None) -> CheckResult:
    if response.status == 200:
        return ok(AREA, "accepts the token" if token else "requires no token")
    if response.status == 401 and token:
        return fail(AREA, "rejects the token", "use the value of [service] token: export RANKSCOPE_TOKEN=…")
    if response.status == 401:
        return fail(AREA, "requires a token", "export RANKSCOPE_TOKEN=…, or name the configuration file with --config")
    return fail(
        AREA, f"the request for the list of targets failed with status {response.status}", "see the log of the service"
    )


def _others(environment: Environment, url: str, token: str | None) -> Iterator[CheckResult]:
    """Yield the senders of remote write with refused requests, and the receivers that do not get notifications.

    An older service does not report them.
    """
    try:
        document = environment.get(url + STATUS_PATH, token).json()
    except UnreachableError:
        return
    if not isinstance(document, dict):
        return
    senders = document.get("refused_senders", ())
    for sender in senders[:MAX_SENDERS]:
        refused, accepted = sender["requests"], sender.get("accepted_requests", 0)
        share = f"{refused:,} of {refused + accepted:,}" if accepted else "all"
        yield fail(
            AREA,
            f"refuses {share} requests of the remote write sender {sender['name']}: {sender['reason']}",
            "the samples are lost; correct the remote_write settings of this sender, see docs/prometheus.md",
        )
    if others := senders[MAX_SENDERS:]:
        yield fail(
            AREA, f"refuses requests of {len(others)} other remote write senders", f"see {url}{SERVICE_PAGE_PATH}"
        )
    for sentence in document.get("shared_names", ()):
        yield warn(AREA, sentence, "export another RANKSCOPE_RUN in one of the job scripts")
    if found := document.get("notifications"):
        yield warn(AREA, f"notifications: {found}", "check the address in [notify] urls: rankscope notify test FILE")


def _opened(folder: Path) -> CheckResult:
    from rankscope_storage.api.store import Store
    from rankscope_storage.base.errors import StoreError

    try:
        Store.open(folder)
    except StoreError as error:
        return fail(STORE, f"{folder} cannot be opened: {error}", "name another store with --store")
    return ok(STORE, f"{folder} can be opened")


def _writable(environment: Environment, folder: Path) -> CheckResult:
    try:
        environment.check_writable(folder)
    except OSError as error:
        return warn(
            STORE,
            f"{folder} is not writable for this user: {error.strerror}",
            "the user that runs the service must be able to write the store",
        )
    return ok(STORE, "can be written")


def _free_space(free: int) -> CheckResult:
    text = f"{free / (1 << 30):,.1f} GiB free on its disk"
    if free < NO_BYTES:
        return fail(STORE, text, "free disk space: on a full disk commits fail, and then the rings overflow")
    return warn(STORE, text, "free disk space soon") if free < LOW_BYTES else ok(STORE, text)
