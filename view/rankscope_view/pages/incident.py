"""The incidents of a run, and the page of one: what happened, where it began, in which order, and the SQL."""

from __future__ import annotations

import shlex
from typing import Final

from rankscope_storage.api.summaries import AnomalyRow
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.rule_names import RULES_OF_RUNS, RUN_FAILED, SLOW_RANK
from rankscope_view.data.incidents import Incident, Story, window
from rankscope_view.data.runs import RunRow
from rankscope_view.pages.format import NONFINITE, count, measure
from rankscope_view.pages.rendering import Place, rank_list, render

_SHOWN: Final = 8
_MOST_GROUPS: Final = 200


def page(place: Place, row: RunRow, one: Incident, story: Story) -> str:
    """Return the page of one incident."""
    first, last = story.steps
    store = ["--store", place.store] if place.store else []
    return render(
        "incident.html",
        place=place,
        row=row,
        one=one,
        story=story,
        about=_about(one, story),
        window=window(one),
        shown=_SHOWN,
        most_groups=_MOST_GROUPS,
        what_of=_what,
        statement=sql(one, story.steps),
        command=shlex.join(["rankscope", "anomalies", one.run, "--steps", f"{first}:{last}", *store]),
        failure=one.rule == RUN_FAILED,
        concerns_batch=None not in (one.rank, one.step) and one.rule not in {SLOW_RANK, *RULES_OF_RUNS},
    )


def _about(one: Incident, story: Story) -> str:
    """Return how many anomalies the incident has, whether its tensor grew before, its ranks and its cause."""
    near = f" in steps {count(story.steps[0])} to {count(story.steps[1])}" if story.total >= one.events else ""
    number = 0 if one.rule in RULES_OF_RUNS else max(story.total, one.events)
    first = f"First of {count(number)} anomalies{near}. " if number > 1 else "1 anomaly. " * number
    ranks = f"Ranks concerned: {rank_list(story.ranks)}." if story.ranks else ""
    return f"{first}{_growth(story)}{ranks} {one.cause or ''}"


def sql(one: Incident, steps: tuple[int, int]) -> str:
    """Return the statement that lists the anomalies of the attempt of an incident in `steps`, the first cause first."""
    first, last = steps
    attempt = "attempt IS NULL" if one.attempt is None else f"attempt = {one.attempt}"
    return (
        "SELECT step, rank, rule, kind, tensor, op, value, baseline, threshold\nFROM events\n"
        f"WHERE run = {sql_string(one.run)} AND {attempt} AND type = 'anomaly'\n"
        f"  AND step BETWEEN {first} AND {last}\nORDER BY step, micro_step NULLS LAST, call_id NULLS LAST, rank"
    )


def _what(row: AnomalyRow) -> str:
    """Return what a rule found: NaN with its number of elements, or the value against its baseline."""
    if row.op in NONFINITE:
        return f"{NONFINITE[row.op]} in {_elements(row.value)}"
    if row.value is not None and row.baseline:
        return f"{row.op or 'value'} {measure(row.value)}, {measure(row.value / row.baseline)}× baseline"
    return f"{row.op or row.rule or ''} {measure(row.value)}"


def _elements(number: float | None) -> str:
    return "some elements" if number is None else f"{count(number)} element{'' if number == 1 else 's'}"


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
