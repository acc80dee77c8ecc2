"""The page of all tensors of a run: a heat map over the steps, and one tensor below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.kinds import OPS
from rankscope_storage.api.summaries import AnomalyRow
from rankscope_view.data.curves import Curve
from rankscope_view.data.grid import Order, TensorKinds
from rankscope_view.data.runs import RunRow
from rankscope_view.data.tensor import MOST_FIRINGS, FiringGroup, TensorDetail, firing_groups
from rankscope_view.pages import svg
from rankscope_view.pages.format import NONFINITE, NOTHING, count, kind_words, measure, text
from rankscope_view.pages.parts import Place, fact_table, icon, panel, run_document, segmented, tensor_name

_RANKS: Final = 64
_MOST_HISTOGRAMS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChoice:
    """Choices of the reader, which the address contains. `tensor` is the one below the heat map."""

    kind: str
    op: str
    is_relative: bool
    order: Order
    rank: int | None
    search: str
    tensor: str | None
    rows: str | None
    columns: str | None

    def url(self, place: Place, run: str, **changes: object) -> str:
        """Return the address of the page with these choices and `changes`."""
        values: dict[str, object] = {
            "kind": self.kind,
            "op": self.op,
            "absolute": None if self.is_relative else 1,
            "order": None if self.order is Order.MODEL else self.order,
            "rank": self.rank,
            "q": self.search or None,
            "tensor": self.tensor,
            "rows": self.rows,
            "columns": self.columns,
        }
        return place.url("runs", run, "tensors", **(values | changes))


def page(
    place: Place, row: RunRow, kinds: TensorKinds, choice: TensorChoice | None, *,
    detail: TensorDetail | None, curve: Curve | None, leaving: Sequence[AnomalyRow],
    histograms: Mapping[str, Sequence[str]], histogram: str | None,
) -> str:  # fmt: skip
    """Return the page of the tensors of a run.

    `histograms` has the tensors with histograms by kind; `histogram` is the chosen one, as `kind:tensor`.
    """
    bins = _histogram(place, row.run, histograms, histogram, choice) if histograms else ""
    if choice is not None:
        number = kinds.counts.get(choice.kind, 0)
        body = (
            f'{_toolbar(place, row.run, kinds, choice)}<div class="columns"><div>{_map(choice, row.run, number)}'
            f"{_tensor(detail, curve) if detail and curve else ''}{bins}</div><aside>{_aside(place, row.run, choice, detail, leaving)}</aside></div>"
        )
    else:
        body = bins or (
            f'<div class="panel blank">{icon("unknown")}<strong>No statistics of tensors are stored for this run</strong>'
            "<p>Imported logs have none. A monitor measures gradients by default.</p></div>"
        )
    return run_document(place, row, "Tensors", body, page="tensors")


def _histogram(
    place: Place, run: str, found: Mapping[str, Sequence[str]], chosen: str | None, choice: TensorChoice | None
) -> str:
    """Return the heat map of the histograms of one tensor over the steps, with the choice of another one."""
    known = [(kind, tensor) for kind, tensors in found.items() for tensor in tensors]
    opened = None if choice is None else choice.tensor
    kind, tensor = next(
        (one for one in known if f"{one[0]}:{one[1]}" == chosen),
        next((one for one in known if one[1] == opened), known[0]),
    )
    options = "".join(
        f'<option value="{text(f"{one}:{name}")}"{" selected" if (one, name) == (kind, tensor) else ""}>{text(f"{kind_words(one)}, {name}")}</option>'
        for one, name in dict.fromkeys([(kind, tensor), *known[:_MOST_HISTOGRAMS]])
    )
    kept = {} if choice is None else {"kind": choice.kind, "op": choice.op, "tensor": choice.tensor or None}
    hidden = _hidden(kept)
    form = (
        f'<form class="chosen" action="{place.url("runs", run, "tensors")}#histogram"><select name="histogram" aria-label="Histogram">{options}</select>'
        f"{hidden}<noscript><button>Show</button></noscript></form>"
    )
    body = (
        f'<div class="heat" data-run="{text(run)}" data-source="histogram" data-kind="{text(kind)}" data-tensor="{text(tensor)}" tabindex="0" role="img" '
        f'aria-label="Histogram of {text(tensor)} by step"></div><noscript><p class="empty">The heat map needs scripts.</p></noscript>'
        '<div class="readout"><span>Colours: share of the elements in a bin at a step. Point at a cell for its value.</span></div>'
    )
    words = kind_words(kind)
    name = f"{text(words[:1].upper() + words[1:])}: histogram by step"
    return panel(name, body, note=tensor_name(tensor), aside=form, name="histogram")


def _hidden(kept: Mapping[str, str | None]) -> str:
    known = {name: value for name, value in kept.items() if value is not None}
    return "".join(f'<input type="hidden" name="{name}" value="{text(value)}">' for name, value in known.items())


def _toolbar(place: Place, run: str, kinds: TensorKinds, choice: TensorChoice) -> str:
    ops = "".join(f"<option{' selected' if op == choice.op else ''}>{op}</option>" for op in OPS)
    scales = [
        (value, word, choice.url(place, run, absolute=value or None))
        for value, word in (("1", "Absolute"), ("", "Against own median"))
    ]
    orders = [
        (value, word, choice.url(place, run, order=value or None, rows=None))
        for value, word in (("", "Layer"), (Order.PART, "Part"), (Order.WORST, "Worst first"))
    ]
    known = "".join(
        f'<option value="{text(kind)}"{" selected" if kind == choice.kind else ""}>{text(kind_words(kind))} ({count(number)})</option>'
        for kind, number in kinds.counts.items()
    )
    whole = choice.url(place, run, rows=None, columns=None)
    kept = {"absolute": None if choice.is_relative else "1", "order": choice.order or None, "tensor": choice.tensor}
    hidden = _hidden(kept)
    chosen = {rank: " selected" if rank == choice.rank else "" for rank in kinds.ranks}
    ranks = "".join(f'<option value="{rank}"{mark}>rank {rank}</option>' for rank, mark in chosen.items())
    return (
        f'<form class="toolbar" id="heatbar" action="{place.url("runs", run, "tensors")}"><label class="choice"><span class="label">Statistic</span>'
        f'<select name="op">{ops}</select></label><label class="choice"><span class="label">Of</span><select name="kind">{known}</select></label>'
        f'<label class="choice"><span class="label">Ranks</span><select name="rank"><option value="">all, farthest</option>{ranks}</select></label>'
        f"{segmented('', scales, '' if choice.is_relative else '1', 'absolute')}{segmented('Order', orders, '' if choice.order is Order.MODEL else choice.order, 'order')}"
        f'<span class="searchbox">{icon("search")}<input name="q" id="search" value="{text(choice.search)}" placeholder="layers.7 down_proj" aria-label="Search tensors"><kbd>/</kbd></span>'
        f'{hidden}<noscript><button>Show</button></noscript><a class="button{"" if choice.rows or choice.columns else " off"}" id="whole" href="{whole}">Reset zoom <kbd>0</kbd></a></form>'
    )


def _map(choice: TensorChoice, run: str, tensors: int) -> str:
    words = kind_words(choice.kind)
    name = f"{words[:1].upper()}{words[1:]}: {choice.op} by tensor and step"
    body = (
        f'<div class="heat" id="heat" data-run="{text(run)}" data-source="grid" data-kind="{text(choice.kind)}" data-op="{choice.op}" data-rank="{"" if choice.rank is None else choice.rank}" tabindex="0" role="img" '
        f'aria-label="{text(name)}"></div><noscript><p class="empty">The heat map needs scripts. The tables at the side do not.</p></noscript>'
        '<div class="readout" id="readout"><span>Point at a cell for its value; a click opens the tensor, or zooms to single tensors. Dashed: restart.</span></div>'
    )
    note = "of the rank that is farthest from the median" if choice.rank is None else f"rank {choice.rank}"
    return panel(
        text(name), body, note=note, aside=f'<span class="dim" id="gridnotice">{count(tensors)} tensors</span>'
    )


def _tensor(detail: TensorDetail, curve: Curve) -> str:
    known = text(f'{{"name": "{detail.op}", "log": true, "fixed": true, "zero": false, "tensor": true}}')
    chart = (
        f'<div class="plot mid" data-chart="{known}" data-tensor="{text(detail.tensor)}" data-kind="{text(detail.kind)}" data-axis="arrival" tabindex="0" role="group" '
        f'aria-label="{text(detail.tensor)}">{svg.line_chart(curve, label=detail.tensor, height=180, width=820)}</div>'
    )
    subject = detail.subject
    ranks = "".join(_rank(row, is_subject=row is subject) for row in detail.ranks[:_RANKS])
    more = f'<p class="empty">{count(len(detail.ranks) - _RANKS)} more ranks.</p>' if len(detail.ranks) > _RANKS else ""
    table = (
        '<table class="list"><tr><th class="n">rank<th class="n">step<th class="n">newest<th class="n">highest finite<th class="n">at step'
        f'<th class="n">NaN<th class="n">Inf</tr>{ranks}</table>{more}'
    )
    legend = '<span class="legend"></span>'
    return (
        f'<div id="tensor">{panel(tensor_name(detail.tensor), chart, note=f"{text(detail.op)} of each rank, log", aside=legend, kind="chartbox")}'
        f"{panel('All ranks', table, note='NaN and Inf are elements, summed over the run; marked is the rank of the chart', kind='scrolls')}</div>"
    )


def _rank(row: Mapping[str, Any], *, is_subject: bool) -> str:
    bad = ' class="hot"' if is_subject else ""
    rank = NOTHING if row["rank"] is None else str(row["rank"])
    cells = [rank, count(row["step"]), _bold(row["value"]), measure(row["highest"]), count(row["highest_step"])]
    bad_elements = "".join(
        f'<td class="n{" bad" if row[name] else ""}">{count(row[name])}</td>' for name in ("nans", "infs")
    )
    return f"<tr{bad}>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}{bad_elements}</tr>"


def _bold(value: float | None) -> str:
    """Return a value as text; one that is not finite is marked, as the first thing to see."""
    return measure(value) if value is None or math.isfinite(value) else f'<b class="bad">{measure(value)}</b>'


def _aside(
    place: Place, run: str, choice: TensorChoice, detail: TensorDetail | None, leaving: Sequence[AnomalyRow]
) -> str:
    items = "".join(
        f'<a class="item" href="{choice.url(place, run, tensor=one.tensor, kind=one.kind)}"><span class="figures">'
        f"{tensor_name(one.tensor or '')}<b>{count(one.step)}</b></span>"
        f'<span class="dim">{text(kind_words(one.kind or ""))}{"" if one.rank is None else f", rank {one.rank}"}: '
        f"{text(one.rule or 'rule')}</span></a>"
        for one in leaving
    )
    empty = '<p class="empty">No rule fired for a tensor.</p>'
    first = panel("First firing of each tensor", items or empty, note="causes first, with the step")
    if detail is None:
        return first
    groups = firing_groups(detail.firings)
    head = '<tr><th class="n">steps<th class="n">rank<th class="n">farthest<th>rule</tr>'
    rows = "".join(_firing(one) for one in groups[:MOST_FIRINGS])
    table = f'<div class="scroll"><table class="list tight">{head}{rows}</table></div>'
    number = f'Firings <span class="count">{count(len(detail.firings))}</span>'
    none = f'<p class="empty">{_unfired(detail)}</p>'
    fired = panel(number, table if rows else none, note="the first one above" if rows else "")
    return f"{first}{panel('Tensor', _facts(detail, groups))}{fired}"


def _unfired(detail: TensorDetail) -> str:
    """Return which rules fired although none did for this tensor and kind."""
    of_run, of_tensor = detail.firings_elsewhere
    also = f", {count(of_tensor)} of them for other kinds of this tensor" if of_tensor else ""
    elsewhere = f" {count(of_run)} firings elsewhere in this run{also}." if of_run else ""
    return f"No rule fired for {text(kind_words(detail.kind))} of this tensor.{elsewhere}"


def _facts(detail: TensorDetail, groups: Sequence[FiringGroup]) -> str:
    """Return the facts about a tensor as a table: its worst value where a rule fired, then its newest one."""
    subject = detail.subject
    facts = [("kind", text(kind_words(detail.kind)))]
    if subject is not None:
        where = NOTHING if subject["rank"] is None else str(subject["rank"])
        facts += [("rank", where), *_worst(detail, groups)]
        facts.append((f"newest {text(detail.op)}, step {count(subject['step'])}", _bold(subject["value"])))
        if subject["bad_since"] is not None and subject["finite_step"] is not None:
            last = measure(subject["finite_value"])
            facts.append((f"last finite {text(detail.op)}, step {count(subject['finite_step'])}", last))
        baseline = subject["baseline"]
        facts += [("its baseline", measure(baseline)), *_against(detail, subject["value"], baseline)]
    facts.append(("non-finite elements", count(sum((row["nans"] or 0) + (row["infs"] or 0) for row in detail.ranks))))
    if detail.shape:
        shape = " × ".join(map(str, detail.shape["shape"] or [])) or NOTHING
        facts += [("shape", shape), ("dtype", text(detail.shape["dtype"] or NOTHING))]
    return fact_table(facts)


def _worst(detail: TensorDetail, groups: Sequence[FiringGroup]) -> list[tuple[str, str]]:
    """Return the value that is farthest from its baseline, and the steps without finite values."""
    facts = []
    judged = [one for one in groups if one.op == detail.op and one.ratio is not None]
    worst = max(judged, key=lambda one: max(one.ratio or 0.0, 1 / (one.ratio or 1.0)), default=None)
    if worst is not None:
        facts.append((f"farthest {text(detail.op)}, step {count(worst.step)}", f"<b>{measure(worst.value)}</b>"))
        facts.append(("times its baseline", f'<b class="bad">{measure(worst.ratio)}×</b>'))
    elif detail.subject is not None:
        step = count(detail.subject["highest_step"])
        facts.append((f"highest finite {text(detail.op)}, step {step}", measure(detail.subject["highest"])))
    subject = detail.subject
    if subject is not None and subject["bad_since"] is not None:
        facts.append(("not finite since step", f'<b class="bad">{count(subject["bad_since"])}</b>'))
    elif (bad := next((one for one in groups if one.op in NONFINITE), None)) is not None:
        facts.append((f"{NONFINITE[bad.op or '']} at steps", f'<b class="bad">{_steps(bad)}</b>'))
    return facts


def _against(detail: TensorDetail, value: float | None, baseline: float | None) -> list[tuple[str, str]]:
    """Return the limit of the rule, and the newest value against the baseline, where they are known."""
    if not baseline:
        return []
    limit = detail.limit
    facts = [] if limit is None else [("threshold", f"{measure(limit.high * baseline)} ({limit.high:.3g}×)")]
    if limit is not None and limit.low is not None:
        facts.append(("lower threshold", f"{measure(limit.low * baseline)} ({limit.low:.3g}×)"))
    ratio = NOTHING if value is None or not math.isfinite(value) else f"{measure(value / baseline)}×"
    return [*facts, ("newest / baseline", ratio)]


def _steps(one: FiringGroup) -> str:
    return count(one.first) if one.first == one.last else f"{count(one.first)}–{count(one.last)}"


def _firing(one: FiringGroup) -> str:
    severity = "critical" if one.severity == "critical" else "warning"
    rank = NOTHING if one.rank is None else str(one.rank)
    if one.op in NONFINITE:
        value = f'<span class="bad">{NONFINITE[one.op or ""]}</span>'
    else:
        value = measure(one.value) if one.ratio is None else f"{measure(one.ratio)}×"
    times = f'<br><span class="dim">{count(one.times)} times</span>' if one.times > 1 else ""
    return (
        f'<tr><td class="n">{_steps(one)}</td><td class="n">{rank}</td><td class="n">{value}</td>'
        f"<td>{icon(severity)} {text(one.rule or 'rule')}{times}</td></tr>"
    )
