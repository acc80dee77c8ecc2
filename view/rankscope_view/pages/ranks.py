"""The page of the ranks of a run: which is slow, doing which phase, since when; which is silent; which waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankscope_contract.model.phases import Phase
from rankscope_storage.base.rule_names import SLOW_RANK
from rankscope_view.data.incidents import Incident, sentence_of
from rankscope_view.data.ranks import RECENT_STEPS, RankOrder, RankRow, RankTable
from rankscope_view.data.runs import RunRow
from rankscope_view.pages.format import NOTHING, ago, count, measure
from rankscope_view.pages.rendering import Place, render
from rankscope_view.pages.run import signed

_ORDER: Final = (Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD, Phase.COLLECTIVE, Phase.OPTIMIZER, Phase.OTHER)
_MOST_VERDICTS: Final = 2
_GIBIBYTE: Final = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A finding about a rank as a sentence, with its evidence.

    `usual_rank` is the rank nearest to the median, to which a slow rank can be compared.
    """

    severity: str
    rank: int
    sentence: str
    evidence: str
    usual_rank: int | None = None


def page(place: Place, row: RunRow, table: RankTable, order: RankOrder, now: float, *, past: Sequence[Incident]) -> str:
    """Return the page of the ranks of a run, in this order. `past` are the incidents of the run."""
    ordered = table.ordered(order)
    slow = next((one.rank for one in table.rows if one.slow), None)
    first = next((one for one in past if one.rule == SLOW_RANK), None) if slow is None else None
    over = first if first is not None and first.is_resolved else None
    median = "" if table.median_step is None else f", median step {table.median_step:.3g} s"
    return render(
        "ranks.html",
        place=place,
        row=row,
        table=ordered,
        unordered=table.rows,
        order=order,
        now=now,
        verdicts=list(verdicts(table, now, is_live=row.is_live)),
        most_verdicts=_MOST_VERDICTS,
        past=over,
        past_sentence=_past_sentence(over) if over else "",
        compared=[table.rows[0].rank, table.rows[1].rank if slow is None else slow] if len(table.rows) > 1 else [],
        order_of_phases=_ORDER,
        phases_of=lambda one: [(phase.value, one.phases[phase]) for phase in _ORDER if phase in one.phases],
        whole=max((sum(one.phases.values()) for one in table.rows), default=0.0),
        note=f"mean of the newest {RECENT_STEPS} steps of attempt {table.attempt}{median}",
        seen=max((one.seen_at or 0.0 for one in table.rows), default=0.0),
        seconds_of=_seconds,
        against_median=_against_median,
        memory_of=_memory,
        share_of=lambda value: (
            value / 100 if value is not None and value > 1.5 else value
        ),  # imported logs have percent
    )


def verdicts(table: RankTable, now: float, *, is_live: bool) -> Iterator[Verdict]:
    """Yield a finding for each slow or silent rank, the slowest first."""
    for row in sorted(table.rows, key=lambda row: -(row.slow.share if row.slow else 0)):
        if row.slow is not None:
            others = [one for one in table.rows if one is not row and one.against_median is not None]
            usual = min(
                (one for one in others if not one.is_silent),
                key=lambda one: abs(one.against_median or 0.0),
                default=None,
            )
            yield Verdict(
                severity="critical",
                rank=row.rank,
                sentence=f"Rank {row.rank} {row.slow.words}",
                evidence=_evidence(row, table),
                usual_rank=None if usual is None else usual.rank,
            )
    for row in table.rows:
        if row.is_silent:
            last = f"Its last step is {count(row.last_step)}, of {count(table.last_step or 0)}"
            last = "It has sent no row in this attempt" if row.last_step is None else last
            seen = f", {ago(max(0.0, now - row.seen_at))}" if row.seen_at is not None and is_live else ""
            others_run = (
                "The others continue: if they share collectives with it, the rank runs and only its exporter is silent."
            )
            evidence = f"{last}{seen}. {others_run} Its figures are absent here, not zero."
            yield Verdict(severity="warning", rank=row.rank, sentence=f"Rank {row.rank} is silent", evidence=evidence)


def _past_sentence(one: Incident) -> str:
    """Return the sentence of a rank that was slow before."""
    sentence = sentence_of(one).replace(" is slow ", " was slow ").replace(" pauses ", " paused ")
    return sentence.replace("wait ", "waited ")


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


def _against_median(row: RankRow) -> str:
    ratio = row.against_median
    return NOTHING if ratio is None else signed(ratio) if abs(ratio) >= 0.005 else "0 %"


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}" if value < 100 else measure(value)


def _memory(row: RankRow) -> tuple[str, float | None]:
    """Return the memory of a rank as text, and its share of the memory of the device if that is known."""
    used = row.latest.get("device_memory_allocated_bytes") or row.latest.get("resident_memory_bytes")
    if used is None:
        return NOTHING, None
    total = row.latest.get("gpu_memory_total_bytes")
    of_total = f" / {total / _GIBIBYTE:.0f}" if total else ""
    return f"{used / _GIBIBYTE:.1f}{of_total}", min(1.0, used / total) if total else None
