"""The comparison of runs or ranks: equal up to where, curves, figures, and the configuration that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.phases import PRE_COLLECTIVE_SECONDS
from rankscope_storage.diff.diff import Divergence, Point
from rankscope_view.data.comparison import DIFFERENCE, LETTERS, ComparedSide, Comparison, Side
from rankscope_view.data.curves import POINTS, Curve
from rankscope_view.data.detail import STEP_SECONDS
from rankscope_view.data.metrics import Metric
from rankscope_view.data.runs import SPEED_STEPS
from rankscope_view.data.series import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS
from rankscope_view.pages.format import count, kind_words, measure
from rankscope_view.pages.rendering import Place, render, upper_first
from rankscope_view.pages.run import SMOOTHINGS, Chart, ChartChoice, is_long, metric_groups, scalar_words, title

_NOTES: Final = {
    DIFFERENCE: "below 0: lower loss than A",
    STEP_SECONDS: "s",
    PRE_COLLECTIVE_SECONDS: "s, of the rank itself",
}
_SHOWN_SETTINGS: Final = 200
_LEAST_PERCENT: Final = 1e-4
_NO_ROWS: Final = "No step, or no tensor and no scalar, is stored for both."
_NO_ROWS_OF_RANKS: Final = (
    "No statistic or hash of a replica, which must be equal on both, is stored. The curves show other differences."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """A number that is known of any side. The values of the state are rows of runs."""

    name: str
    values: Sequence[Any]
    change: str = ""
    is_state: bool = False


def page(
    place: Place, found: Comparison, choice: ChartChoice, curves: Mapping[str, Curve], metrics: Sequence[Metric]
) -> str:
    """Return the comparison of several sides. `curves` have a line for each side, by the name of the scalar.

    `metrics` are the other scalars that the script of any side logged.
    """
    sides = [one.side for one in found.sides]
    first = sides[0]
    results = list(zip(found.sides[1:], found.differences, strict=True))
    what = "runs" if len({side.run for side in sides}) > 1 else "ranks"

    def verdict_names(one: ComparedSide) -> str:
        of_two = f"The {'runs' if first.rank is None else 'ranks'}"
        return of_two if len(sides) == 2 else f"{one.side.letter.upper()} and {first.letter.upper()}"

    return render(
        "compare.html",
        place=place,
        found=found,
        title=" and ".join(map(_word, sides)),
        heading=f"Compare {len(sides)} {what}",
        sides=sides,
        most_sides=len(LETTERS),
        compared=lambda sides, **more: _address(place, sides, **more),
        query=_address(place, sides).partition("?")[2],
        results=results,
        verdict_names=verdict_names,
        diff_command=lambda one: _diff_command(first, one.side),
        no_rows=_NO_ROWS if first.rank is None else _NO_ROWS_OF_RANKS,
        evidence_of=_evidence,
        scalar_words=scalar_words,
        values_of=_values,
        address=lambda **changes: _address(place, sides, **(choice.values() | changes | {"axis": None})),
        choice=choice,
        smoothings=SMOOTHINGS,
        most_points=POINTS,
        is_long=is_long(curves),
        firsts=[[one.side.letter.upper(), result.first.step] for one, result in results if result and result.first],
        charts=[_chart(name, curve, [side.letter.upper() for side in sides]) for name, curve in curves.items()],
        metrics=metric_groups(metrics),
        figures=list(_figures(found.sides)),
        most_settings=_SHOWN_SETTINGS,
        without=[one.side.letter.upper() for one in found.sides if one.detail.facts.config is None],
    )


def _address(place: Place, sides: Sequence[Side], **more: object) -> str:
    """Return the address of the comparison of `sides`, which get the letters from A."""
    parameters: dict[str, object] = {}
    for letter, side in zip(LETTERS, sides, strict=False):
        parameters |= {letter: side.run, f"{letter}.rank": side.rank}
    return place.url("compare", **(parameters | more))


def _word(side: Side) -> str:
    return side.run if side.rank is None else f"{side.run} rank {side.rank}"


def choose_page(place: Place, sides: Sequence[Side], others: Sequence[str]) -> str:
    """Return a page that asks for a further run, or for the first two."""
    known = {side.run for side in sides}
    return render(
        "choose.html",
        place=place,
        sides=sides,
        others=[other for other in others if other not in known],
        words=_word,
        address=lambda other: _address(place, [*sides, Side(letter="", run=other)]),
    )


def _diff_command(a: Side, b: Side) -> str:
    ranks = "" if a.rank is None or b.rank is None else f" --ranks {a.rank} {b.rank}"
    return f"rankscope diff {a.run}{'' if a.run == b.run else f' {b.run}'}{ranks}"


def _evidence(result: Divergence) -> str:
    """Return the values of the first difference, and the other values that differ or are equal."""
    first, equal, more = result.first, result.steps_before, result.points_at_first - 1
    assert first is not None
    words = scalar_words(first.tensor) if first.kind == "scalar" else f"{kind_words(first.kind)}, {first.op}"
    found = f"{upper_first(words)}: {' against '.join(_values(first))}{_share(first)}."
    if more:
        found += f" {count(more)} other value{' differs' if more == 1 else 's differ'} at this step."
    if equal:
        found += f" The {count(equal)} common step{' before it is' if equal == 1 else 's before it are'} equal."
    return found + (" Rounding in another order of additions can cause this." if result.looks_rounded else "")


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


def _chart(name: str, curve: Curve, letters: Sequence[str]) -> Chart:
    missing = [] if name == DIFFERENCE else [one for one in letters if one not in {line.label for line in curve.lines}]
    absent = f"{' and '.join(missing)} logged none" if missing else ""
    return Chart(
        name=name,
        curve=curve,
        title="Loss against A" if name == DIFFERENCE else title(name),
        note=", ".join(filter(None, (_NOTES.get(name, ""), absent))),
        options={"name": name, "log": name == GRAD_NORM, "fixed": False, "zero": name == DIFFERENCE, "compare": True},
    )


def _figures(sides: Sequence[ComparedSide]) -> Iterator[ComparedFigure]:
    """Yield the figures that are known of any side."""
    has_runs = any(one.side.rank is None for one in sides)
    if has_runs:
        yield ComparedFigure(name="State", values=[one.detail.row for one in sides], is_state=True)
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
    yield ComparedFigure(name="Step", values=list(map(count, steps)), change=_change(steps))
    for name, measured in numbers.items():
        if any(one is not None for one in measured):
            yield ComparedFigure(name=name, values=list(map(measure, measured)), change=_change(measured))
    if has_runs:
        yield ComparedFigure(name="Restarts", values=[count(len(one.detail.restarts)) for one in sides])
        yield ComparedFigure(name="Open incidents", values=[count(len(one.detail.row.incidents)) for one in sides])


def _common_loss(sides: Sequence[ComparedSide]) -> dict[str, list[float | None]]:
    """Return the loss of all sides at the last step that all have, with its name; empty without such a step."""
    histories = [one.histories.get(LOSS) for one in sides]
    standing = [history.standing for history in histories if history is not None]
    known = [dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True)) for rows in standing]
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


def _best(one: ComparedSide) -> float | None:
    history = one.histories.get(EVAL_LOSS)
    values = [] if history is None else [value for value in history.value.tolist() if value == value]  # noqa: PLR0124 - NaN
    return min(values, default=None)
