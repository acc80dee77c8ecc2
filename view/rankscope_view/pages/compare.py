"""The comparison of two runs: equal up to where, curves, figures, and the configuration that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rankscope_storage.diff.diff import Divergence
from rankscope_view.data.comparison import Comparison
from rankscope_view.data.curves import Curve
from rankscope_view.data.detail import RunDetail
from rankscope_view.data.history import EVAL_LOSS, GRAD_NORM, LOSS
from rankscope_view.pages import svg
from rankscope_view.pages.format import NOTHING, count, measure, text
from rankscope_view.pages.parts import Place, document, icon, panel, state_word, tensor_name, verdict
from rankscope_view.pages.run import title

CHARTS: Final = (LOSS, GRAD_NORM, EVAL_LOSS)


def page(place: Place, found: Comparison, curves: Sequence[Curve]) -> str:
    """Return the comparison of two runs. `curves` have one line per run, by the names of CHARTS."""
    a, b = found.a.row.run, found.b.row.run
    swap = place.url("compare", a=b, b=a)
    names = (
        f'<div class="toolbar"><span class="badge">A</span><a href="{place.url("runs", a)}"><b><bdi>{text(a)}</bdi></b></a>'
        f'<a class="button" href="{swap}">Swap</a><span class="badge b">B</span><a href="{place.url("runs", b)}"><b><bdi>{text(b)}</bdi></b></a></div>'
    )
    charts = "".join(_chart(curve) for curve in curves if curve.rows)
    body = (
        f'{names}{_verdict(found)}<div class="columns" id="run" data-a="{text(a)}" data-b="{text(b)}" data-run=""><div>{charts}{_points(found.divergence)}</div>'
        f"<aside>{_summary(found)}{_settings(found)}</aside></div>"
    )
    return document(place, f"{a} and {b}", body, crumbs=[("Compare 2 runs", None)], page="compare")


def choose_page(place: Place, run: str | None, others: Sequence[str]) -> str:
    """Return a page that asks for the second run."""
    items = "".join(
        f'<a class="item" href="{place.url("compare", a=run, b=other)}"><bdi>{text(other)}</bdi></a>'
        for other in others
        if other != run
    )
    name = "two runs" if run is None else f"<bdi>{text(run)}</bdi> with"
    empty = '<p class="empty">Select two runs in the list of runs.</p>'
    return document(
        place,
        "Compare",
        panel(f"Compare {name}", items if run and items else empty),
        crumbs=[("Compare", None)],
        page="compare",
    )


def _verdict(found: Comparison) -> str:
    result = found.divergence
    if result is None:
        command = text(f"rankscope diff {found.a.row.run} {found.b.row.run}")
        return verdict(
            "info",
            "These runs have too many rows to be compared in a page",
            f"The command does it: <code>{command}</code>",
        )
    if not result.rows_compared:
        return verdict(
            "info", "The runs have no row in common", "No step, or no tensor and no scalar, is stored for both."
        )
    first = result.first
    if first is None:
        return verdict(
            "info",
            f"The runs are equal in all {count(result.steps_compared)} steps that both have",
            f"{count(result.rows_compared)} rows were compared.",
        )
    where = "" if first.rank is None else f", on rank {first.rank}"
    name = tensor_name(first.tensor) if first.kind != "scalar" else f"<b>{text(first.tensor)}</b>"
    share = "" if first.relative is None else f": a relative difference of {first.relative:.2g}"
    evidence = f"{text(first.kind.replace('_', ' '))} {text(first.op)} {measure(first.a)} against {measure(first.b)}{share}. {count(result.points_at_first)} {'value differs' if result.points_at_first == 1 else 'values differ'} at this step."
    evidence += " Rounding in another order of additions can cause this." if result.looks_rounded else ""
    return verdict("critical", f"The runs differ first at step {count(first.step)}{where}, in {name}", evidence)


def _chart(curve: Curve) -> str:
    known = text(
        f'{{"name": "{curve.name}", "log": {str(curve.name == GRAD_NORM).lower()}, "fixed": false, "zero": false, "compare": true}}'
    )
    body = f'<div class="plot{" tall" if curve.name == LOSS else ""}" data-chart="{known}" tabindex="0" role="group" aria-label="{title(curve.name)}">{svg.line_chart(curve, label=title(curve.name), width=820)}</div>'
    return panel(
        title(curve.name), body, note="raw and EMA 0.90", aside='<span class="legend"></span>', kind="chartbox"
    )


def _points(result: Divergence | None) -> str:
    if result is None or not result.points:
        return ""
    rows = "".join(
        f'<tr class="{"hot" if number == 0 else ""}"><td class="n">{count(point.step)}</td><td class="n">{NOTHING if point.rank is None else point.rank}</td>'
        f'<td>{tensor_name(point.tensor)}</td><td>{text(point.op)}</td><td class="n">{measure(point.a)}</td><td class="n">{measure(point.b)}</td>'
        f'<td class="n">{NOTHING if point.relative is None else f"{point.relative:.2g}"}</td></tr>'
        for number, point in enumerate(result.points)
    )
    head = '<tr><th class="n">step<th class="n">rank<th>tensor<th>statistic<th class="n">A<th class="n">B<th class="n">rel. difference</tr>'
    note = f"{len(result.points)} of {count(result.points_at_first)} at the first step, in causal order"
    return panel("First values that differ", f'<table class="list">{head}{rows}</table>', note=note, kind="scrolls")


def _summary(found: Comparison) -> str:
    rows = "".join(
        f'<tr><td>{name}</td><td class="n">{a}</td><td class="n">{b}</td><td class="n">{difference}</td></tr>'
        for name, a, b, difference in _figures(found)
    )
    return panel(
        "Summary", f'<table class="list"><tr><th><th class="n">A<th class="n">B<th class="n">B − A</tr>{rows}</table>'
    )


def _figures(found: Comparison) -> Iterator[tuple[str, str, str, str]]:
    a, b = found.a, found.b
    yield "State", _state(a), _state(b), ""
    yield _counted("Step", a.row.step, b.row.step)
    yield _measured("Loss", a.row.loss, b.row.loss)
    yield _measured("Best eval", _best(a), _best(b))
    yield _measured("Rate", a.row.learning_rate, b.row.learning_rate)
    yield _counted("Restarts", len(a.restarts), len(b.restarts))
    yield _counted("Incidents", len(a.row.incidents), len(b.row.incidents))


def _state(one: RunDetail) -> str:
    return f"{icon(one.row.state or 'unknown')} {text(state_word(one.row.state))}"


def _best(one: RunDetail) -> float | None:
    values = [value for value in one.history(EVAL_LOSS).value.tolist() if value == value]  # noqa: PLR0124 - NaN
    return min(values, default=None)


def _counted(name: str, a: int | None, b: int | None) -> tuple[str, str, str, str]:
    difference = "" if a is None or b is None else f"{b - a:+,}".replace("-", "−")
    return name, NOTHING if a is None else count(a), NOTHING if b is None else count(b), difference


def _measured(name: str, a: float | None, b: float | None) -> tuple[str, str, str, str]:
    difference = "" if a is None or b is None else f"{b - a:+.2g}".replace("-", "−", 1)
    return name, measure(a), measure(b), difference


def _settings(found: Comparison) -> str:
    rows = "".join(
        f"<tr><td><code>{text(one.key)}</code></td><td>{NOTHING if one.a is None else text(one.a)}</td><td>{NOTHING if one.b is None else text(one.b)}</td></tr>"
        for one in found.settings
    )
    table = (
        f'<table class="list"><tr><th>key<th>A<th>B</tr>{rows}</table>'
        if rows
        else '<p class="empty">No key differs.</p>'
    )
    return panel(
        "Configuration", table, note=f"{len(found.settings)} differ, {found.equal_settings} are equal", kind="scrolls"
    )
