"""Generate the HTML of the status page, which the service serves at `/service`.

The page shows the state of the service, then the runs, newest first, each with its ranks. It works without scripts. The
number of rows is limited; the page shows how many rows are left out, and the JSON API contains all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_contract.protocol.channel import EXPORTERS_PATH, METRICS_PATH, RUNS_PATH, STATUS_PATH, TARGETS_PATH
from rankscope_ingest.remote_write.senders import RefusedSender
from rankscope_ingest.reporting.progress import RunProgress
from rankscope_ingest.runs.models import ENDED
from rankscope_ingest.status_page.assets import REFRESH_SECONDS, SCRIPT, STYLE
from rankscope_ingest.status_page.model import RunStatus, ServiceStatus, Status, TargetStatus
from rankscope_ingest.status_page.target_html import (
    Budget,
    exporter_table,
    target_tables,
)
from rankscope_view.pages.format import ago, count, duration, measure, number, percent, text

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
