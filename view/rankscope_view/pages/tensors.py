"""The page of all tensors of a run: a heat map over the steps, and one tensor below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.kinds import OPS
from rankscope_view.data.curves import Curve
from rankscope_view.data.grid import Order, TensorKinds
from rankscope_view.data.runs import RunRow
from rankscope_view.data.tensor import MOST_FIRINGS, TensorDetail
from rankscope_view.pages import svg
from rankscope_view.pages.format import NOTHING, count, measure, text
from rankscope_view.pages.parts import Place, document, icon, panel, segmented, tabs, tensor_name

_RANKS: Final = 64


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
    detail: TensorDetail | None, curve: Curve | None,
    leaving: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """Return the page of the tensors of a run."""
    crumbs = [(row.run, place.url("runs", row.run)), ("Tensors", None)]
    if choice is None:
        body = (
            f'<div class="panel blank">{icon("unknown")}<strong>No statistics of tensors are stored for this run</strong>'
            "<p>Imported logs have none. A monitor measures gradients by default.</p></div>"
        )
        return document(
            place, f"Tensors of {row.run}", body, crumbs=crumbs, nav=tabs(place, row, "tensors"), page="tensors"
        )
    number = kinds.counts.get(choice.kind, 0)
    body = (
        f'{_toolbar(place, row.run, kinds, choice)}<div class="columns"><div>{_map(choice, row.run, number)}'
        f"{_tensor(detail, curve) if detail and curve else ''}</div><aside>{_aside(place, row.run, choice, detail, leaving)}</aside></div>"
    )
    return document(
        place, f"Tensors of {row.run}", body, crumbs=crumbs, nav=tabs(place, row, "tensors"), page="tensors"
    )


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
        f'<option value="{text(kind)}"{" selected" if kind == choice.kind else ""}>{text(kind.replace("_", " "))} ({count(number)})</option>'
        for kind, number in kinds.counts.items()
    )
    whole = choice.url(place, run, rows=None, columns=None)
    kept = {"absolute": "" if choice.is_relative else "1", "order": choice.order, "tensor": choice.tensor or ""}
    hidden = "".join(
        f'<input type="hidden" name="{name}" value="{text(value)}">' for name, value in kept.items() if value
    )
    ranks = "".join(
        f'<option value="{rank}"{" selected" if rank == choice.rank else ""}>rank {rank}</option>'
        for rank in kinds.ranks
    )
    return (
        f'<form class="toolbar" id="heatbar" action="{place.url("runs", run, "tensors")}"><label class="choice"><span class="label">Statistic</span>'
        f'<select name="op">{ops}</select></label><label class="choice"><span class="label">Of</span><select name="kind">{known}</select></label>'
        f'<label class="choice"><span class="label">Ranks</span><select name="rank"><option value="">all, farthest</option>{ranks}</select></label>'
        f"{segmented('', scales, '' if choice.is_relative else '1', 'absolute')}{segmented('Order', orders, '' if choice.order is Order.MODEL else choice.order, 'order')}"
        f'<span class="searchbox">{icon("search")}<input name="q" id="search" value="{text(choice.search)}" placeholder="layers.7 down_proj" aria-label="Search tensors"><kbd>/</kbd></span>'
        f'{hidden}<noscript><button>Show</button></noscript><a class="button{"" if choice.rows or choice.columns else " off"}" id="whole" href="{whole}">Reset zoom <kbd>0</kbd></a></form>'
    )


def _map(choice: TensorChoice, run: str, tensors: int) -> str:
    name = f"{choice.kind.replace('_', ' ')} {choice.op} by tensor and step".capitalize()
    body = (
        f'<div class="heat" id="heat" data-run="{text(run)}" data-source="grid" data-kind="{text(choice.kind)}" data-op="{choice.op}" data-rank="{"" if choice.rank is None else choice.rank}" tabindex="0" role="img" '
        f'aria-label="{text(name)}"></div><noscript><p class="empty">The heat map needs scripts. The tables at the side do not.</p></noscript>'
        '<div class="readout" id="readout"><span>Point at a cell for its value; a click opens the tensor, or zooms to single tensors.</span></div>'
    )
    return panel(
        text(name),
        body,
        note="of the rank that is farthest from the median" if choice.rank is None else f"rank {choice.rank}",
        aside=f'<span class="dim" id="gridnotice">{count(tensors)} tensors</span>',
    )


def _tensor(detail: TensorDetail, curve: Curve) -> str:
    known = text(f'{{"name": "{detail.op}", "log": true, "fixed": true, "zero": false, "tensor": true}}')
    chart = (
        f'<div class="plot" data-chart="{known}" data-tensor="{text(detail.tensor)}" data-kind="{text(detail.kind)}" data-axis="arrival" tabindex="0" role="group" '
        f'aria-label="{text(detail.tensor)}">{svg.line_chart(curve, label=detail.tensor, height=180, width=820)}</div>'
    )
    ranks = "".join(_rank(row) for row in detail.ranks[:_RANKS])
    more = f'<p class="empty">{count(len(detail.ranks) - _RANKS)} more ranks.</p>' if len(detail.ranks) > _RANKS else ""
    table = (
        '<table class="list"><tr><th class="n">rank<th class="n">step<th class="n">newest<th class="n">highest<th class="n">at step'
        f'<th class="n">NaN<th class="n">Inf</tr>{ranks}</table>{more}'
    )
    legend = '<span class="legend"></span>'
    return (
        f'<div id="tensor">{panel(tensor_name(detail.tensor), chart, note=f"{text(detail.op)} of all ranks, log", aside=legend, kind="chartbox")}'
        f"{panel('All ranks', table, note='elements that are NaN or infinite are summed over the run', kind='scrolls')}</div>"
    )


def _rank(row: Mapping[str, Any]) -> str:
    bad = ' class="hot"' if row["nans"] or row["infs"] else ""
    cells = [
        NOTHING if row["rank"] is None else str(row["rank"]),
        _count(row["step"]),
        measure(row["value"]),
        measure(row["highest"]),
    ]
    cells += [_count(row["highest_step"]), _count(row["nans"]), _count(row["infs"])]
    return f"<tr{bad}>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>"


def _count(value: float | None) -> str:
    return NOTHING if value is None else count(value)


def _aside(
    place: Place, run: str, choice: TensorChoice, detail: TensorDetail | None, leaving: Sequence[Mapping[str, Any]]
) -> str:
    parts = []
    if detail is not None:
        parts.append(panel("Tensor", _facts(detail)))
        rows = "".join(_firing(one) for one in detail.firings[:MOST_FIRINGS])
        head = '<tr><th class="n">step<th class="n">rank<th class="n">value<th>rule</tr>'
        table = (
            f'<div class="scroll"><table class="list">{head}{rows}</table></div>'
            if rows
            else '<p class="empty">No rule fired.</p>'
        )
        parts.append(
            panel(f'Firings <span class="count">{count(len(detail.firings))}</span>', table, note="newest first")
        )
    items = "".join(
        f'<a class="item" href="{choice.url(place, run, tensor=one["tensor"], kind=one["kind"])}"><span class="figures">'
        f"{tensor_name(one['tensor'])}<b>{_count(one['step'])}</b></span></a>"
        for one in leaving
    )
    parts.append(panel("First to leave the baseline", items or '<p class="empty">No rule fired for a tensor.</p>'))
    return "".join(parts)


def _facts(detail: TensorDetail) -> str:
    subject = detail.subject
    facts = [("kind", text(detail.kind))]
    if subject is not None:
        value, baseline = subject["value"], subject["baseline"]
        where = NOTHING if subject["rank"] is None else str(subject["rank"])
        facts += [("rank", where), (f"{text(detail.op)} at step {_count(subject['step'])}", measure(value))]
        facts += [("baseline", measure(baseline)), *_against(detail, value, baseline)]
        facts.append(("highest", f"{measure(subject['highest'])} at step {_count(subject['highest_step'])}"))
    facts.append(("non-finite elements", count(sum((row["nans"] or 0) + (row["infs"] or 0) for row in detail.ranks))))
    if detail.shape:
        facts += [
            ("shape", " × ".join(map(str, detail.shape["shape"] or [])) or NOTHING),
            ("dtype", text(detail.shape["dtype"] or NOTHING)),
        ]
    return (
        '<table class="facts">'
        + "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in facts)
        + "</table>"
    )


def _against(detail: TensorDetail, value: float | None, baseline: float | None) -> list[tuple[str, str]]:
    """Return the limit of the rule, and the newest value against the baseline, where they are known."""
    if not baseline:
        return []
    limit = detail.limit
    facts = [] if limit is None else [("threshold", f"{measure(limit.high * baseline)} ({limit.high:.3g}×)")]
    if limit is not None and limit.low is not None:
        facts.append(("lower threshold", f"{measure(limit.low * baseline)} ({limit.low:.3g}×)"))
    return [*facts, ("value / baseline", NOTHING if value is None else f"{value / baseline:,.3g}×")]


def _firing(one: Mapping[str, Any]) -> str:
    severity = "critical" if one["severity"] == "critical" else "warning"
    rank = NOTHING if one["rank"] is None else str(one["rank"])
    value = {"nans": "NaN", "infs": "Inf"}.get(one["op"] or "", measure(one["value"]))
    return (
        f'<tr><td class="n">{_count(one["step"])}</td><td class="n">{rank}</td><td class="n{" bad" if value in {"NaN", "Inf"} else ""}">{value}</td>'
        f"<td>{icon(severity)} {text(one['rule'] or 'rule')}</td></tr>"
    )
