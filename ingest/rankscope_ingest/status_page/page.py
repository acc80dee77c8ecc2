"""Generate the HTML of the status page, which the service serves at `/service`.

The page shows the state of the service, then the runs, newest first, each with its ranks. It works without scripts. The
number of rows is limited; the page shows how many rows are left out, and the JSON API contains all of them.

Live ranks that are not healthy are always visible; healthy and ended ranks are in collapsed sections.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_contract.wire.channel import EXPORTERS_PATH, METRICS_PATH, RUNS_PATH, STATUS_PATH, TARGETS_PATH
from rankscope_ingest.live.progress import RunProgress
from rankscope_ingest.remote_write.senders import RefusedSender
from rankscope_ingest.runs.models import ENDED, Health
from rankscope_ingest.status_page.assets import REFRESH_SECONDS, SCRIPT, STYLE
from rankscope_ingest.status_page.collect import RunStatus, ServiceStatus, Status, TargetStatus
from rankscope_view.pages.format import ago, count, duration, measure, number, percent, text

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


MAX_RUNS: Final = 100
MAX_SENDERS: Final = 10  # of refused senders of remote write
MAX_ROWS: Final = 2000
"""Maximum number of targets on the status page. The maximum number of exporters is the same."""

_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Cpath d='M0 5h2v3H0zM3 2h2v6H3zM6 0h2v8H6z' fill='%230a62c4'/%3E%3C/svg%3E"
)


def page(status: Status) -> str:
    """Return the complete HTML document of the status page."""
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_title(status)}</title>",
            f'<link rel="icon" href="{_ICON}">',
            f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>',
            f"<style>{STYLE}</style>\n</head>\n<body>",
            *_header(status.service),
            "<main>",
            *_service(status.service, status.targets),
            *_runs(status),
            *_exporters(status.exporters),
            "</main>",
            *_footer(),
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        )
    )


def _title(status: Status) -> str:
    """Return the title of the page: `degraded`, or the numbers of failed, stalled, diverged and running runs.

    A diverged run is one that has not ended and whose latest loss is NaN or infinite.
    """
    if status.service.reason is not None:
        return "degraded · Rankscope"
    states = Counter(run.progress.state for run in status.runs)
    bad = [f"{states[state]} {state}" for state in (RunState.FAILED, RunState.STALLED) if states[state]]
    diverged = sum(run.progress.nonfinite_loss is not None and run.progress.state not in ENDED for run in status.runs)
    bad += [f"{diverged} with NaN or infinite loss"] if diverged else []
    return text(", ".join([*bad, f"{states[RunState.RUNNING]} running"])) + " · Rankscope"


def _header(service: ServiceStatus) -> Iterator[str]:
    colour = "green" if service.reason is None else "red"
    yield "<header>"
    yield f'<h1><a href="./">Rankscope</a></h1><span class="badge {colour}">{text(service.status)}</span>'
    yield f'<span class="dim">{text(service.version)}, up {duration(service.uptime_seconds)}</span>'
    yield '<span id="stale" class="badge red">connection lost: the values below are stale</span>'
    yield "</header>"


def _service(service: ServiceStatus, targets: Sequence[TargetStatus]) -> Iterator[str]:
    found = [("Degraded", service.reason), ("Notifications", service.notifications)]
    for title, sentence in found + [("Run names", one) for one in service.shared_names]:
        if sentence is not None:
            yield f'<p class="alarm" role="alert"><strong>{title}.</strong> {text(sentence)}</p>'
    yield from _refused(service.refused_senders)
    worst = max((target.lag_seconds for target in targets), default=0.0)
    facts = {
        "last commit": ago(service.last_commit_ago_seconds),
        "rows committed": count(service.rows_committed),
        "rows waiting": count(service.rows_pending),
        "ranks": _health(service.targets),
        "largest lag": duration(worst),
        "records lost": _bad(service.records_lost),
        "samples dropped": count(service.samples_dropped),
    }
    facts |= {f"errors in {task}": _bad(number) for task, number in service.background_errors.items()}
    facts |= {_remote_name(name): count(value) for name, value in service.remote.items()}
    yield "<dl>"
    yield from _facts_html(facts.items())
    yield "</dl>"
    yield '<dl class="wide">'
    yield from _facts_html([("store", f"<code>{text(service.store)}</code>, shard {text(service.shard)}")])
    yield "</dl>"


def _refused(senders: Sequence[RefusedSender]) -> Iterator[str]:
    for sender in senders[:MAX_SENDERS]:
        share = sender.share.capitalize()
        yield f'<p class="alarm" role="alert"><strong>Samples are lost.</strong> {share} of the remote write sender'
        yield f"{text(sender.name)} are refused: {text(sender.reason)} ({count(sender.requests)} requests,"
        yield f"the last one {ago(sender.last_request_ago_seconds)})</p>"
    if others := senders[MAX_SENDERS:]:
        yield f'<p class="dim">{count(len(others))} other senders whose requests are refused are not shown.</p>'


def _facts_html(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in facts:
        yield f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>"


def _health(targets: Mapping[str, int]) -> str:
    return ", ".join(f"{count(number)} {text(health)}" for health, number in targets.items() if number) or "none"


def _bad(number: int) -> str:
    return f'<span class="red">{count(number)}</span>' if number else "0"


def _remote_name(name: str) -> str:
    return name.removeprefix("rankscope_ingest_").removesuffix("_total").replace("_", " ")


def _runs(status: Status) -> Iterator[str]:
    """Yield the HTML of all runs, newest run first. Each run is followed by the ranks of all its launches."""
    by_run: dict[str, list[TargetStatus]] = {}
    for target in status.targets:
        by_run.setdefault(target.run, []).append(target)
    runs = sorted(status.runs, key=lambda run: (run.progress.started_at or 0, run.progress.run), reverse=True)
    active = sum(run.progress.state not in ENDED for run in runs)
    yield f'<h2>Runs <span class="dim">{count(len(runs))}, {count(active)} active</span></h2>'
    if not runs:
        yield '<p class="dim">No rank has registered since the service started.'
        yield "<code>rankscope runs</code> lists all runs in the store.</p>"
    budget = Budget(MAX_ROWS)
    for shown in runs[:MAX_RUNS]:
        yield from article(shown, by_run.pop(shown.progress.run, ()), budget)
    for older in runs[MAX_RUNS:]:
        by_run.pop(older.progress.run, None)
    for run, targets in sorted(by_run.items())[:MAX_RUNS]:
        yield from earlier_ranks(run, targets, budget)
    yield from _left_out(runs[MAX_RUNS:])


def _left_out(runs: Sequence[RunStatus]) -> Iterator[str]:
    if runs:
        states = Counter(run.progress.state for run in runs)
        counts = ", ".join(f"{count(number)} {text(state)}" for state, number in states.items())
        yield f'<p class="dim">{count(len(runs))} older runs are not shown ({counts}):'
        yield f'<a href="{RUNS_PATH}">JSON</a>.</p>'


def _exporters(exporters: Iterable[Mapping[str, object]]) -> Iterator[str]:
    listed = list(exporters)
    if listed:
        yield f'<h2>External exporters <span class="dim">{count(len(listed))}</span></h2>'
        yield from exporter_table(listed, Budget(MAX_ROWS))


def _footer() -> Iterator[str]:
    paths = (STATUS_PATH, RUNS_PATH, TARGETS_PATH, EXPORTERS_PATH, METRICS_PATH)
    links = " ".join(f'<a href="{path}">{path}</a>' for path in paths)
    yield f"<footer>JSON and metrics: {links}</footer>"


COLOURS: Final = {
    RunState.PENDING: "grey",
    RunState.RUNNING: "green",
    RunState.STALLED: "amber",
    RunState.COMPLETED: "blue",
    RunState.STOPPED: "grey",
    RunState.FAILED: "red",
}


def article(run: RunStatus, targets: Sequence[TargetStatus], budget: Budget) -> Iterator[str]:
    """Yield the HTML of a run and its ranks. `budget` limits the number of ranks on the whole page."""
    progress = run.progress
    yield "<article>"
    yield from _head(run)
    yield from _bar(progress)
    if progress.reason:
        yield f'<p class="why">{text(progress.reason)}</p>'
    if run.note:
        yield f'<p class="note">{"<br>".join(map(text, run.note.splitlines()))}</p>'
    yield "<dl>"
    yield from _facts_html(_facts(run))
    yield "</dl>"
    yield from target_tables(progress.run, targets, budget, attempt=progress.attempt)
    yield "</article>"


def earlier_ranks(run: str, targets: Sequence[TargetStatus], budget: Budget) -> Iterator[str]:
    """Yield the HTML of ranks of earlier launches of a run whose newest launch ended long ago."""
    yield f'<article><div class="head"><h3><bdi>{text(run)}</bdi></h3><span class="dim">earlier launches</span></div>'
    yield from target_tables(run, targets, budget)
    yield "</article>"


def _head(run: RunStatus) -> Iterator[str]:
    progress = run.progress
    yield '<div class="head">'
    yield f'<span class="badge {_colour(progress)}">{text(progress.state)}</span>'
    if progress.nonfinite_loss is not None:
        yield f'<span class="badge red">{text(progress.nonfinite_loss)} not finite</span>'
    yield f"<h3><bdi>{text(progress.run)}</bdi></h3>"
    yield f'<span class="dim">attempt {progress.attempt}</span>'
    for key, value in sorted(run.tags.items()):
        yield f'<span class="tag"><bdi>{text(key)}={text(value)}</bdi></span>'
    yield "</div>"


def _colour(progress: RunProgress) -> str:
    if progress.state == RunState.RUNNING and progress.nonfinite_loss is not None:
        return COLOURS[RunState.FAILED]  # it runs, but its training has failed
    return COLOURS[RunState(progress.state)]


def _bar(progress: RunProgress) -> Iterator[str]:
    """Yield the HTML of the progress of a run, as a bar if the number of planned steps is known."""
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


def _facts(run: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield (name, HTML of the value) for each property of a run whose value is known."""
    progress = run.progress
    missing = progress.world_size - progress.ranks_alive
    is_short = missing > 0 and progress.state not in ENDED
    ranks = f"{count(progress.ranks_alive)} of {count(progress.world_size)}"
    yield "ranks", f'<span class="amber">{ranks}</span>' if is_short else ranks
    if run.last_seen_ago_seconds is not None:
        yield "last seen", ago(run.last_seen_ago_seconds)
    if progress.loss is not None:
        loss = measure(progress.loss)
        marked = loss if math.isfinite(progress.loss) else f'<span class="red">{loss}</span>'
        yield "loss", marked + progress.loss_note
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
