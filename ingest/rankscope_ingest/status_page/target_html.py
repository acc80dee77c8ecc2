"""HTML tables of ranks and exporters for the status page.

Live ranks that are not healthy are always visible; healthy and ended ranks are in collapsed sections.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.protocol.channel import EXPORTERS_PATH, TARGETS_PATH
from rankscope_ingest.runs.target import Health
from rankscope_ingest.status_page.model import TargetStatus
from rankscope_view.pages.format import ago, count, duration, percent, text

MAX_LAG_SECONDS: Final = 60.0
"""Age in seconds of the oldest uncommitted record above which a rank is not healthy, even if it responds."""

FULL_RING: Final = 0.9

_HEALTH_COLOURS: Final = {
    Health.PENDING: "grey",
    Health.UP: "green",
    Health.DRAINING: "blue",
    Health.FAILING: "red",
    Health.GONE: "grey",
}
_WORST_FIRST: Final = {Health.FAILING: 0, Health.UP: 1, Health.DRAINING: 1, Health.PENDING: 2, Health.GONE: 3}
_HEADS: Final = (
    '<tr><th class="n">rank<th>health<th class="rare">host<th class="n">lag, records<th class="n">lag, time'
    '<th class="n rare">ring<th class="n rare">last scrape<th class="rare">address</tr>'
)


class Budget:
    """Number of table rows that may still be added to the page."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def take(self, wanted: int) -> int:
        """Reserve table rows; return how many of the `wanted` rows may be added to the page."""
        taken = min(wanted, self._rows)
        self._rows -= taken
        return taken


def is_healthy(target: TargetStatus) -> bool:
    """Return whether a rank is healthy.

    A healthy rank responds and has no lost records. The age of its oldest uncommitted record is below MAX_LAG_SECONDS,
    and the fill ratio of its ring is below FULL_RING.
    """
    if target.health not in (Health.UP, Health.DRAINING) or target.records_lost:
        return False
    return target.lag_seconds < MAX_LAG_SECONDS and target.ring_fill_ratio < FULL_RING


def target_tables(
    run: str, targets: Sequence[TargetStatus], budget: Budget, *, attempt: int | None = None
) -> Iterator[str]:
    """Yield the HTML of the ranks of a run.

    Live ranks that are not healthy come first; healthy and ended ranks follow in collapsed sections. A rank of another
    attempt than `attempt` is labelled with its attempt.
    """
    groups = {
        "well": [target for target in targets if is_healthy(target)],
        "gone": [target for target in targets if target.health == Health.GONE],
    }
    folded = {target.incarnation for group in groups.values() for target in group}
    open_ = sorted((target for target in targets if target.incarnation not in folded), key=_badness)
    yield from _table(open_, attempt, budget)
    for name, group in groups.items():
        if group:
            yield f'<details id="{name}-{_key(run)}"><summary>{_summary(group)}</summary>'
            yield from _table(sorted(group, key=_place), attempt, budget)
            yield "</details>"


def exporter_table(exporters: Sequence[Mapping[str, object]], budget: Budget) -> Iterator[str]:
    """Yield the HTML of the external exporters, failing ones first."""
    listed = sorted(exporters, key=lambda one: (one["up"] is not False, str(one["name"])))
    shown = budget.take(len(listed))
    yield (
        '<div class="scroll"><table><tr><th>name<th>health<th class="n">samples<th class="n">lag, time'
        '<th class="rare">address<th>error</tr>'
    )
    for one in listed[:shown]:
        word, colour = {True: ("up", "green"), False: ("down", "red")}.get(one["up"], ("pending", "grey"))  # type: ignore[call-overload]  # None is neither
        yield (
            f'<tr><td><bdi>{text(one["name"])}</bdi><td><span class="badge {colour}">{word}</span>'
            f'<td class="n">{_samples(one["samples"])}<td class="n">{_lag(one["lag_seconds"])}'
            f'<td class="rare">{text(one["url"])}'
            f'<td class="long">{text(one["last_error"] or "")}</tr>'
        )
    yield "</table></div>"
    yield from _more(len(listed) - shown, EXPORTERS_PATH)


def _table(targets: Sequence[TargetStatus], attempt: int | None, budget: Budget) -> Iterator[str]:
    shown = budget.take(len(targets))
    if shown:
        yield f'<div class="scroll"><table>{_HEADS}'
        yield from (_row(target, attempt) for target in targets[:shown])
        yield "</table></div>"
    yield from _more(len(targets) - shown, TARGETS_PATH)


def _row(target: TargetStatus, attempt: int | None) -> str:
    colour = _HEALTH_COLOURS.get(Health(target.health), "grey")
    lost = f", {count(target.records_lost)} lost" if target.records_lost else ""
    source = "" if target.served_by is None else "spool served at "
    launch = "" if target.attempt == attempt else f'<span class="dim">attempt {target.attempt}</span> '
    error = f'<tr class="error"><td><td colspan="7">{text(target.last_error)}</tr>' if target.last_error else ""
    return (
        f'<tr><td class="n">{launch}{target.rank}<td><span class="badge {colour}">{text(target.health)}</span>'
        f'<td class="rare"><bdi>{text(target.host)}</bdi>, {target.pid}<td class="n">{count(target.lag_records)}{lost}'
        f'<td class="n">{duration(target.lag_seconds)}<td class="n rare">{percent(target.ring_fill_ratio)}'
        f'<td class="n rare">{ago(target.last_scrape_ago_seconds)}'
        f'<td class="rare">{source}{text(target.url)}</tr>{error}'
    )


def _more(left: int, path: str) -> Iterator[str]:
    if left > 0:
        yield f'<p class="dim">{count(left)} more are not shown: <a href="{path}">JSON</a>.</p>'


def _summary(group: Iterable[TargetStatus]) -> str:
    tally = Counter(target.health for target in group)
    return ", ".join(f"{count(number)} {text(health)}" for health, number in tally.items())


def _badness(target: TargetStatus) -> tuple[float, ...]:
    return (_WORST_FIRST.get(Health(target.health), 0), -target.lag_seconds, *_place(target))


def _place(target: TargetStatus) -> tuple[int, int]:
    return -target.attempt, target.rank


def _key(run: str) -> str:
    """Return the HTML element id of a run.

    The id is always the same for a run, so that an opened section remains open after a reload.
    """
    return hashlib.sha256(run.encode(errors="surrogatepass")).hexdigest()[:12]


def _lag(value: object) -> str:
    return duration(value) if isinstance(value, float) else ""


def _samples(value: object) -> str:
    return count(value) if isinstance(value, int) else ""
