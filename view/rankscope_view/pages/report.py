"""The report of one run: its state in sentences, then the numbers, curves, incidents, events and configuration."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_contract.model.redaction import redacted_text
from rankscope_storage.base.escaping import sql_string
from rankscope_view.data.curves import Axis, Curve
from rankscope_view.data.detail import RunDetail
from rankscope_view.data.events import EventLine, EventLog, Group
from rankscope_view.data.history import LOSS
from rankscope_view.data.incidents import STATE_TEXTS, Incident
from rankscope_view.data.ranks import RankTable
from rankscope_view.data.summary import Summary, Trend
from rankscope_view.pages import incident as incident_page
from rankscope_view.pages import ranks as rank_page
from rankscope_view.pages.format import NOTHING, count, duration, measure, text, utc
from rankscope_view.pages.parts import fact_table, incident_line, run_pill, segmented, state_word, tag_list
from rankscope_view.pages.run import AXES, ChartChoice, chart_panel, event_rows
from rankscope_view.pages.sections import sections
from rankscope_view.pages.settings import configuration

MOST_INCIDENTS: Final = 50
_BLOCKS: Final = ("progress", "loss", "parameters", "time", "speed", "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContent:
    """The data of a report. `curves` are those that the document shows without scripts, by the name of the scalar."""

    summary: Summary
    incidents: Sequence[Incident]
    ranks: RankTable
    log: EventLog
    curves: Mapping[str, Curve]
    axes: Sequence[Axis]  # the first one is shown
    choice: ChartChoice
    made_at: float  # UTC seconds
    source: str  # name of the store

    @property
    def detail(self) -> RunDetail:
        """Return the numbers of the page of the run."""
        return self.summary.detail


def body(content: ReportContent) -> str:
    """Return the report as HTML, without the head of the document."""
    found = content.detail
    parts = [
        _head(content),
        _section("Summary", _summary(content.summary)),
        _section("Advice", _advice(content.summary)),
        _section("Incidents", _incidents(content.incidents)),
        _section("Ranks", _ranks(content)),
        _section("Curves", _curves(content)),
        f'<section class="grid2"><div>{_events(content.log)}</div><div class="plain">{configuration(found, is_report=True)}</div></section>',
        _section("Queries", _queries(content)),
    ]
    return "".join(parts)


def _section(title: str, inner: str) -> str:
    return f'<section><h2 class="part">{title}</h2>{inner}</section>' if inner else ""


def _head(content: ReportContent) -> str:
    row = content.detail.row
    made = f"Report of {utc(content.made_at, '%d %b %Y, %H:%M')} UTC · works offline"
    note = f'<p class="note">{text(row.note)}</p>' if row.note else ""
    return (
        f'<div class="runhead"><div class="title"><h1><bdi>{text(row.run)}</bdi></h1>{run_pill(row)}'
        f'{tag_list(sorted(row.tags.items()))}<span class="aside dim">{made}</span></div>'
        f'<p class="lead">{" ".join(sentences(content))}</p>{note}</div>'
    )


def sentences(content: ReportContent) -> Iterator[str]:
    """Yield the sentences at the top of the report as HTML: progress, loss, first cause, slow ranks."""
    ended = content.detail.row.end_sentence
    if ended:
        yield text(ended)
    yield _progress(content.detail)
    yield _loss(content.summary)
    slow = {row.rank for row in content.ranks.rows if row.is_slow}
    # A sentence below names a slow rank, so its incident is not counted a second time.
    if not ended:
        others = [one for one in content.incidents if one.tensor is not None or one.rank not in slow]
        yield from _first_incident(others) if others or not content.incidents else ()
    for row in content.ranks.rows:
        if row.slow is not None:
            yield f"Rank {row.rank} {row.slow.words}."
            break


def _progress(found: RunDetail) -> str:
    row = found.row
    if row.step is None:
        return "No step is stored."
    end = row.seen_at if row.ended_at is None and row.is_live else row.ended_at
    spent = f" in {duration(max(0.0, end - row.started_at))}" if row.started_at is not None and end is not None else ""
    attempts = f"{' and' if spent else ' in'} {len(found.restarts) + 1} attempts" if found.restarts else ""
    if row.state in {RunState.FAILED, RunState.STOPPED} and not row.end_sentence:
        planned = f" of {count(row.planned_steps)}" if row.planned_steps else ""
        reason = f": {text(row.reason.rstrip('.'))}" if row.reason else ""
        return f"{state_word(row.state)} at step {count(row.step)}{planned}{spent}{attempts}{reason}."
    share = f"{count(row.step)} of {count(row.planned_steps)} steps" if row.planned_steps else f"Step {count(row.step)}"
    return f"{share}{spent}{attempts}."


def _loss(found: Summary) -> str:
    losses = found.losses
    if losses.current is None:
        return "The run logs no loss."
    if losses.last_finite is None:
        return f"All {count(losses.rows)} losses are NaN or infinite."
    trend = f" and {losses.trend}" if losses.trend in {Trend.FALLING, Trend.RISING, Trend.STEADY} else ""
    if math.isfinite(losses.current):
        late = f", {found.detail.row.loss_note}" if found.detail.row.is_loss_late else ""
        return f"Loss {measure(losses.current)}{trend}{late}."
    return f"Loss {measure(losses.current)}; the last finite loss is {measure(losses.last_finite)} at step {count(losses.last_finite_step or 0)}."


def _summary(found: Summary) -> str:
    listed = {section.title: section.rows for section in sections(found)}
    blocks = "".join(
        _block(name, [row for row in listed[name] if row[0] not in {"advice", "end"} and row[1] != NOTHING])
        for name in _BLOCKS
        if name in listed
    )
    return f'<div class="blocks">{blocks}</div>'


def _advice(found: Summary) -> str:
    """Return the advice about the loss, then the tuning hints, each side with its name once."""
    lines = [f"<p>{text(one.text)}</p>" for one in found.detail.advice]
    for side, hints in itertools.groupby(found.hints, key=lambda hint: hint.side):
        for number, hint in enumerate(hints):
            name = "" if number else f"<b>{text(side.capitalize())}.</b> "
            observed = f"{hint.observation[:1].upper()}{hint.observation[1:]}"
            lines.append(f"<p>{name}{text(observed)}: {text('; '.join(hint.actions))}.</p>")
    return f'<div class="panel prose hints">{"".join(lines)}</div>' if lines else ""


def _block(name: str, rows: Sequence[tuple[str, str]]) -> str:
    facts = fact_table((text(label), text(value)) for label, value in rows)
    return f'<div class="plain"><h3>{name.capitalize()}</h3>{facts}</div>'


def _first_incident(found: Sequence[Incident]) -> Iterator[str]:
    if not found:
        yield "No incident is stored."
        return
    first = found[0]
    more = f", and {count(len(found) - 1)} more incident{'' if len(found) == 2 else 's'}" if len(found) > 1 else ""
    ended = "" if first.is_open else f" ({incident_page.last_state(first)})"
    yield f"{incident_page.sentence(first)}{ended}{more}."


def _curves(content: ReportContent) -> str:
    found, choice = content.detail, content.choice
    if not content.curves:
        return '<p class="empty">No curve is stored for this run.</p>'
    main = chart_panel(found, LOSS, content.curves[LOSS], choice, is_main=True) if LOSS in content.curves else ""
    more = [name for name in content.curves if name != LOSS]
    grid = "".join(chart_panel(found, name, content.curves[name], choice, is_main=False) for name in more)
    return (
        f'{_toolbar(content)}<div id="run" data-run="{text(found.row.run)}">{main}<div class="grid2">{grid}</div></div>'
        '<p class="dim noscript">Charts can be zoomed if the browser runs the scripts of this file.</p>'
    )


def _toolbar(content: ReportContent) -> str:
    """Return the choices of axis, smoothing, scale and range. They have an effect only with scripts."""
    words = {axis: word for axis, word, _ in AXES}
    axes = [(axis.value, words[axis], "#") for axis in content.axes]
    chosen = segmented("Axis", axes, content.axes[0].value, "axis") if len(axes) > 1 else ""
    return (
        f'<div class="toolbar charts" id="toolbar">{chosen}'
        f"{segmented('', [('none', 'Raw', '#'), ('ema', 'EMA 0.9', '#')], 'ema', 'smooth')}"
        f"{segmented('', [('', 'Linear', '#'), ('1', 'Log', '#')], '', 'log')}"
        '<a class="button" id="cut" href="#">Cut outliers</a><span class="dim">Drag in a chart to zoom.</span>'
        '<a class="button off" id="whole" href="#">Reset zoom <kbd>0</kbd></a></div>'
    )


def _incidents(found: Sequence[Incident]) -> str:
    items = "".join(_incident(one) for one in found[:MOST_INCIDENTS])
    left = len(found) - MOST_INCIDENTS
    more = f'<p class="empty">{count(left)} more incidents are in the store.</p>' if left > 0 else ""
    return f'<div class="panel">{items}{more}</div>' if items else '<p class="empty">None is stored for this run.</p>'


def _incident(one: Incident) -> str:
    facts = [f"rule {text(one.rule)}" if one.rule else ""]
    known = {"value": one.value, "baseline": one.baseline, "threshold": one.threshold}
    facts += [f"{name} {measure(value)}" for name, value in known.items() if value is not None]
    facts += [f"{count(one.events)} anomalies" if one.events > 1 else ""]
    facts += [f"ranks {incident_page.rank_list(one.ranks)}" if len(one.ranks) > 1 else ""]
    facts += [f"attempt {one.attempt}" if one.attempt else ""]
    facts += [f"{text(STATE_TEXTS.get(state, state))} {utc(at, '%d %b %H:%M:%S')}" for at, state in one.states if at]
    cause = f'<p class="meta">{text(one.cause)}</p>' if one.cause else ""
    meta = " · ".join(fact for fact in facts if fact)
    return f'<div class="item">{incident_line(one)}<div class="meta">{meta}</div>{cause}</div>'


def _ranks(content: ReportContent) -> str:
    found = list(rank_page.verdicts(content.ranks, content.made_at, is_live=content.detail.row.is_live))
    return "".join(found[:4])


def _events(log: EventLog) -> str:
    total = sum(number for group, number in log.counts.items() if group is not Group.STEP)
    left = total - len(log.lines)
    older = f"; {count(left)} older ones are in the store" if left else ""
    lines = log.lines[::-1]
    chosen = condensed([line for line in lines if line.group is not Group.EVALUATION])
    rows = event_rows(chosen) if chosen else '<p class="empty">No event is stored for this run.</p>'
    every = f"<details><summary>All {count(len(lines))} events</summary>{event_rows(lines)}</details>" if lines else ""
    return f'<h2 class="part">Events <span class="dim">UTC{older}</span></h2>{rows}{every}'


def condensed(lines: Sequence[EventLine]) -> list[EventLine]:
    """Return the lines of an event log, with one line for consecutive ones that differ only in their steps."""
    found = []
    for _, same in itertools.groupby(lines, key=lambda line: (line.attempt, line.group, line.severity, _text(line))):
        first, *others = same
        last = others[-1].step if others else None
        until = f", until step {count(last)}" if last is not None else ""
        more = f" ({count(len(others) + 1)} times{until})" if others else ""
        found.append(replace(first, text=first.text + more))
    return found


def _text(line: EventLine) -> str:
    """Return the text of a line without its step, which messages of checkpoints contain."""
    return line.text if line.step is None else re.sub(rf"\b{line.step}\b", "", line.text)


def _queries(content: ReportContent) -> str:
    run = sql_string(content.detail.row.run)
    statements = (
        f"SELECT * FROM scalar_history WHERE run = {run} AND name = 'loss'",
        f"SELECT * FROM events WHERE run = {run} ORDER BY ts",
        f"SELECT * FROM runs WHERE run = {run}",
    )
    lines = ";\n".join(text(statement) for statement in statements)
    return (
        f'<details><summary>SQL behind this report</summary><pre class="sql">{lines};</pre></details>'
        f'<p class="dim">Made from {text(redacted_text(content.source))}. Every number is a stored value or is derived from stored values.</p>'
    )
