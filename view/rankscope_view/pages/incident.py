"""The incidents of a run, and the page of one: what happened, where it began, in which order, and the SQL."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from rankscope_storage.api.summaries import AnomalyRow
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.rule_names import RULES_OF_RUNS, RUN_FAILED, SLOW_RANK
from rankscope_view.data.incidents import STATE_TEXTS, AnomalyGroup, Incident, Story, happening, sentence_of, window
from rankscope_view.data.runs import RunRow
from rankscope_view.pages.format import NONFINITE, NOTHING, count, kind_words, measure, text, utc
from rankscope_view.pages.parts import (
    Place,
    close_command,
    fact_table,
    icon,
    incident_line,
    panel,
    run_document,
    tensor_name,
)

_SHOWN: Final = 8
_MOST_GROUPS: Final = 200
_MOST_SPANS: Final = 8


def list_page(place: Place, row: RunRow, found: Sequence[Incident]) -> str:
    """Return all incidents of a run, open ones first."""
    head = '<tr><th>Incident<th class="n">step<th class="n rare">attempt<th class="n rare">events<th class="rare">opened, UTC<th>state</tr>'
    rows = "".join(_row(place, row.run, one) for one in found)
    is_open, command = any(one.is_open for one in found), close_command(place, row.run)
    close = f'<p class="empty">Close all open ones: {command}</p>' if is_open and place.store else ""
    table = f'<table class="list">{head}{rows}</table>' if rows else '<p class="empty">None is stored for this run.</p>'
    body = f'<div id="list" data-live>{close}{panel("Incidents", table, kind="scrolls")}</div>'
    return run_document(place, row, "Incidents", body, page="incidents")


def _row(place: Place, run: str, one: Incident) -> str:
    url = place.url("runs", run, "incidents", one.key)
    return (
        f'<tr class="{"" if one.is_open else "off"}"><td><a href="{url}">{incident_line(one)}</a></td><td class="n">{count(one.step)}</td>'
        f'<td class="n rare">{count(one.attempt)}</td><td class="n rare">{count(one.events)}</td>'
        f'<td class="rare">{utc(one.opened_at, "%Y-%m-%d %H:%M:%S")}</td><td>{last_state(one)}</td></tr>'
    )


def last_state(one: Incident) -> str:
    """Return whether an incident is open, and its last state, with the user and the note of its end."""
    state = one.states[-1][1] if one.states else "opened"
    return f"{'open, ' if one.is_open else ''}{text(' by '.join(filter(None, (STATE_TEXTS.get(state, state), one.closed_by))))}"


def sql(one: Incident, steps: tuple[int, int]) -> str:
    """Return the statement that lists the anomalies of the attempt of an incident in `steps`, the first cause first."""
    first, last = steps
    attempt = "attempt IS NULL" if one.attempt is None else f"attempt = {one.attempt}"
    return (
        "SELECT step, rank, rule, kind, tensor, op, value, baseline, threshold\nFROM events\n"
        f"WHERE run = {sql_string(one.run)} AND {attempt} AND type = 'anomaly'\n"
        f"  AND step BETWEEN {first} AND {last}\nORDER BY step, micro_step NULLS LAST, call_id NULLS LAST, rank"
    )


def sentence(one: Incident) -> str:
    """Return the heading of an incident as HTML."""
    if one.tensor is None:
        return text(sentence_of(one))
    where, what = "" if one.rank is None else f"Rank {one.rank}: ", happening(one)
    return f"{where}{text(what.split(' ')[0])} of {tensor_name(one.tensor)} {text(' '.join(what.split(' ')[1:]))}{one.place}"


def page(place: Place, row: RunRow, one: Incident, story: Story) -> str:
    """Return the page of one incident."""
    severity = "critical" if one.is_critical else "warning"
    word = "Critical" if one.is_critical else "Warning"
    words = "open" if one.is_open else last_state(one)
    state = f"{words[:1].upper()}{words[1:]}"
    kind = "pending" if one.is_open else "completed"
    ranks = f"Ranks concerned: {rank_list(story.ranks)}." if story.ranks else ""
    near = f" in steps {count(story.steps[0])} to {count(story.steps[1])}" if story.total >= one.events else ""
    number = 0 if one.rule in RULES_OF_RUNS else max(story.total, one.events)
    first = f"First of {count(number)} anomalies{near}. " if number > 1 else "1 anomaly. " * number
    about = f"{first}{_growth(story)}{ranks} {text(one.cause or '')}"
    head = (
        f'<div class="runhead incidenthead" id="incident" data-live><div class="title"><span class="pill {"failed" if one.is_critical else "pending"}">{icon(severity)}{word}</span>'
        f'<span class="pill {kind}">{icon(kind)}{state}</span>{_beside(place, one.run, story.beside)}</div><h1>{sentence(one)}</h1><p class="reason">{about}</p></div>'
    )
    body = (
        f'{head}<div class="columns" id="run" data-run="{text(one.run)}" data-fixed="1"><div>{_evidence(one, story)}{_order(one, story)}{_sql(one, story.steps)}</div>'
        f"<aside>{_actions(place, one, story)}{_first_cause(one)}{_timeline(one, story)}{_not_judged(story.not_measured)}</aside></div>"
    )
    return run_document(place, row, "Incident", body, page="incident", tab="incidents", last=f"Incident {one.key}")


def _beside(place: Place, run: str, beside: tuple[str | None, str | None]) -> str:
    """Return links to the incidents before and after this one."""
    words = (("prev", "Previous", "["), ("next", "Next", "]"))
    links = [
        f'<a class="button" rel="{rel}" href="{place.url("runs", run, "incidents", key)}">{word} <kbd>{sign}</kbd></a>'
        for key, (rel, word, sign) in zip(beside, words, strict=True)
        if key is not None
    ]
    return f'<span class="aside">{"".join(links)}</span>' if links else ""


def _evidence(one: Incident, story: Story) -> str:
    charts = []
    first, last = window(one)
    span = f'data-from="{first}" data-to="{max(last, story.steps[1])}" data-axis="attempt"'
    legend = '<span class="legend"></span>'
    if one.tensor is not None and one.kind:
        op = one.op if one.op in {"norm", "mean", "min", "max"} else "norm"
        known = text(f'{{"name": "{op}", "log": true, "fixed": true, "zero": false, "tensor": true}}')
        plot = f'<div class="plot" data-chart="{known}" data-tensor="{text(one.tensor)}" data-kind="{text(one.kind)}" data-attempt="{one.attempt or 0}" {span} tabindex="0"></div>'
        note = f"{text(kind_words(one.kind))}: {op}, log"
        charts.append(panel("Evidence", plot, note=note, aside=legend, kind="chartbox"))
    known = text('{"name": "loss", "log": false, "fixed": true, "zero": false}')
    plot = f'<div class="plot" data-chart="{known}" {span} tabindex="0"></div>'
    charts.append(panel("Loss", plot, note="mean of the ranks that logged it", aside=legend, kind="chartbox"))
    return "".join(charts)


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as `0, 1, 4–7`; of many, the first."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [
        str(low) if low == high else f"{low}{', ' if high == low + 1 else '–'}{high}"
        for low, high in spans[:_MOST_SPANS]
    ]
    return ", ".join(words) + ("…" if len(spans) > _MOST_SPANS else "")


def _order(one: Incident, story: Story) -> str:
    """Return the groups of anomalies in causal order, with the first ones visible and the others folded."""
    if not story.groups:
        return panel("Causal order", '<p class="empty">No anomaly of this incident is stored.</p>')
    head = '<tr><th class="n">step<th class="n">rank<th>first tensor<th>what<th class="rare">further, of the same layer</tr>'
    rows = [_group(one, group) for group in story.groups]
    shown = min(len(rows), _SHOWN)
    note = f"causes before their effects; {shown} of {count(len(rows))} shown: the first of each layer and rule, of {count(story.total)} anomalies"
    table = f'<table class="list causal">{head}{"".join(rows[:_SHOWN])}</table>'
    others = "".join(rows[_SHOWN:_MOST_GROUPS])
    if others:
        word = f"{count(min(len(rows), _MOST_GROUPS) - _SHOWN)} more"
        table += f'<details class="further"><summary>{word}</summary><table class="list causal">{head}{others}</table></details>'
    return panel("Causal order", table, note=note, kind="scrolls")


def _group(one: Incident, group: AnomalyGroup) -> str:
    row = group.first
    is_first = (row.step, row.rank, row.tensor, row.rule) == (one.step, one.rank, one.tensor, one.rule)
    name = text(row.op or NOTHING) if row.tensor is None else tensor_name(row.tensor)
    more = ""
    if group.others:
        ranks = f" on rank{'' if len(group.ranks) == 1 else 's'} {rank_list(group.ranks)}" if group.ranks else ""
        tensors = f", {count(group.tensors)} tensors" if group.tensors > 1 else ""
        more = f"{count(group.others)} more{tensors}{ranks}"
    bad = " bad" if row.op in NONFINITE else ""
    return (
        f'<tr class="{"hot" if is_first else ""}"><td class="n">{count(row.step)}</td><td class="n">{count(row.rank)}</td><td>{name}</td>'
        f'<td class="what{bad}" title="{text(row.rule or "")}">{_what(row)}{" · first cause" if is_first else ""}</td><td class="rare dim">{more}</td></tr>'
    )


def _what(row: AnomalyRow) -> str:
    """Return what a rule found: NaN with its number of elements, or the value against its baseline."""
    if row.op in NONFINITE:
        return f"{NONFINITE[row.op]} in {_elements(row.value)}"
    if row.value is not None and row.baseline:
        return f"{text(row.op or 'value')} {measure(row.value)}, {measure(row.value / row.baseline)}× baseline"
    return f"{text(row.op or row.rule or '')} {measure(row.value)}"


def _elements(number: float | None) -> str:
    return "some elements" if number is None else f"{count(number)} element{'' if number == 1 else 's'}"


def _sql(one: Incident, steps: tuple[int, int]) -> str:
    copy = '<button class="copy" data-copy="sql">Copy</button>'
    statement = f'<pre class="sql" id="sql">{text(sql(one, steps)).replace(chr(92) + "n", chr(10))}</pre>'
    return panel("SQL behind this page", statement, note="DuckDB", aside=copy)


def _actions(place: Place, one: Incident, story: Story) -> str:
    first, last = story.steps
    store = ["--store", place.store] if place.store else []
    command = text(shlex.join(["rankscope", "anomalies", one.run, "--steps", f"{first}:{last}", *store]))
    lines = []
    if one.rule == RUN_FAILED:
        safe = story.safe_checkpoint
        newest = "" if safe is None else f" The newest checkpoint before it is that of step {count(safe)}."
        lines.append(f"<b>Repair the cause of the failure:</b> {text(happening(one).rstrip('.'))}.{newest}")
    elif one.rank is not None and one.step is not None and one.rule not in {SLOW_RANK, *RULES_OF_RUNS}:
        lines.append(
            f"<b>Look at the batch of rank {one.rank} at step {count(one.step)}.</b> If one rank alone is concerned before the reduction, its data or its hardware is the cause."
        )
    if one.op in NONFINITE or story.growth:
        lines.append(_resume(one, story))
    lines.append(
        f'<b>List all anomalies.</b> <button class="copy" data-text="{command}">Copy</button><code>{command}</code>'
    )
    if one.tensor is not None and one.kind:
        url = place.url("runs", one.run, "tensors", kind=one.kind, tensor=one.tensor)
        lines.append(f'<b>See how it spread.</b> <a href="{url}">On the heat map</a>')
    if one.is_open and place.store:
        lines.append(f"<b>Close it</b> once you know the cause. {close_command(place, one.run, one.number)}")
    items = "".join(f"<li>{line}</li>" for line in lines)
    return panel("Next actions", f'<div class="prose actions"><ol>{items}</ol></div>')


def _resume(one: Incident, story: Story) -> str:
    """Return which checkpoint is safe and which is not."""
    if story.safe_checkpoint is None:
        return f"<b>Resume from a checkpoint before step {count(one.step or 0)}.</b> No earlier one is stored in this attempt."
    bad = " Later ones contain the effects."
    if story.bad_checkpoint is not None:
        bad = f" That of step {count(story.bad_checkpoint)} is from after it."
    return f"<b>Resume from the checkpoint of step {count(story.safe_checkpoint)}.</b> It is the newest one before the first sign.{bad}"


def _first_cause(one: Incident) -> str:
    facts = [
        ("rank", count(one.rank)),
        ("tensor", NOTHING if one.tensor is None else tensor_name(one.tensor)),
        ("kind", text(kind_words(one.kind)) if one.kind else NOTHING),
        ("step", f"{count(one.step)}, attempt {one.attempt or 0}"),
        ("rule", text(one.rule or NOTHING)),
    ]
    if one.op in NONFINITE:
        facts.append((f"{NONFINITE[one.op or '']} elements", NOTHING if one.value is None else count(one.value)))
    else:
        facts += [("statistic", text(one.op or NOTHING)), ("value", measure(one.value))]
    facts += [("baseline", measure(one.baseline)), ("threshold", measure(one.threshold))]
    return panel("First cause", fact_table(fact for fact in facts if fact[1] != NOTHING))


def _growth(story: Story) -> str:
    """Return a sentence about the growth of the tensor before its first cause; empty without any."""
    rows = [row for row in story.growth if row.value is not None and row.baseline]
    if not rows:
        return ""
    ratios = [
        f"{measure((row.value or 0) / (row.baseline or 1))}× its baseline at step {count(row.step or 0)}"
        for row in (rows[0], rows[-1])
    ]
    return f"It grew before: {', '.join(dict.fromkeys(ratios))}. "


def _timeline(one: Incident, story: Story) -> str:
    rows = "".join(
        f'<tr><td class="dim" title="{utc(moment.at, "%Y-%m-%d %H:%M:%S UTC")}">{utc(moment.at)}</td><td>{icon(moment.icon)}</td><td>{text(moment.text)}</td></tr>'
        for moment in story.moments
    )
    places = "".join(f"<p><code>{text(where)}</code></p>" for where in one.where)
    return panel("Timeline", f'<table class="events">{rows}</table><div class="prose">{places}</div>', note="UTC")


def _not_judged(kinds: Sequence[str]) -> str:
    lines = "".join(f"<p><b>{text(kind.capitalize())}.</b> No rows are stored near this step.</p>" for kind in kinds)
    return panel("Not judged", f'<div class="prose">{lines}</div>') if lines else ""
