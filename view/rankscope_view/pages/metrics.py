"""Charts of all scalars that a run logged, in groups that can be folded and searched. The scripts of the page draw them.

A chart is drawn when it comes into view, so that hundreds of names cost nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rankscope_view.data.metrics import HARDWARE, MONITOR, SCALAR_TITLES, UNGROUPED, Metric
from rankscope_view.pages.format import count, text
from rankscope_view.pages.parts import icon, panel

_MOST_OPEN: Final = 12
"""Number of charts up to which groups are open at first."""

_LAST: Final = (HARDWARE, MONITOR)


def metric_groups(metrics: Iterable[Metric], titles: Mapping[str, str], *, compare: bool = False) -> str:
    """Return the groups of charts of `metrics`, and the empty forms of a chart and a group for names that appear later.

    `titles` has the titles of the charts above, by name.
    """
    ordered = sorted(
        metrics,
        key=lambda one: (_LAST.index(one.group) + 1 if one.group in _LAST else 0, one.group != UNGROUPED, one.group),
    )
    groups, drawn = [], 0
    for group, found in itertools.groupby(ordered, key=lambda one: one.group):
        listed = list(found)
        is_open = group not in _LAST and drawn + len(listed) <= _MOST_OPEN
        drawn += len(listed) if is_open else 0
        groups.append(_group(group, [_chart(one.name, _keys(one), compare=compare) for one in listed], is_open=is_open))
    search = f'<label class="searchbox">{icon("search")}<input id="metricsearch" placeholder="Search {len(ordered)} metrics" aria-label="Search metrics"></label>'
    forms = f'<template id="metricforms" data-titles="{text(json.dumps(dict(titles)))}">{_group("", [_chart("", [])], is_open=True)}</template>'
    hide = "" if ordered else " hidden"
    return f'<div id="metrics"{hide}><div class="toolbar">{search}</div>{"".join(groups)}</div>{forms}'


def _group(name: str, charts: Sequence[str], *, is_open: bool) -> str:
    number = f"{count(len(charts))} chart{'' if len(charts) == 1 else 's'}"
    return (
        f'<details class="more" data-group="{text(name)}"{" open" if is_open else ""}><summary><bdi>{text(name)}</bdi> '
        f'<span class="dim">{number}</span></summary><div class=grid2>{"".join(charts)}</div></details>'
    )


def _keys(metric: Metric) -> list[str]:
    return [f"{metric.stored}{labels or ''}" for labels in metric.labels]


def _chart(name: str, keys: Sequence[str], *, compare: bool = False) -> str:
    words = SCALAR_TITLES.get(name, name)
    known = {"name": name, "log": False, "fixed": False, "zero": False, "keys": keys, "compare": compare}
    save = "" if compare else '<button class="save" title="Save as CSV or PNG" aria-label="Save">⤓</button>'
    body = (
        f'<div class="plot" data-chart="{text(json.dumps(known))}" tabindex="0" role="group" aria-label="{text(words)}">'
        "<noscript>The chart needs scripts.</noscript></div>"
    )
    title, aside = f'<bdi title="{text(name)}">{text(words)}</bdi>', f'<span class="legend"></span>{save}'
    return panel(title, body, aside=aside, kind="chartbox metric")
