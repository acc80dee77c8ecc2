"""The ranks: which are registered, how they are, who reads them, and whether their clocks agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope.base.http_client import UnreachableError
from rankscope.doctor.environment import Surroundings
from rankscope.doctor.result import Finding, ok, warn
from rankscope.examination.service import SKEW_SECONDS, skew_seconds
from rankscope.output.rows import printable
from rankscope_contract.channel import HEALTH_PATH, METRICS_PATH, RECORDS_PATH, TARGETS_PATH

AREA: Final = "Ranks"
MOST_ASKED: Final = 8
MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    name: str
    skew: float | None
    readers: Sequence[dict[str, Any]]


def ranks(world: Surroundings, service_url: str, token: str | None) -> Iterator[Finding]:
    """Yield what the service and the ranks themselves say; nothing when the service cannot be asked."""
    try:
        answer = world.get(service_url + TARGETS_PATH, token)
    except UnreachableError:
        return
    targets = answer.json() if answer.status == 200 else None
    if not isinstance(targets, list):
        return
    live = [target for target in targets if target["health"] != "gone"]
    if not live:
        yield warn(AREA, "none is registered", f"in the training job: export RANKSCOPE_INGEST_URL={service_url}")
        return
    counts = Counter(target["health"] for target in live)
    words = ", ".join(f"{count} {health}" for health, count in sorted(counts.items()))
    yield ok(AREA, f"{len(live)} registered: {words}")
    yield from _troubles(live)
    yield from _asked(world, live[:MOST_ASKED])


def _troubles(live: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for target in [target for target in live if target["health"] == "failing"][:MOST_NAMED]:
        yield warn(AREA, f"{_name(target)} cannot be read: {printable(str(target['last_error']))}", "see its console")
    lost = sum(target["records_lost"] for target in live)
    if lost:
        remedy = "raise serve.ring_records, or give ranks a spool; events of type gap name them"
        yield warn(AREA, f"{lost} records were overwritten before they were read", remedy)


def _asked(world: Surroundings, live: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    asked = []
    for target in live:
        try:
            asked.append(_ask(world, target))
        except UnreachableError as error:
            yield warn(AREA, f"{_name(target)} cannot be asked from this machine: {error}", "the service may still can")
    if asked:
        yield _clocks(asked)
        yield _read(asked, RECORDS_PATH, "the service does not read it: its log says why")
        yield _read(asked, METRICS_PATH, "Prometheus does not know the ranks: rankscope up, or docs/live.md")


def _ask(world: Surroundings, target: dict[str, Any]) -> _Asked:
    answer = world.get(target["url"] + HEALTH_PATH)
    said = answer.json()
    readers = said.get("readers", []) if isinstance(said, dict) else []
    return _Asked(_name(target), skew_seconds(world, answer), readers)


def _clocks(asked: Sequence[_Asked]) -> Finding:
    worst = max(asked, key=lambda rank: abs(rank.skew or 0.0))
    if abs(worst.skew or 0.0) <= SKEW_SECONDS:
        return ok(AREA, "their clocks agree with this machine's")
    return warn(AREA, f"the clock of {worst.name} is {worst.skew:+.0f} s off", "keep both with NTP: timedatectl")


def _read(asked: Sequence[_Asked], page: str, remedy: str) -> Finding:
    """Return who reads `page` of the ranks, by name, and how long ago at the latest."""
    ages: dict[str, list[float]] = {}
    for rank in asked:
        for reader in rank.readers:
            if reader["page"] == page:
                ages.setdefault(printable(str(reader["by"])), []).append(float(reader["seconds_ago"]))
    if not ages:
        return warn(AREA, f"nobody reads {page}", remedy)
    words = (f"{by} ({len(of)} of {len(asked)} ranks, {max(of):.0f} s ago)" for by, of in ages.items())
    return ok(AREA, f"{page} is read by {', '.join(words)}")


def _name(target: dict[str, Any]) -> str:
    return printable(f"{target['run']}/{target['rank']}")
