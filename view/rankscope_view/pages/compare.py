"""The comparison of runs or ranks: equal up to where, curves, figures, and the configuration that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rankscope_contract.model.phases import PRE_COLLECTIVE_SECONDS
from rankscope_storage.diff.diff import Divergence, Point
from rankscope_view.data.comparison import DIFFERENCE, LETTERS, ComparedSide, Comparison, Side
from rankscope_view.data.curves import Curve, notice
from rankscope_view.data.detail import STEP_SECONDS
from rankscope_view.data.history import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS
from rankscope_view.data.metrics import Metric
from rankscope_view.data.newest import SPEED_STEPS
from rankscope_view.pages import svg
from rankscope_view.pages.format import NOTHING, count, kind_words, measure, text
from rankscope_view.pages.metrics import metric_groups
from rankscope_view.pages.parts import Place, document, icon, panel, state_words, tensor_name, verdict
from rankscope_view.pages.run import OUTSIDE, ChartChoice, is_long, scalar_words, title, toolbar

_NOTES: Final = {
    DIFFERENCE: "below 0: lower loss than A",
    STEP_SECONDS: "s",
    PRE_COLLECTIVE_SECONDS: "s, of the rank itself",
}
_SHOWN_SETTINGS: Final = 200


def page(
    place: Place, found: Comparison, choice: ChartChoice, curves: Mapping[str, Curve], metrics: Sequence[Metric]
) -> str:
    """Return the comparison of several sides. `curves` have a line for each side, by the name of the scalar.

    `metrics` are the other scalars that the script of any side logged.
    """
    sides = [one.side for one in found.sides]
    letters = [side.letter.upper() for side in sides]
    bar = toolbar(
        lambda values: _address(place, sides, **(values | {"axis": None})),
        choice,
        has_axes=False,
        is_long=is_long(curves),
    )
    firsts = [(one.side.letter, result.first.step) for one, result in _results(found) if result and result.first]
    charts = "".join(_chart(name, curve, firsts, letters) for name, curve in curves.items())
    query = text(_address(Place(), sides).partition("?")[2].replace("&amp;", "&"))
    body = (
        f'{_names(place, sides)}{_verdicts(found)}<div class="columns" id="run" data-run="" data-query="{query}">'
        f"<div>{bar}{charts}{_points(found)}{metric_groups(metrics, {}, compare=True)}</div><aside>{_summary(found)}{_settings(found)}</aside></div>"
    )
    what = "runs" if len({side.run for side in sides}) > 1 else "ranks"
    heading = f"Compare {len(sides)} {what}"
    return document(place, " and ".join(map(_word, sides)), body, crumbs=[(heading, None)], page="compare")


def _address(place: Place, sides: Sequence[Side], **more: object) -> str:
    """Return the address of the comparison of `sides`, which get the letters from A."""
    parameters: dict[str, object] = {}
    for letter, side in zip(LETTERS, sides, strict=False):
        parameters |= {letter: side.run, f"{letter}.rank": side.rank}
    return place.url("compare", **(parameters | more))


_LEAST_PERCENT: Final = 1e-4


def _word(side: Side) -> str:
    return side.run if side.rank is None else f"{side.run} rank {side.rank}"


def _names(place: Place, sides: Sequence[Side]) -> str:
    parts = []
    for number, side in enumerate(sides):
        others = [one for one in sides if one is not side]
        rank = "" if side.rank is None else f' <span class="dim">rank {side.rank}</span>'
        label = f"Remove {side.letter.upper()}"
        remove = f'<a class="dim" href="{_address(place, others)}" title="{label}" aria-label="{label}">×</a>'
        remove = remove if len(sides) > 2 else ""
        parts.append(
            f'<span class="side"><span class="badge s{number + 1}">{side.letter.upper()}</span><a href="{place.url("runs", side.run)}"><b><bdi>{text(side.run)}</bdi></b></a>{rank}{remove}</span>'
        )
    swap = f'<a class="button" href="{_address(place, sides[::-1])}">Swap</a>' if len(sides) == 2 else ""
    add = f'<a class="button" href="{_address(place, sides, add=1)}">Add a run</a>' if len(sides) < len(LETTERS) else ""
    return f'<div class="toolbar">{"".join(parts)}{swap}{add}</div>'


def choose_page(place: Place, sides: Sequence[Side], others: Sequence[str]) -> str:
    """Return a page that asks for a further run, or for the first two."""
    known = {side.run for side in sides}
    items = "".join(
        f'<a class="item" href="{_address(place, [*sides, Side(letter="", run=other)])}"><bdi>{text(other)}</bdi></a>'
        for other in others
        if other not in known
    )
    name = " and ".join(f"<bdi>{text(_word(side))}</bdi>" for side in sides) + " with" if sides else "runs"
    empty = '<p class="empty">Select runs in the list of runs.</p>'
    ranks = ""
    if sides:
        link = f'<a href="{place.url("runs", sides[0].run, "ranks")}">page of its ranks</a>'
        ranks = f'<p class="dim">Two ranks of the run are compared from the {link}.</p>'
    body = panel(f"Compare {name}", items if items and sides else empty) + ranks
    return document(place, "Compare", body, crumbs=[("Compare", None)], page="compare")


def _results(found: Comparison) -> Iterator[tuple[ComparedSide, Divergence | None]]:
    yield from zip(found.sides[1:], found.differences, strict=True)


def _verdicts(found: Comparison) -> str:
    first = found.sides[0].side
    return "".join(_verdict(first, one.side, result, is_pair=len(found.sides) == 2) for one, result in _results(found))


def _verdict(a: Side, b: Side, result: Divergence | None, *, is_pair: bool) -> str:
    names = f"The {'runs' if a.rank is None else 'ranks'}" if is_pair else f"{b.letter.upper()} and {a.letter.upper()}"
    if result is None:
        ranks = "" if a.rank is None or b.rank is None else f" --ranks {a.rank} {b.rank}"
        command = text(f"rankscope diff {a.run}{'' if a.run == b.run else f' {b.run}'}{ranks}")
        evidence = f"The command does it: <code>{command}</code>"
        return verdict("info", f"{names} have too many rows to be compared in a page", evidence)
    if not result.rows_compared:
        reason = "No step, or no tensor and no scalar, is stored for both."
        if a.rank is not None:
            reason = "No statistic or hash of a replica, which must be equal on both, is stored. The curves show other differences."
        return verdict("info", f"{names} have no row in common", reason)
    first = result.first
    if first is None:
        evidence = f"{count(result.rows_compared)} rows were compared."
        sentence = f"{names} are equal in all {count(result.steps_compared)} steps that both have"
        return verdict("info", sentence, evidence)
    where = "" if first.rank is None or a.rank is not None or first.kind == "scalar" else f", on rank {first.rank}"
    equal = result.steps_before
    steps = (
        f" The {count(equal)} common step{' before it is' if equal == 1 else 's before it are'} equal." if equal else ""
    )
    more = result.points_at_first - 1
    others = f" {count(more)} other value{' differs' if more == 1 else 's differ'} at this step." if more else ""
    evidence = f"{_what(first)} {' against '.join(_values(first))}{_share(first)}.{others}{steps}"
    evidence += " Rounding in another order of additions can cause this." if result.looks_rounded else ""
    # Runs that differ from the beginning were probably never meant to be equal.
    severity = "critical" if equal else "info"
    return verdict(severity, f"{names} differ first at step {count(first.step)}{where}, in {_subject(first)}", evidence)


def _subject(point: Point) -> str:
    return tensor_name(point.tensor) if point.kind != "scalar" else f"the {text(scalar_words(point.tensor))}"


def _what(point: Point) -> str:
    if point.kind == "scalar":
        words = scalar_words(point.tensor)
        return text(f"{words[:1].upper()}{words[1:]}:")
    words = kind_words(point.kind)
    return text(f"{words[:1].upper()}{words[1:]}, {point.op}:")


def _values(point: Point) -> list[str]:
    """Return both values, with more digits where those of a table do not differ."""
    writers = (measure, "{:.6g}".format, "{:.9g}".format, "{:.17g}".format)
    pairs = [[write(point.a), write(point.b)] for write in writers]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _share(point: Point) -> str:
    if point.relative is None:
        return ""
    size = f"{100 * point.relative:.3g} %" if point.relative >= _LEAST_PERCENT else f"{point.relative:.1g} of the value"
    return f", a difference of {size}"


def _chart(name: str, curve: Curve, firsts: Sequence[tuple[str, int]], letters: Sequence[str]) -> str:
    heading = "Loss against A" if name == DIFFERENCE else title(name)
    options = {"name": name, "log": name == GRAD_NORM, "fixed": False, "zero": name == DIFFERENCE, "compare": True}
    marks = [[letter.upper(), step] for letter, step in firsts]
    body = (
        f'<div class="plot{" tall" if name == LOSS else ""}" data-chart="{text(json.dumps(options))}" data-firsts="{text(json.dumps(marks))}" tabindex="0" role="group" '
        f'aria-label="{heading}">{svg.line_chart(curve, label=heading, width=820)}</div>'
    )
    below = (
        f'<p class="notice">{notice(curve)}<span class="mark">{icon("incident")} first difference</span>{OUTSIDE}</p>'
        if firsts and name == LOSS
        else ""
    )
    missing = [] if name == DIFFERENCE else [one for one in letters if one not in {line.label for line in curve.lines}]
    absent = f"{' and '.join(missing)} logged none" if missing else ""
    note = ", ".join(part for part in (_NOTES.get(name, ""), absent) if part)
    return panel(heading, body + below, note=note, aside='<span class="legend"></span>', kind="chartbox")


def _points(found: Comparison) -> str:
    tables = []
    head = '<tr><th class="n">step<th class="n">rank<th>tensor<th>statistic<th class="n">A<th class="n">{}<th class="n">rel. difference</tr>'
    for one, result in _results(found):
        if result is None or not result.points:
            continue
        rows = "".join(_point(number, point) for number, point in enumerate(result.points))
        note = f"{len(result.points)} of {count(result.points_at_first)} at the first step, in causal order"
        letter = one.side.letter.upper()
        name = "First values that differ" if len(found.sides) == 2 else f"First values in which {letter} differs from A"
        tables.append(
            panel(name, f'<table class="list">{head.format(letter)}{rows}</table>', note=note, kind="scrolls")
        )
    return "".join(tables)


def _point(number: int, point: Point) -> str:
    values = "".join(f'<td class="n">{value}</td>' for value in _values(point))
    return (
        f'<tr class="{"hot" if number == 0 else ""}"><td class="n">{count(point.step)}</td><td class="n">{NOTHING if point.rank is None else point.rank}</td>'
        f"<td>{tensor_name(point.tensor) if point.kind != 'scalar' else text(scalar_words(point.tensor))}</td><td>{text(point.op)}</td>{values}"
        f'<td class="n">{NOTHING if point.relative is None else f"{point.relative:.2g}"}</td></tr>'
    )


def _summary(found: Comparison) -> str:
    is_pair = len(found.sides) == 2
    heads = "".join(f'<th class="n">{one.side.letter.upper()}' for one in found.sides)
    rows = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td class=n>{value}</td>' for value in values)}{f'<td class=n>{change}</td>' if is_pair else ''}</tr>"
        for name, values, change in _figures(found.sides)
    )
    last = '<th class="n">B − A' if is_pair else ""
    return panel("Summary", f'<table class="list tight"><tr><th>{heads}{last}</tr>{rows}</table>', kind="scrolls")


def _figures(sides: Sequence[ComparedSide]) -> Iterator[tuple[str, list[str], str]]:
    """Yield name, values and difference of the figures that are known of any side."""
    if any(one.side.rank is None for one in sides):
        yield "State", [_state(one, has_word=len(sides) == 2) for one in sides], ""
    steps = [one.step for one in sides]
    numbers = {
        "Loss, newest": [one.newest(LOSS) for one in sides],
        **_common_loss(sides),
        "Best evaluation": [_best(one) for one in sides],
        "Gradient norm": [one.newest(GRAD_NORM) for one in sides],
        "Learning rate": [one.newest(LEARNING_RATE) for one in sides],
        f"s/step, newest {SPEED_STEPS} steps": [one.newest(STEP_SECONDS, SPEED_STEPS) for one in sides],
        "Before collective, s": [one.newest(PRE_COLLECTIVE_SECONDS, SPEED_STEPS) for one in sides],
    }
    yield "Step", [count(one) for one in steps], _change(steps)
    for name, measured in numbers.items():
        if any(one is not None for one in measured):
            yield name, [measure(one) for one in measured], _change(measured)
    if any(one.side.rank is None for one in sides):
        yield "Restarts", [count(len(one.detail.restarts)) for one in sides], ""
        yield "Open incidents", [count(len(one.detail.row.incidents)) for one in sides], ""


def _common_loss(sides: Sequence[ComparedSide]) -> dict[str, list[float | None]]:
    """Return the loss of all sides at the last step that all have, with its name; empty without such a step."""
    histories = [one.histories.get(LOSS) for one in sides]
    known = [
        dict(zip(history.step[history.stands].tolist(), history.value[history.stands].tolist(), strict=True))
        for history in histories
        if history is not None
    ]
    common = set.intersection(*map(set, known)) if len(known) == len(sides) else set()
    if not common or len({max(one) for one in known}) == 1:
        return {}
    step = max(common)
    return {f"Loss, step {count(step)}": [one[step] for one in known]}


def _change(values: Sequence[float | None]) -> str:
    """Return the last value minus the first one; empty if one of them is unknown."""
    first, last = values[0], values[-1]
    if first is None or last is None:
        return ""
    difference = last - first
    size = count(abs(difference)) if isinstance(difference, int) else measure(abs(difference))
    return f"{'−' if difference < 0 else '+' if difference > 0 else ''}{size}"


def _state(one: ComparedSide, *, has_word: bool) -> str:
    kind, words = state_words(one.detail.row)
    shown = f"<br>{words.replace(', ', ',<br>').replace('open ', 'open<br>')}" if has_word else ""
    return f'<span title="{words}"{" class=bad" if kind == "critical" else ""}>{icon(kind)}{shown}</span>'


def _best(one: ComparedSide) -> float | None:
    history = one.histories.get(EVAL_LOSS)
    values = [] if history is None else [value for value in history.value.tolist() if value == value]  # noqa: PLR0124 - NaN
    return min(values, default=None)


def _settings(found: Comparison) -> str:
    heads = "".join(f"<th>{one.side.letter.upper()}" for one in found.sides)
    rows = "".join(
        f"<tr><td><code>{text(one.key)}</code></td>{''.join(f'<td>{NOTHING if value is None else text(value)}</td>' for value in one.values)}</tr>"
        for one in found.settings[:_SHOWN_SETTINGS]
    )
    empty = '<p class="empty">No key differs.</p>'
    table = f'<table class="list wraps"><tr><th>key{heads}</tr>{rows}</table>' if rows else empty
    note = f"{len(found.settings)} differ, {found.equal_settings} are equal"
    without = [one.side.letter.upper() for one in found.sides if one.detail.facts.config is None]
    if without:
        note = f"{' and '.join(without)} stored none"
    return panel("Configuration", table, note=note, kind="scrolls")
