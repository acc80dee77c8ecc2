"""Check the ranks: registration, health, lost records, clients that read their pages, and clock difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope.access.service import UnreachableError
from rankscope.doctor.checks import CheckResult, Environment, ok, warn
from rankscope.doctor.service import SKEW_SECONDS, skew_seconds
from rankscope.output.rows import printable
from rankscope_contract.wire.channel import HEALTH_PATH, METRICS_PATH, RECORDS_PATH, TARGETS_PATH

AREA: Final = "Ranks"
MAX_RANKS_CHECKED: Final = 8
MAX_RANKS_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class _RankHealth:
    name: str
    skew: float | None
    readers: Sequence[dict[str, Any]]


def ranks(environment: Environment, service_url: str, token: str | None) -> Iterator[CheckResult]:
    """Yield the results of the checks of the registered ranks.

    Yield nothing if the service does not return the list of registered ranks.
    """
    try:
        response = environment.get(service_url + TARGETS_PATH, token)
    except UnreachableError:
        return
    targets = response.json() if response.status == 200 else None
    if not isinstance(targets, list):
        return
    live = [target for target in targets if target["health"] != "gone"]
    if not live:
        yield warn(AREA, "no rank is registered", f"in the training job: export RANKSCOPE_INGEST_URL={service_url}")
        return
    counts = Counter(target["health"] for target in live)
    words = ", ".join(f"{count} {health}" for health, count in sorted(counts.items()))
    yield ok(AREA, f"{len(live)} registered: {words}")
    yield from _problems(live)
    yield from _rank_checks(environment, live[:MAX_RANKS_CHECKED])


def _problems(live: Sequence[dict[str, Any]]) -> Iterator[CheckResult]:
    for target in [target for target in live if target["health"] == "failing"][:MAX_RANKS_NAMED]:
        yield warn(
            AREA,
            f"{_name(target)} cannot be polled: {printable(str(target['last_error']))}",
            "see the output of the training process of the rank",
        )
    lost = sum(target["records_lost"] for target in live)
    if lost:
        remedy = "increase serve.ring_records or enable the spool; events of type gap list the lost records"
        yield warn(AREA, f"records that were overwritten before the service read them: {lost}", remedy)


def _rank_checks(environment: Environment, live: Sequence[dict[str, Any]]) -> Iterator[CheckResult]:
    asked = []
    for target in live:
        try:
            asked.append(_request(environment, target))
        except UnreachableError as error:
            yield warn(
                AREA,
                f"{_name(target)} is unreachable from this machine: {error}",
                "no action is needed if the service can reach the rank",
            )
    if asked:
        yield _clocks(asked)
        yield _read(asked, RECORDS_PATH, "the service does not poll the ranks: see its log")
        yield _read(asked, METRICS_PATH, "Prometheus does not scrape the ranks: use rankscope up, or see docs/live.md")


def _request(environment: Environment, target: dict[str, Any]) -> _RankHealth:
    response = environment.get(target["url"] + HEALTH_PATH)
    document = response.json()
    readers = document.get("readers", []) if isinstance(document, dict) else []
    return _RankHealth(_name(target), skew_seconds(environment, response), readers)


def _clocks(asked: Sequence[_RankHealth]) -> CheckResult:
    worst = max(asked, key=lambda rank: abs(rank.skew or 0.0))
    if abs(worst.skew or 0.0) <= SKEW_SECONDS:
        return ok(AREA, "the clocks of the ranks agree with the clock of this machine")
    return warn(
        AREA,
        f"the clock of {worst.name} differs by {worst.skew:+.0f} s from that of this machine",
        "synchronise both clocks with NTP: timedatectl",
    )


def _read(asked: Sequence[_RankHealth], page: str, remedy: str) -> CheckResult:
    """Return a result that lists the clients that read `page` (such as `/metrics`) of the ranks.

    For each client, the text has the number of ranks that it reads, and one age in seconds. For each of these ranks,
    the age of the last request of the client is known; the text has the highest of these ages.
    """
    ages: dict[str, list[float]] = {}
    for rank in asked:
        for reader in rank.readers:
            if reader["page"] == page:
                ages.setdefault(printable(str(reader["by"])), []).append(float(reader["seconds_ago"]))
    if not ages:
        return warn(AREA, f"no client reads {page}", remedy)
    words = (f"{by} ({len(of)} of {len(asked)} ranks, {max(of):.0f} s ago)" for by, of in ages.items())
    return ok(AREA, f"{page} is read by {', '.join(words)}")


def _name(target: dict[str, Any]) -> str:
    return printable(f"{target['run']}/{target['rank']}")
