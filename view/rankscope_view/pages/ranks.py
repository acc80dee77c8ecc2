"""The page of the ranks of a run: which is slow, doing which phase, since when; which is silent; which waits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from rankscope_contract.model.phases import Phase
from rankscope_storage.base.rule_names import SLOW_RANK
from rankscope_view.data.incidents import Incident, sentence_of
from rankscope_view.data.ranks import RECENT_STEPS, RankOrder, RankRow, RankTable
from rankscope_view.data.runs import RunRow
from rankscope_view.pages import svg
from rankscope_view.pages.format import NOTHING, age, ago, count, measure, percent, text
from rankscope_view.pages.parts import Place, icon, panel, run_document, segmented, verdict
from rankscope_view.pages.run import signed

_ORDER: Final = (Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD, Phase.COLLECTIVE, Phase.OPTIMIZER, Phase.OTHER)
_MOST_VERDICTS: Final = 2
_GIBIBYTE: Final = 2.0**30


def page(place: Place, row: RunRow, table: RankTable, order: RankOrder, now: float, *, past: Sequence[Incident]) -> str:
    """Return the page of the ranks of a run, in this order. `past` are the incidents of the run."""
    if not table.rows:
        body = f'<div class="panel blank" id="no-rank" data-live>{icon("unknown")}<strong>No rank has sent a row in this run</strong><p>Imported logs have no ranks.</p></div>'
        return run_document(place, row, "Ranks", body, page="ranks")
    link = functools.partial(_compare_link, place, row.run, table)
    found = list(verdicts(table, now, is_live=row.is_live, link=link))
    left = len(found) - _MOST_VERDICTS
    more = f'<p class="dim">{left} more ranks are marked in the table.</p>' if left > 0 else ""
    if not found:
        evidence = "Compared by input, computation and pauses of each step."
        when = "now" if row.is_live else "at the end"
        found = [verdict("info", f"No rank of {len(table.rows)} is slow or silent {when}", evidence)]
    slow = [] if any(one.is_slow for one in table.rows) else [one for one in past if one.rule == SLOW_RANK]
    more += "".join(_past(place, row.run, one) for one in slow[:1] if one.is_resolved)
    body = f'<div id="verdicts" data-live>{"".join(found[:_MOST_VERDICTS])}{more}</div>{_toolbar(place, row.run, table, order)}{_strips(row.run)}{_table(table.ordered(order), now)}'
    return run_document(place, row, "Ranks", body, page="ranks")


def verdicts(
    table: RankTable, now: float, *, is_live: bool, link: Callable[[int], str] = lambda _: ""
) -> Iterator[str]:
    """Yield a sentence with its evidence for each slow or silent rank, the slowest first.

    `link` returns the actions of a slow rank as HTML.
    """
    for row in sorted(table.rows, key=lambda row: -(row.slow.share if row.slow else 0)):
        if row.slow is not None:
            yield verdict("critical", f"Rank {row.rank} {row.slow.words}", _evidence(row, table), link(row.rank))
    for row in table.rows:
        if row.is_silent:
            last = f"Its last step is {count(row.last_step)}, of {count(table.last_step or 0)}"
            last = "It has sent no row in this attempt" if row.last_step is None else last
            seen = f", {ago(max(0.0, now - row.seen_at))}" if row.seen_at is not None and is_live else ""
            others = " The others continue: if they share collectives with it, the rank runs and only its exporter is silent."
            evidence = f"{last}{seen}.{others} Its figures are absent here, not zero."
            yield verdict("warning", f"Rank {row.rank} is silent", evidence)


def _past(place: Place, run: str, one: Incident) -> str:
    """Return the sentence of a rank that was slow before, with the step of its last report, and a link."""
    sentence = (
        sentence_of(one).replace(" is slow ", " was slow ").replace(" pauses ", " paused ").replace("wait ", "waited ")
    )
    link = f'<a class="button" href="{place.url("runs", run, "incidents", one.key)}">Incident {one.number}</a>'
    return verdict(
        "warning", f"{text(sentence)} until about step {count(one.last_step)}", f"In attempt {one.attempt}.", link
    )


def _evidence(row: RankRow, table: RankTable) -> str:
    others = [other for other in table.rows if other.rank != row.rank and not other.is_silent]
    named = {phase: [one.phases[phase] for one in others if phase in one.phases] for phase in row.phases}
    usual = {phase: float(np.median(values)) for phase, values in named.items() if values and phase != Phase.COLLECTIVE}
    longer = {phase: row.phases[phase] - seconds for phase, seconds in usual.items()}
    least = 0.05 * max(longer.values(), default=0.0)
    parts = [
        f"{phase.replace('_', ' ')} {row.phases[phase]:.3g} s against {usual[phase]:.3g} s"
        for phase in sorted(longer, key=lambda phase: -longer[phase])
        if longer[phase] > max(least, 0.05 * usual[phase])
    ]
    clock = row.latest.get("gpu_clock_hertz")
    clocks = [one.latest["gpu_clock_hertz"] for one in others if "gpu_clock_hertz" in one.latest]
    if clock and clocks and clock < 0.95 * (middle := float(np.median(clocks))):
        heat = row.latest.get("gpu_temperature_celsius")
        at = f" at {heat:.0f} °C" if heat is not None else ""
        parts.append(f"the clock of its GPU is {clock / 1e6:,.0f} MHz against {middle / 1e6:,.0f} MHz{at}")
    sentence = "; ".join(parts)
    equal = "Whole steps look equal on all ranks, because they end together."
    return f"{sentence[:1].upper()}{sentence[1:]}. {equal}" if parts else ""


def _compare_link(place: Place, run: str, table: RankTable, rank: int) -> str:
    """Return a link to the comparison of a slow rank with the one that is nearest to the median."""
    others = [row for row in table.rows if row.rank != rank and row.against_median is not None and not row.is_silent]
    if not others:
        return ""
    usual = min(others, key=lambda row: abs(row.against_median or 0.0)).rank
    url = place.url("compare", **{"a": run, "b": run, "a.rank": usual, "b.rank": rank})
    return f'<a class="button" href="{url}">Compare with rank {usual}</a>'


def _toolbar(place: Place, run: str, table: RankTable, order: RankOrder) -> str:
    """Return the choice of the order, and that of two ranks to compare."""
    if len(table.rows) < 2:
        return ""
    words = ((RankOrder.WORST, "Worst first"), (RankOrder.RANK, "Rank"), (RankOrder.HOST, "Host"))
    orders = [(one.value, word, place.url("runs", run, "ranks", order=one)) for one, word in words]
    chosen = (table.rows[0].rank, next((row.rank for row in table.rows if row.is_slow), table.rows[1].rank))
    selects = [
        f'<select name="{letter}.rank" aria-label="Rank {letter.upper()}">'
        + "".join(f"<option{' selected' if row.rank == rank else ''}>{row.rank}</option>" for row in table.rows)
        + "</select>"
        for letter, rank in zip("ab", chosen, strict=True)
    ]
    hidden = "".join(f'<input type="hidden" name="{letter}" value="{text(run)}">' for letter in "ab")
    return (
        f'<form class="toolbar" action="{place.url("compare")}">{segmented("Order", orders, order, "order")}{hidden}<span class="choice"><span class="label">Compare rank</span>{selects[0]}'
        f'<span class="label">with rank</span>{selects[1]}<button>Compare</button></span></form>'
    )


def _strips(run: str) -> str:
    name = text(run)
    first = f'<div class="heat strip" id="heat" data-run="{name}" data-source="ranks" data-whole="" tabindex="0" role="img" aria-label="Time before the collective"></div>'
    second = f'<div class="heat strip" id="heat2" data-run="{name}" data-source="ranks" data-whole="1" tabindex="0" role="img" aria-label="Whole step"></div>'
    readout = '<div class="readout" id="readout"><span>Point at a cell for its value.</span></div>'
    reason = '<div class="readout"><span>Equal on all ranks, because all end with the slowest.</span></div>'
    return (
        f'<div class="strips">{panel("Before the collective", first + readout, note="against the median rank of the step")}'
        f"{panel('Whole step', second + reason, note='same scale')}</div>"
    )


def _table(table: RankTable, now: float) -> str:
    keys = "".join(
        f'<span class="key"><svg viewBox="0 0 10 10"><rect class="{phase}" width="10" height="10"/></svg>{phase.replace("_", " ")}</span>'
        for phase in _ORDER
    )
    whole = max((sum(row.phases.values()) for row in table.rows), default=0.0)
    scale = f", the longest bar is {whole:.3g} s" if whole else ""
    heads = (
        f'<tr><th class="n">rank<th class="rare">host<th><th>one step{scale}<th class="n">before coll., s<th class="n">against median, %<th class="n">wait, s'
        '<th class="n rare">memory, GiB<th class="n rare">GPU busy<th class="n rare">MHz<th class="n rare">°C<th class="n rare">seen</tr>'
    )
    body = "".join(_row(row, whole, now) for row in table.rows)
    median = "" if table.median_step is None else f", median step {table.median_step:.3g} s"
    note = f"mean of the newest {RECENT_STEPS} steps of attempt {table.attempt}{median}"
    seen = max((row.seen_at or 0.0 for row in table.rows), default=0.0)
    return f'<div id="ranks" data-live data-seen="{seen:.1f}">{panel("Phases", f"<table class=list>{heads}{body}</table>", note=note, aside=keys, kind="scrolls")}</div>'


def _row(row: RankRow, whole: float, now: float) -> str:
    kind = "hot" if row.is_slow else "warm off" if row.is_silent else ""
    word = f"{icon('critical')} slow" if row.is_slow else f"{icon('warning')} silent" if row.is_silent else ""
    if row.phases:
        bar = svg.stacked([(phase.value, row.phases[phase]) for phase in _ORDER if phase in row.phases], whole)
    else:
        bar = NOTHING if row.last_step is None else f"no step since step {count(row.last_step)}"
    seen = NOTHING if row.seen_at is None else age(max(0.0, now - row.seen_at))
    ratio = row.against_median
    against = NOTHING if ratio is None else signed(ratio) if abs(ratio) >= 0.005 else "0 %"
    return (
        f'<tr class="{kind}"><td class="n">{row.rank}</td><td class="rare">{text(row.host or NOTHING)}</td><td class="n">{word}</td><td>{bar}</td>'
        f'<td class="n">{_seconds(row.compute_seconds)}</td><td class="n">{against}</td><td class="n">{_seconds(row.wait_seconds)}</td>'
        f'<td class="n rare">{_memory(row.latest)}</td><td class="n rare">{_share(row.latest.get("gpu_utilization"))}</td>'
        f'<td class="n rare">{_scaled(row.latest.get("gpu_clock_hertz"), 1e6)}</td><td class="n rare">{_scaled(row.latest.get("gpu_temperature_celsius"), 1)}</td>'
        f'<td class="n rare">{seen}</td></tr>'
    )


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}" if value < 100 else measure(value)


def _scaled(value: float | None, unit: float) -> str:
    return NOTHING if value is None else count(value / unit)


def _share(value: float | None) -> str:
    if value is None:
        return NOTHING
    share = value / 100 if value > 1.5 else value  # imported logs have percent
    return f'{percent(share)}<span class="gauge">{svg.bar(min(share, 1.0), "completed")}</span>'


def _memory(latest: Mapping[str, float]) -> str:
    used = latest.get("device_memory_allocated_bytes") or latest.get("resident_memory_bytes")
    if used is None:
        return NOTHING
    total = latest.get("gpu_memory_total_bytes")
    bar = f'<span class="gauge">{svg.bar(min(1.0, used / total), "completed")}</span>' if total else ""
    of_total = f" / {total / _GIBIBYTE:.0f}" if total else ""
    return f"{used / _GIBIBYTE:.1f}{of_total}{bar}"
