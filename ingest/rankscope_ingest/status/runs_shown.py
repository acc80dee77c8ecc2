"""One run on the page: its state in colour and in words, how far it is, and its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rankscope_contract.events import RunState
from rankscope_ingest.lifecycle.runs import ENDED
from rankscope_ingest.progress import RunProgress
from rankscope_ingest.status.standing import RunStanding, TargetStanding
from rankscope_ingest.status.tables import Budget, target_tables
from rankscope_ingest.status.words import ago, count, duration, number, percent, text

COLOURS: Final = {
    RunState.PENDING: "grey",
    RunState.RUNNING: "green",
    RunState.STALLED: "amber",
    RunState.COMPLETED: "blue",
    RunState.STOPPED: "grey",
    RunState.FAILED: "red",
}


def article(run: RunStanding, targets: Sequence[TargetStanding], budget: Budget) -> Iterator[str]:
    """Yield the run and its ranks; `budget` bounds how many of them."""
    progress = run.progress
    yield "<article>"
    yield from _head(run)
    yield from _bar(progress)
    if progress.reason:
        yield f'<p class="why">{text(progress.reason)}</p>'
    if run.note:
        yield f'<p class="note">{"<br>".join(map(text, run.note.splitlines()))}</p>'
    yield "<dl>"
    for name, value in _facts(run):
        yield f"<div><dt>{name}</dt><dd>{value}</dd></div>"
    yield "</dl>"
    yield from target_tables(progress.run, targets, budget, attempt=progress.attempt)
    yield "</article>"


def leavings(run: str, targets: Sequence[TargetStanding], budget: Budget) -> Iterator[str]:
    """Yield the ranks of earlier launches of a run whose newest one ended long ago."""
    yield f'<article><div class="head"><h3><bdi>{text(run)}</bdi></h3><span class="dim">earlier launches</span></div>'
    yield from target_tables(run, targets, budget)
    yield "</article>"


def _head(run: RunStanding) -> Iterator[str]:
    progress = run.progress
    yield '<div class="head">'
    yield f'<span class="badge {_colour(progress)}">{text(progress.state)}</span>'
    yield f"<h3><bdi>{text(progress.run)}</bdi></h3>"
    yield f'<span class="dim">attempt {progress.attempt}</span>'
    for key, value in sorted(run.tags.items()):
        yield f'<span class="tag"><bdi>{text(key)}={text(value)}</bdi></span>'
    yield "</div>"


def _colour(progress: RunProgress) -> str:
    return COLOURS[RunState(progress.state)]


def _bar(progress: RunProgress) -> Iterator[str]:
    """Yield how far the run is; a bar only where somebody said how far it is to go."""
    if progress.step is not None and progress.planned_steps:
        done = min(progress.step, progress.planned_steps)
        share = percent(min(1.0, progress.step / progress.planned_steps))
        words = f"step {count(progress.step)} of {count(progress.planned_steps)}, {share}"
        attributes = f'class="{_colour(progress)}" max="{progress.planned_steps}" value="{done}" aria-label="{words}"'
        yield f"<progress {attributes}></progress>"
        yield f"<div>{words}{_left(progress)}</div>"
    elif progress.step is not None:
        yield f'<div class="why">step {count(progress.step)}, no end planned</div>'
    else:
        yield '<div class="why dim">no step yet</div>'


def _left(progress: RunProgress) -> str:
    if progress.eta_seconds is None or progress.state in ENDED:
        return ""
    return f", <strong>{duration(progress.eta_seconds)} left</strong>"


def _facts(run: RunStanding) -> Iterator[tuple[str, str]]:
    """Yield what is known; what is not is not mentioned."""
    progress = run.progress
    missing = progress.world_size - progress.ranks_alive
    is_short = missing > 0 and progress.state not in ENDED
    ranks = f"{count(progress.ranks_alive)} of {count(progress.world_size)}"
    yield "ranks", f'<span class="amber">{ranks}</span>' if is_short else ranks
    if run.last_seen_ago_seconds is not None:
        yield "last seen", ago(run.last_seen_ago_seconds)
    if progress.loss is not None:
        is_finite = abs(progress.loss) < float("inf")
        yield "loss", number(progress.loss) if is_finite else f'<span class="red">{number(progress.loss)}</span>'
    if progress.steps_per_second is not None and progress.state not in ENDED:
        yield "speed", _speed(progress.steps_per_second)
    if progress.tokens_per_second is not None and progress.state not in ENDED:
        yield "tokens/s", count(progress.tokens_per_second)
    if run.goodput_ratio is not None:
        yield "goodput", percent(run.goodput_ratio)
    yield "rows stored", count(progress.rows_stored)
    yield "lag", f"{count(progress.lag_records)} records"
    if progress.records_lost:
        yield "records lost", f'<span class="red">{count(progress.records_lost)}</span>'


def _speed(steps_per_second: float) -> str:
    if 0 < steps_per_second < 1:
        return f"{duration(1 / steps_per_second)} a step"
    return f"{number(steps_per_second)} steps/s"
