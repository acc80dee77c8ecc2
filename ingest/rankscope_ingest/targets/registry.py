"""Registry of targets: it accepts registrations and heartbeats, and assigns leases and attempt numbers.

A second live process of the same rank is rejected. The module performs no I/O: the caller resolves addresses and passes
the current time.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.identity import LONGEST_NAME
from rankscope_contract.wire.channel import Registration, RegistrationReply
from rankscope_ingest.base.addresses import Address
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.network.http_client import check_allowed, parse_target_url
from rankscope_ingest.runs.models import Health, Liveness, Target


class AttemptNumbers:
    """Attempt numbers (0, 1, …) by run and launch id.

    When the service starts, it initializes these numbers from the store.
    """

    def __init__(self, known: Iterable[tuple[str, str, int]] = ()) -> None:
        """Add the known triples of run, launch id and attempt, which must be in ascending order of attempts."""
        self._numbers: dict[str, dict[str, int]] = defaultdict(dict)
        self._highest: dict[str, int] = {}
        for run, launch_id, attempt in known:
            self._add(run, launch_id, attempt)

    def number(self, run: str, launch_id: str, is_over: Callable[[int], bool]) -> tuple[int, bool]:
        """Return the attempt of a launch, and whether the attempt is new.

        `is_over` returns whether an attempt number of the run belongs to an attempt that is over. The attempt is new if
        the launch is unknown, or if the known attempt of the launch is over.
        """
        known = self._numbers[run].get(launch_id)
        if known is not None and not is_over(known):
            return known, False
        return self._add(run, launch_id, self._highest.get(run, -1) + 1), True

    def _add(self, run: str, launch_id: str, number: int) -> int:
        self._numbers[run][launch_id] = number
        self._highest[run] = max(number, self._highest.get(run, 0))
        return number


_FIELDS: Final = {name: str(field.type) for name, field in Registration.__dataclass_fields__.items()}
_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "str": (str, "text"),
    "int": (int, "an integer"),
    "dict": (dict, "an object"),
}
_LATEST_START = 4_102_444_800_000_000

IsOver = Callable[[tuple[str, int], Registration], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Result of an accepted registration: its target, whether the target is new, and whether the launch is new."""

    target: Target
    is_new_target: bool
    is_new_launch: bool


class Registry:
    """All registered targets by incarnation.

    A process sends its registration repeatedly; each repetition is a heartbeat.
    """

    def __init__(
        self,
        *,
        networks: Sequence[Network],
        heartbeat_seconds: float,
        ttl_seconds: float,
        attempts: AttemptNumbers | None = None,
        lives: Mapping[str, int] | None = None,
    ) -> None:
        self._networks = networks
        self._heartbeat_seconds = heartbeat_seconds
        self._ttl_seconds = ttl_seconds
        self.attempts = attempts or AttemptNumbers()
        self._lives = dict(lives or {})
        self._targets: dict[str, Target] = {}
        self._by_identity: dict[tuple[str, str, int], set[str]] = defaultdict(set)

    @property
    def targets(self) -> Iterable[Target]:
        """Return all targets. A target that is gone is included until `forget` is called."""
        return self._targets.values()

    def get(self, incarnation: str) -> Target | None:
        """Return the target with this incarnation, or None if it is not registered."""
        return self._targets.get(incarnation)

    def register(
        self,
        registration: Registration,
        addresses: Iterable[Address],
        now: float,
        *,
        is_over: IsOver = lambda _key, _registration: False,
    ) -> Accepted:
        """Accept a registration or heartbeat, and return its target.

        `addresses` are the resolved addresses of the rank, and `now` is in seconds. `is_over` returns whether an
        attempt is over. If the known attempt of the launch is over, this process begins the next attempt. Raises
        RegistrationError if the registration is rejected; the error contains an HTTP status, and its text describes how
        to fix the fault.
        """
        check_allowed(registration.url, addresses, self._networks)
        known = self._targets.get(registration.incarnation)
        if registration.served_by is None:
            self._reject_second_process(registration, now)
        elif known is not None and not known.is_dead and self._is_alive(known, now):
            raise RegistrationError(
                409,
                f"{known.name}: process {known.incarnation} is still alive; register its spool when its heartbeats have"
                " stopped",
            )
        if known is not None:
            _reject_changed_identity(known, registration)
            self._heartbeat(known, registration, now)
            return Accepted(target=known, is_new_target=False, is_new_launch=False)
        attempt, is_new_launch = self._attempt(registration, is_over)
        target = Target(
            registration=registration,
            attempt=attempt,
            lease=uuid.uuid4().hex,  # only a reader that sends it can mark records of the rank as committed
            liveness=Liveness(last_sign=now),
            head=registration.head,
            expected=registration.head if registration.served_by else registration.head + registration.queued,
        )
        self._targets[registration.incarnation] = target
        self._by_identity[target.identity].add(target.incarnation)
        return Accepted(target=target, is_new_target=True, is_new_launch=is_new_launch)

    def reply(self, target: Target) -> RegistrationReply:
        """Return the response to the accepted registration of `target`."""
        return RegistrationReply(
            lease=target.lease,
            attempt=target.attempt,
            heartbeat_seconds=self._heartbeat_seconds,
            committed=target.committed,
        )

    def forget(self, incarnation: str) -> None:
        """Delete a target that is gone and whose records are committed.

        The attempt of the target's process is remembered in case the process registers again.
        """
        if target := self._targets.pop(incarnation, None):
            self._lives[incarnation] = target.attempt
            self._by_identity[target.identity].discard(incarnation)

    def _attempt(self, registration: Registration, is_over: IsOver) -> tuple[int, bool]:
        # A process keeps its attempt, also if its records arrive after its launch id has started another attempt.
        if (known := self._lives.get(registration.incarnation)) is not None:
            return known, False
        run, is_alive = registration.run, registration.served_by is None
        return self.attempts.number(
            run, registration.launch_id, lambda number: is_alive and is_over((run, number), registration)
        )

    def _heartbeat(self, target: Target, registration: Registration, now: float) -> None:
        target.registration = registration
        target.liveness.note_sign(now)
        if target.health is Health.GONE:
            target.health, target.gone_at = Health.PENDING, None  # it was declared dead by mistake
        target.head = max(target.head, registration.head)
        if not target.is_dead:
            target.expected = registration.head + registration.queued

    def _reject_second_process(self, registration: Registration, now: float) -> None:
        identity = (registration.run, registration.launch_id, registration.rank)
        for incarnation in self._by_identity[identity] - {registration.incarnation}:
            other = self._targets[incarnation].registration
            if self._is_alive(self._targets[incarnation], now):
                raise RegistrationError(
                    409,
                    f"run {registration.run!r} already has a live rank {registration.rank} of launch "
                    f"{registration.launch_id!r}: process {other.pid} on {other.host}. "
                    "Give this process another rank or RANKSCOPE_RUN, or end the other process",
                )

    def _is_alive(self, target: Target, now: float) -> bool:
        has_process = target.health is not Health.GONE and not target.is_dead
        return has_process and target.liveness.is_alive(now, self._ttl_seconds)


