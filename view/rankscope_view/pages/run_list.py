"""The list of runs: which are in trouble, which run, how far they are, and whether the loss falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_view.data.runs import ENDED, INCIDENTS, PAGE_RUNS, STOPPING, RunList, RunRow
from rankscope_view.pages import svg
from rankscope_view.pages.format import NOTHING, age, count, duration, measure, percent, short, text
from rankscope_view.pages.parts import Place, document, icon, incident_line, run_pill, state_word, tag_list, verdict

_ORDER: Final = (
    *(RunState.RUNNING, RunState.STALLED, STOPPING, RunState.PENDING, RunState.FAILED, RunState.STOPPED),
    *(RunState.COMPLETED, "unknown"),
)
_COLUMNS: Final = (
    ("run", "Run", ""),
    ("state", "State", ""),
    ("progress", "Progress", ""),
    ("loss", "Loss", "loss"),
    ("", "Learning rate", "n wide"),
    ("", "Speed", "n wide"),
    ("", "Open incident, or reason of the state", ""),
    ("seen", "Seen", "n"),
)
SPEED_UNITS: Final = {
    "tokens_per_second": "tok/s",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
    "step_seconds": "s/step",
}
_MOVING: Final = frozenset({RunState.RUNNING, STOPPING})
"""States in which a run makes steps, so that the time that is left has a meaning."""

_STILL: Final = frozenset({RunState.PENDING, RunState.STALLED, RunState.FAILED, RunState.STOPPED})
"""States of a run without a speed. The speed of a completed run is its last one."""


def page(place: Place, found: RunList, search: str, now: float, alarms: Sequence[str] = ()) -> str:
    """Return the list of runs. `search` is the text of the search field; `alarms` are problems of the service."""
    active = sum(number for state, number in found.states.items() if state not in ENDED and state != "unknown")
    title = f"{found.with_incidents} with incidents, {active} active"
    body = [f'<div id="alarms" data-live>{"".join(_alarm(place, alarm) for alarm in alarms)}</div>']
    body.append(_toolbar(place, found, search))
    if not found.total:
        body.append(_empty())
    else:
        rows = "".join(_row(place, row, now) for row in found.rows) or '<tr><td colspan="9">No run matches.</td></tr>'
        body.append(
            f'<form action="{place.url("compare")}"><table class="runs" id="runs" data-live><thead><tr><th></th>'
            f"{_heads(place, found, search)}</tr></thead><tbody>{rows}</tbody></table>{_compare_bar()}</form>"
        )
        body.append(_pages(place, found, search))
    about = f"{count(found.total)} run{'' if found.total == 1 else 's'}, {active} active"
    return document(place, title, "".join(body), page="list", about=about)


def _alarm(place: Place, alarm: str) -> str:
    link = f'<a class="button" href="{place.url("service")}">Service</a>' if place.has_service else ""
    return verdict("critical", text(alarm), actions=link)


def _toolbar(place: Place, found: RunList, search: str) -> str:
    words = " ".join(part for part in search.split() if not part.startswith("state:")) or None
    choices = [("Open incidents", INCIDENTS, found.with_incidents, icon("critical"))]
    names = {known: state_word(None if known == "unknown" else known) for known in _ORDER}
    choices += [(word, known, found.states.get(known, 0), icon(known)) for known, word in names.items()]
    chips = "".join(
        f'<a href="{place.url(q=words, state=state)}"{" aria-current=true" if state == found.query.state else ""}>{mark}{word} <b>{count(number)}</b></a>'
        for word, state, number, mark in [("All", None, found.total, ""), *(one for one in choices if one[2])]
    )
    return (
        f'<div class="toolbar"><form class="searchbox" action="{place.url()}" role="search">{icon("search")}'
        f'<input name="q" id="search" value="{text(search)}" placeholder="name  tag:team=post  state:failed" '
        'aria-label="Search runs" autocomplete="off" spellcheck="false"><kbd>/</kbd></form>'
        f'<nav class="chips" id="chips" data-live>{chips}</nav></div>'
    )


def _heads(place: Place, found: RunList, search: str) -> str:
    heads = []
    for key, word, kind in _COLUMNS:
        if not key:
            heads.append(f'<th class="{kind}">{word}</th>')
            continue
        is_sorted = found.query.sort == key
        sort = key if is_sorted and found.query.is_descending else f"-{key}"
        arrow = {False: "", True: " ▾" if found.query.is_descending else " ▴"}[is_sorted]
        aria = f' aria-sort="{"descending" if found.query.is_descending else "ascending"}"' if is_sorted else ""
        url = place.url(q=search or None, state=found.query.state, sort=sort)
        heads.append(f'<th class="{kind}"{aria}><a href="{url}">{word}{arrow}</a></th>')
    return "".join(heads)


def _row(place: Place, row: RunRow, now: float) -> str:
    url = place.url("runs", row.run)
    lead = _reason(row)
    if row.incidents:
        link = place.url("runs", row.run, "incidents", row.incidents[0].key)
        ended = f'<span class="trouble">{icon("critical")}<span>{text(row.end_sentence)}</span></span>'
        line = ended if row.end_sentence else incident_line(row.incidents[0], len(row.incidents) - 1)
        lead = f'<a class="plain" href="{link}">{line}</a>'
    seen = NOTHING if row.seen_at is None else age(max(0.0, now - row.seen_at))
    return (
        f'<tr class="{"" if row.state in _MOVING else "still"}"><td class="pick"><input type="checkbox" name="run" value="{text(row.run)}" aria-label="Select {text(row.run)}">'
        f'</td><td class="name"><a href="{url}"><bdi>{text(row.run)}</bdi></a><span class="tags">'
        f'{tag_list(sorted(row.tags.items()))}</span></td><td class="state">{run_pill(row)}</td>'
        f'<td class="progress">{progress(row)}</td><td class="loss">{_loss(row)}</td><td class="n wide">{measure(row.learning_rate)}</td>'
        f'<td class="n wide">{speed(row)}</td><td class="why">{lead}</td><td class="n seen">{seen}</td></tr>'
    )


def _loss(row: RunRow) -> str:
    """Return the newest loss and its sparkline, or words for a run without one."""
    if not row.sparkline.points:
        return f'<span class="dim">{"no row yet" if row.state == RunState.PENDING else "no loss logged"}</span>'
    bad = " bad" if row.loss is not None and not math.isfinite(row.loss) else ""
    note = f'<span class="dim">{row.loss_note}</span>' if row.loss_note else ""
    return f'<span class="value{bad}">{measure(row.loss)}</span>{svg.sparkline(row.sparkline)}{note}'


def _reason(row: RunRow) -> str:
    """Return the first line of the reason of a state, with the mark of a state that needs attention."""
    if not row.reason:
        return ""
    mark = icon(row.state) if row.state in {RunState.STALLED, RunState.FAILED} else ""
    return f'<span class="dim reason">{mark} {text(row.reason.partition(chr(10))[0])}</span>'


def speed(row: RunRow) -> str:
    """Return the newest speed of a run with its unit. A run that makes no steps, such as a stalled one, has none."""
    if row.speed is None or row.speed_name is None or row.state in _STILL:
        return NOTHING
    return f'{short(row.speed)} <span class="unit">{SPEED_UNITS[row.speed_name]}</span>'


def progress(row: RunRow) -> str:
    """Return step and total, the time that is left or that the run took, and a bar."""
    kind = row.state or "unknown"
    done = NOTHING if row.step is None else count(row.step)
    if row.planned_steps is not None:
        done = f"{done} / {count(row.planned_steps)}"
    elif row.step is not None:
        done = f"step {done}"
    if row.eta_seconds is not None and row.state in _MOVING:
        right = f"{duration(row.eta_seconds)} left"
    elif row.ended_at is not None and row.started_at is not None and row.state == RunState.COMPLETED:
        right = f"in {duration(max(0.0, row.ended_at - row.started_at))}"
    else:
        right = "" if row.share is None else percent(row.share)
    bar = svg.bar(row.share or 0.0, kind) if row.planned_steps else '<span class="norail"></span>'
    return f'<span class="figures"><span>{done}</span><span class="dim">{right}</span></span>{bar}'


def _compare_bar() -> str:
    return (
        '<div class="comparebar"><b id="selected"></b><span id="names" class="dim"></span>'
        '<button class="primary" id="compare">Compare <kbd>c</kbd></button>'
        '<button type="reset" id="clear">Clear</button></div>'
    )


def _pages(place: Place, found: RunList, search: str) -> str:
    pages = -(-found.selected // PAGE_RUNS)
    if pages <= 1:
        return ""
    query, sort = found.query, ("-" if found.query.is_descending else "") + found.query.sort
    links = [
        f'<a href="{place.url(q=search or None, state=query.state, sort=sort, page=number)}"'
        f"{' aria-current=true' if number == query.page else ''}>{number + 1}</a>"
        for number in range(pages)
    ]
    return f'<nav class="pages">{count(found.selected)} runs {"".join(links)}</nav>'


def _empty() -> str:
    return (
        f'<div class="panel blank" id="empty" data-live>{icon("running")}<strong>Nothing has been stored here</strong>'
        "<p>Start a training with a monitor, or look at a demo.</p><code>rankscope demo</code></div>"
    )
