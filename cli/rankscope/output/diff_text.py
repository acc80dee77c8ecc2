"""Format the result of `rankscope diff` as text lines and as a JSON document. This module does no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rankscope.output.rows import cell, columns
from rankscope_contract.model import collective_format

if TYPE_CHECKING:
    from rankscope_storage.diff.diff import Divergence, Point, StepDifference

_SHOWN_STEPS: Final = 12
_SHOWN_NAMES: Final = 8
_BAR: Final = 24


def diff_lines(found: Divergence) -> Iterator[str]:
    """Yield the lines of the text: the first difference, all differences at its step, their growth over the steps.

    The last lines list tensors, ranks and steps that only one side has.
    """
    steps = f"{found.steps_compared} step{'s' * (found.steps_compared != 1)}"
    yield f"{found.a} compared with {found.b}: {steps}, {found.rows_compared:,} row{'s' * (found.rows_compared != 1)}"
    yield first_line(found)
    if found.first is not None:
        first = found.first
        yield ""
        yield from _points(found.points)
        if (left := found.points_at_first - len(found.points)) > 0:
            yield f"({left} more at step {first.step})"
        if found.looks_rounded:
            yield "differences of this size come from another order of additions: --tolerance 1e-5 ignores them"
        yield ""
        yield from _growth(found.steps)
    for side, other in _missing(found):
        yield f"only in {side}: {other}"


def first_line(found: Divergence) -> str:
    """Return the line about the first difference, or that there is none."""
    if not found.rows_compared:
        return "no value to compare: the runs have no step with the same values in common"
    if found.first is None:
        return "no difference" + ("" if found.tolerance.is_exact else " beyond the tolerance")
    return f"first difference at step {found.first.step}: {_named(found.first)}"


def diff_document(found: Divergence) -> dict[str, Any]:
    """Return the complete result of `rankscope diff` as a document, in which NaN and Inf are numbers."""
    return {
        "a": asdict(found.a),
        "b": asdict(found.b),
        "tolerance": asdict(found.tolerance),
        "steps_compared": found.steps_compared,
        "rows_compared": found.rows_compared,
        "first": None if found.first is None else _document(found.first),
        "points": [_document(point) for point in found.points],
        "points_at_first_step": found.points_at_first,
        "steps": [asdict(step) for step in found.steps],
        **{
            f"{what}_only_in_{side}": list(getattr(found, name.format(side)))
            for side in "ab"
            for what, name in (("tensors", "only_in_{}"), ("ranks", "ranks_only_in_{}"), ("steps", "steps_only_in_{}"))
        },
    }


def _points(points: Sequence[Point]) -> Iterator[str]:
    rows = [(_named(point), _value(point.a), _value(point.b), _share(point.relative)) for point in points]
    yield from (f"  {line}" for line in columns(("value", "a", "b", "relative"), rows, left=1))


def _growth(steps: Sequence[StepDifference]) -> Iterator[str]:
    yield "largest relative difference per step:"
    shown = [*steps[: _SHOWN_STEPS - 1], *steps[-1:]] if len(steps) > _SHOWN_STEPS else steps
    width = max(len(str(step.step)) for step in shown)
    for before, step in zip((None, *shown), shown, strict=False):
        if before is not None and steps.index(step) > steps.index(before) + 1:
            yield f"  ({steps.index(step) - steps.index(before) - 1} steps not shown)"
        apart = f"{step.apart} of {step.compared} rows differ"
        yield f"  {step.step:>{width}}  {_share(step.worst):>8}  {_bar(step.worst):<{_BAR}}  {apart}"


def _bar(worst: float | None) -> str:
    """Return a bar of text for a relative difference, on a logarithmic scale from 1e-8 to 1.

    1e-8 is about the last bit of a float32.
    """
    if not worst:
        return ""
    decades = 8.0 if math.isnan(worst) else min(8.0, max(0.0, 8 + math.log10(worst)))
    return "#" * max(1, round(_BAR * decades / 8))


def _missing(found: Divergence) -> Iterator[tuple[str, str]]:
    for side, tensors, ranks, steps in (
        (found.a, found.only_in_a, found.ranks_only_in_a, found.steps_only_in_a),
        (found.b, found.only_in_b, found.ranks_only_in_b, found.steps_only_in_b),
    ):
        if ranks:
            yield str(side), f"ranks {spans(ranks)}"
        if steps:
            yield str(side), f"steps {spans(steps)}"
        if tensors:
            named = ", ".join(f"{kind} of {cell(tensor)}" for kind, tensor in tensors[:_SHOWN_NAMES])
            more = len(tensors) - _SHOWN_NAMES
            yield str(side), named + (f" and {more} more" if more > 0 else "")


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as a text of ranges, such as `1-3, 7`, of which the first ones are shown."""
    parts = collective_format.spans(numbers).split(",")
    more = f" and {len(parts) - _SHOWN_NAMES} more" if len(parts) > _SHOWN_NAMES else ""
    return ", ".join(parts[:_SHOWN_NAMES]) + more


def _named(point: Point) -> str:
    tensor = cell(point.tensor) + ("" if point.index is None else f"[{point.index}]")
    from rankscope_view.pages.run import scalar_words

    where = [f"{point.kind} of {tensor}" if tensor else f"{point.kind} of the whole model", point.op]
    where = [scalar_words(tensor)] if point.kind == "scalar" else where
    where += [] if point.micro_step is None else [f"micro-batch {point.micro_step}"]
    where += [] if point.vpp_stage is None else [f"chunk {point.vpp_stage}"]
    where += [] if point.call_seq is None else [f"call {point.call_seq}"]
    where += [] if point.rank is None else [f"rank {point.rank}"]
    return ", ".join(where)


def _value(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _share(share: float | None) -> str:
    return "" if share is None else "NaN" if math.isnan(share) else f"{share:.2g}"


def _document(point: Point) -> dict[str, Any]:
    return asdict(point) | {"relative": point.relative}