def _reject_changed_identity(known: Target, registration: Registration) -> None:
    """Raise RegistrationError if the registration of a known process changes the run, launch or rank.

    These values must not change, because the stored rows of the process contain them.
    """
    if (registration.run, registration.launch_id, registration.rank) != known.identity:
        was = known.registration
        raise RegistrationError(
            409,
            f"incarnation {registration.incarnation!r} is registered as rank {was.rank} of run {was.run!r}, process "
            f"{was.pid} on {was.host}: the run, rank and launch of a process must not change, and another process must "
            "have another incarnation",
        )


def parse_registration(body: bytes) -> Registration:
    """Return the registration in `body`.

    Raises RegistrationError with status 400 if it is malformed, and with status 406 if it has another schema version.
    """
    try:
        registration = Registration.from_json(body)
    except (ValueError, RecursionError) as error:
        raise RegistrationError(400, f"not a registration: {error}") from error
    check_registration(registration)
    parse_target_url(registration.url)
    return registration


def check_registration(registration: Registration) -> None:
    """Raise RegistrationError if a field is invalid or if the schema version of the sender is not supported."""
    for faulty in _wrong_fields(registration):
        raise RegistrationError(400, f"not a registration: {faulty}")
    if registration.schema_version != SCHEMA_VERSION:
        raise RegistrationError(
            406,
            f"schema version {registration.schema_version} is not supported; supported: {SCHEMA_VERSION}. "
            "Install the same Rankscope release on ranks and service",
        )


def _wrong_fields(registration: Registration) -> Iterable[str]:
    for name, annotation in _FIELDS.items():
        value = getattr(registration, name)
        kind, word = _TYPES[annotation.removesuffix(" | None").partition("[")[0]]
        if value is None and annotation.endswith(" | None"):
            continue
        if type(value) is not kind or (kind is int and abs(value) >= 1 << 63):
            yield f"{name} must be {word}"
    yield from _wrong_values(registration)


def _wrong_values(registration: Registration) -> Iterable[str]:
    for name in ("run", "incarnation", "launch_id"):
        if not getattr(registration, name):
            yield f"{name} must not be empty"
    for name in (name for name, annotation in _FIELDS.items() if annotation == "str"):
        if len(getattr(registration, name)) > LONGEST_NAME:
            yield f"{name} must have at most {LONGEST_NAME} characters"
    if not (registration.incarnation.isascii() and registration.incarnation.isprintable()):
        yield "incarnation must be printable ASCII: it is sent in a header"
    if not 0 <= registration.rank < registration.world_size <= 1 << 24:
        yield f"rank {registration.rank} does not fit world_size {registration.world_size}"
    if not 0 <= registration.started_at < _LATEST_START:
        yield "started_at must be UTC microseconds between 1970 and 2100"
    # Not `to_json`, which copies all settings and versions: 1,000 ranks send up to 200 requests per second.
    shown = {name: getattr(registration, name) for name in _FIELDS}
    try:
        json.dumps(shown, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        yield "all text must be valid Unicode"
