"""The service: does it answer, does it know us, what does it say of itself; and its store, and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

from rankscope.base.http_client import Answer, UnreachableError
from rankscope.doctor.environment import Surroundings
from rankscope.doctor.result import Finding, fail, ok, warn
from rankscope_contract.channel import HEALTH_PATH, TARGETS_PATH

AREA: Final = "Service"
STORE: Final = "Store"

SKEW_SECONDS: Final = 2.0  # the Date header knows whole seconds
LOW_BYTES: Final = 5 << 30
NO_BYTES: Final = 512 << 20


def service(world: Surroundings, url: str, token: str | None) -> Iterator[Finding]:
    """Yield how the service at `url` is."""
    try:
        answer = world.get(url + HEALTH_PATH)
    except UnreachableError as error:
        yield fail(AREA, f"does not answer: {error}", "rankscope up, or rankscope serve; --url names another address")
        return
    said = answer.json()
    if not isinstance(said, dict) or "status" not in said:
        yield fail(AREA, f"what answers at {url} is not Rankscope (status {answer.status})", "see who listens, below")
        return
    if said["status"] == "ok":
        yield ok(AREA, f"{url} answers")
    else:
        yield fail(AREA, f"{url} is in trouble: {said.get('reason')}", "its log says more")
    yield from _clock(world, answer)
    yield _token(world.get(url + TARGETS_PATH, token), token)


def store(world: Surroundings, path: str) -> Iterator[Finding]:
    """Yield whether the store can be opened and written, and how much room there is."""
    if "://" in path:
        yield ok(STORE, f"{path} is on object storage: not looked at from here")
        return
    folder = Path(path)
    if not folder.exists():
        yield warn(STORE, f"{folder} does not exist yet", "rankscope serve makes it; --store names another")
    else:
        yield _opened(folder)
        yield _writable(world, folder)
    yield _room(world.free_bytes(folder))


def skew_seconds(world: Surroundings, answer: Answer) -> float | None:
    """Return by how much the clock of who answered is ahead of ours; None when it told no time."""
    try:
        told = parsedate_to_datetime(answer.headers["date"])
    except (KeyError, ValueError):
        return None
    told = told if told.tzinfo else told.replace(tzinfo=UTC)
    # Its second began up to a second ago: take the middle.
    return told.timestamp() + 0.5 - datetime.fromtimestamp(world.now(), UTC).timestamp()


def _clock(world: Surroundings, answer: Answer) -> Iterator[Finding]:
    skew = skew_seconds(world, answer)
    if skew is None:
        return
    if abs(skew) > SKEW_SECONDS:
        ahead = "ahead of" if skew > 0 else "behind"
        yield warn(AREA, f"its clock is {abs(skew):.0f} s {ahead} this machine's", "keep both with NTP: timedatectl")
    else:
        yield ok(AREA, "its clock agrees with this machine's")


def _token(answer: Answer, token: str | None) -> Finding:
    if answer.status == 200:
        return ok(AREA, "takes the token" if token else "asks for no token")
    if answer.status == 401 and token:
        return fail(AREA, "refuses the token", "give the one of [service] token: export RANKSCOPE_TOKEN=…")
    if answer.status == 401:
        return fail(AREA, "asks for a token", "export RANKSCOPE_TOKEN=…, or name its file with --config")
    return fail(AREA, f"answers with status {answer.status} where its targets are listed", "its log says more")


def _opened(folder: Path) -> Finding:
    from rankscope_storage.errors import StoreError
    from rankscope_storage.store import Store

    try:
        Store.open(folder)
    except StoreError as error:
        return fail(STORE, f"{folder} cannot be opened: {error}", "--store names another")
    return ok(STORE, f"{folder} can be opened")


def _writable(world: Surroundings, folder: Path) -> Finding:
    try:
        world.check_writable(folder)
    except OSError as error:
        return warn(STORE, f"{folder} cannot be written by you: {error.strerror}", "the service's user must be able to")
    return ok(STORE, "can be written")


def _room(free: int) -> Finding:
    text = f"{free / (1 << 30):,.1f} GiB are free on its disk"
    if free < NO_BYTES:
        return fail(STORE, text, "make room: a full disk stops commits, and then the rings overflow")
    return warn(STORE, text, "make room soon") if free < LOW_BYTES else ok(STORE, text)
