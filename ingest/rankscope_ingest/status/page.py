"""The page at `/`: what is wrong, then the runs with their ranks, the newest first. Pure: a standing in, HTML out.

It works without scripts. Its size is bounded whatever runs and ranks there are: what is left out is counted, and the
JSON API has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.channel import EXPORTERS_PATH, METRICS_PATH, RUNS_PATH, STATUS_PATH, TARGETS_PATH
from rankscope_contract.events import RunState
from rankscope_ingest.lifecycle.runs import ENDED
from rankscope_ingest.status.look import REFRESH_SECONDS, SCRIPT, STYLE
from rankscope_ingest.status.runs_shown import article, leavings
from rankscope_ingest.status.standing import RunStanding, ServiceStanding, Standing, TargetStanding
from rankscope_ingest.status.tables import Budget, exporter_table
from rankscope_ingest.status.words import ago, count, duration, text

MOST_RUNS: Final = 100
MOST_ROWS: Final = 2000
"""Targets on the whole page, and exporters beside them."""

_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Cpath d='M0 5h2v3H0zM3 2h2v6H3zM6 0h2v8H6z' fill='%230a62c4'/%3E%3C/svg%3E"
)


def page(standing: Standing) -> str:
    """Return the document."""
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_title(standing)}</title>",
            f'<link rel="icon" href="{_ICON}">',
            f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>',
            f"<style>{STYLE}</style>\n</head>\n<body>",
            *_header(standing.service),
            "<main>",
            *_service(standing.service, standing.targets),
            *_runs(standing),
            *_exporters(standing.exporters),
            "</main>",
            *_footer(),
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        )
    )


def _title(standing: Standing) -> str:
    """Return what the tab of a browser shows: what is wrong, or how many run."""
    if standing.service.reason is not None:
        return "degraded · Rankscope"
    states = Counter(run.progress.state for run in standing.runs)
    bad = [f"{states[state]} {state}" for state in (RunState.FAILED, RunState.STALLED) if states[state]]
    return text(", ".join([*bad, f"{states[RunState.RUNNING]} running"])) + " · Rankscope"


def _header(service: ServiceStanding) -> Iterator[str]:
    colour = "green" if service.reason is None else "red"
    yield "<header>"
    yield f'<h1>Rankscope</h1><span class="badge {colour}">{text(service.status)}</span>'
    yield f'<span class="dim">{text(service.version)}, up {duration(service.uptime_seconds)}</span>'
    yield '<span id="stale" class="badge red">not reached: what follows is old</span>'
    yield "</header>"


def _service(service: ServiceStanding, targets: Sequence[TargetStanding]) -> Iterator[str]:
    if service.reason is not None:
        yield f'<p class="alarm" role="alert"><strong>Degraded.</strong> {text(service.reason)}</p>'
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
    facts |= {_remote_name(name): count(value) for name, value in service.remote.items()}
    yield "<dl>"
    yield from _facts(facts)
    yield "</dl>"
    yield '<dl class="wide">'
    yield from _facts({"store": f"<code>{text(service.store)}</code>, shard {text(service.shard)}"})
    yield "</dl>"


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    for name, value in facts.items():
        yield f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>"


def _health(targets: Mapping[str, int]) -> str:
    return ", ".join(f"{count(number)} {text(health)}" for health, number in targets.items() if number) or "none"


def _bad(number: int) -> str:
    return f'<span class="red">{count(number)}</span>' if number else "0"


def _remote_name(name: str) -> str:
    return name.removeprefix("rankscope_ingest_").removesuffix("_total").replace("_", " ")


def _runs(standing: Standing) -> Iterator[str]:
    """Yield the runs, the newest first; targets of launches that are no run's latest stand with their run."""
    by_run: dict[str, list[TargetStanding]] = {}
    for target in standing.targets:
        by_run.setdefault(target.run, []).append(target)
    runs = sorted(standing.runs, key=lambda run: (run.progress.started_at or 0, run.progress.run), reverse=True)
    going = sum(run.progress.state not in ENDED for run in runs)
    yield f'<h2>Runs <span class="dim">{count(len(runs))}, {count(going)} going on</span></h2>'
    if not runs:
        yield '<p class="dim">No rank has registered since the service started.'
        yield "<code>rankscope runs</code> lists what the store holds.</p>"
    budget = Budget(MOST_ROWS)
    for shown in runs[:MOST_RUNS]:
        yield from article(shown, by_run.pop(shown.progress.run, ()), budget)
    for older in runs[MOST_RUNS:]:
        by_run.pop(older.progress.run, None)
    for run, targets in sorted(by_run.items())[:MOST_RUNS]:
        yield from leavings(run, targets, budget)
    yield from _left_out(runs[MOST_RUNS:])


def _left_out(runs: Sequence[RunStanding]) -> Iterator[str]:
    if runs:
        states = Counter(run.progress.state for run in runs)
        told = ", ".join(f"{count(number)} {text(state)}" for state, number in states.items())
        yield f'<p class="dim">{count(len(runs))} older runs are not shown ({told}):'
        yield f'<a href="{RUNS_PATH}">JSON</a>.</p>'


def _exporters(exporters: Iterable[Mapping[str, object]]) -> Iterator[str]:
    listed = list(exporters)
    if listed:
        yield f'<h2>Exporters of others <span class="dim">{count(len(listed))}</span></h2>'
        yield from exporter_table(listed, Budget(MOST_ROWS))


def _footer() -> Iterator[str]:
    paths = (STATUS_PATH, RUNS_PATH, TARGETS_PATH, EXPORTERS_PATH, METRICS_PATH)
    links = " ".join(f'<a href="{path}">{path}</a>' for path in paths)
    yield f"<footer>The same for programs: {links}</footer>"
