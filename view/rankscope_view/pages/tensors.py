"""The page of all tensors of a run: a heat map over the steps, and one tensor below it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.kinds import OPS
from rankscope_storage.api.summaries import AnomalyRow
from rankscope_view.data.curves import Curve
from rankscope_view.data.grid import GridRequest, Order, TensorKinds
from rankscope_view.data.runs import RunRow
from rankscope_view.data.tensor import MOST_FIRINGS, FiringGroup, TensorDetail, firing_groups
from rankscope_view.pages.format import NONFINITE, NOTHING, count, kind_words, measure
from rankscope_view.pages.rendering import Place, is_nonfinite, render

_RANKS: Final = 64
_MOST_HISTOGRAMS: Final = 2000
_ORDERS: Final = (("", "Layer"), (Order.PART, "Part"), (Order.WORST, "Worst first"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChoice:
    """Choices of the reader, which the address contains. `tensor` is the one below the heat map."""

    grid: GridRequest
    search: str
    tensor: str | None
    rows: str | None
    columns: str | None

    def url(self, place: Place, run: str, **changes: object) -> str:
        """Return the address of the page with these choices and `changes`."""
        grid = self.grid
        values: dict[str, object] = {
            "kind": grid.kind,
            "op": grid.op,
            "absolute": None if grid.is_relative else 1,
            "order": None if grid.order is Order.MODEL else grid.order,
            "rank": grid.rank,
            "q": self.search or None,
            "tensor": self.tensor,
            "rows": self.rows,
            "columns": self.columns,
        }
        return place.url("runs", run, "tensors", **(values | changes))


@dataclass(frozen=True, slots=True)
class Fact:
    """One line about a tensor."""

    name: str
    value: str | int
    is_bold: bool = False
    is_bad: bool = False


def page(
    place: Place, row: RunRow, kinds: TensorKinds, choice: TensorChoice | None, *,
    detail: TensorDetail | None, curve: Curve | None, leaving: Sequence[AnomalyRow],
    histograms: Mapping[str, Sequence[str]], histogram: str | None,
) -> str:  # fmt: skip
    """Return the page of the tensors of a run.

    `histograms` has the tensors with histograms by kind; `histogram` is the chosen one, as `kind:tensor`.
    """
    groups = [] if detail is None else firing_groups(detail.firings)
    return render(
        "tensors.html",
        place=place,
        row=row,
        kinds=kinds,
        choice=choice,
        detail=detail,
        curve=curve,
        leaving=leaving,
        histograms=_histograms(histograms, histogram, choice),
        address=None if choice is None else functools.partial(choice.url, place, row.run),
        tensor_facts=[] if detail is None else list(_facts(detail, groups)),
        firings=groups,
        most_firings=MOST_FIRINGS,
        most_ranks=_RANKS,
        ops=OPS,
        orders=_ORDERS,
        steps_of=_steps,
    )


def _histograms(
    found: Mapping[str, Sequence[str]], chosen: str | None, choice: TensorChoice | None
) -> list[tuple[str, str]]:
    """Return (kind, tensor) of the histogram to show, and of those that can be chosen."""
    known = [(kind, tensor) for kind, tensors in found.items() for tensor in tensors]
    if not known:
        return []
    opened = None if choice is None else choice.tensor
    first = next(
        (one for one in known if f"{one[0]}:{one[1]}" == chosen),
        next((one for one in known if one[1] == opened), known[0]),
    )
    return list(dict.fromkeys([first, *known[:_MOST_HISTOGRAMS]]))


def _facts(detail: TensorDetail, groups: Sequence[FiringGroup]) -> Iterator[Fact]:
    """Yield the facts about a tensor: its worst value where a rule fired, then its newest one."""
    subject = detail.subject
    yield Fact("kind", kind_words(detail.kind))
    if subject is not None:
        yield Fact("rank", NOTHING if subject["rank"] is None else subject["rank"])
        yield from _worst(detail, groups, subject)
        value = subject["value"]
        yield Fact(f"newest {detail.op}, step {count(subject['step'])}", measure(value), is_bad=is_nonfinite(value))
        if subject["bad_since"] is not None and subject["finite_step"] is not None:
            yield Fact(
                f"last finite {detail.op}, step {count(subject['finite_step'])}", measure(subject["finite_value"])
            )
        yield Fact("its baseline", measure(subject["baseline"]))
        yield from _against(detail, value, subject["baseline"])
    yield Fact("non-finite elements", count(sum((row["nans"] or 0) + (row["infs"] or 0) for row in detail.ranks)))
    if detail.shape:
        yield Fact("shape", " × ".join(map(str, detail.shape["shape"] or [])) or NOTHING)
        yield Fact("dtype", detail.shape["dtype"] or NOTHING)


def _worst(detail: TensorDetail, groups: Sequence[FiringGroup], subject: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the value that is farthest from its baseline, and the steps without finite values."""
    judged = [one for one in groups if one.op == detail.op and one.ratio is not None]
    worst = max(judged, key=lambda one: max(one.ratio or 0.0, 1 / (one.ratio or 1.0)), default=None)
    if worst is not None:
        yield Fact(f"farthest {detail.op}, step {count(worst.step)}", measure(worst.value), is_bold=True)
        yield Fact("times its baseline", f"{measure(worst.ratio)}×", is_bad=True)
    else:
        yield Fact(f"highest finite {detail.op}, step {count(subject['highest_step'])}", measure(subject["highest"]))
    if subject["bad_since"] is not None:
        yield Fact("not finite since step", count(subject["bad_since"]), is_bad=True)
    elif (bad := next((one for one in groups if one.op in NONFINITE), None)) is not None:
        yield Fact(f"{NONFINITE[bad.op or '']} at steps", _steps(bad), is_bad=True)


def _against(detail: TensorDetail, value: float | None, baseline: float | None) -> Iterator[Fact]:
    """Yield the limits of the rule, and the newest value against the baseline, where they are known."""
    if not baseline:
        return
    limit = detail.limit
    if limit is not None:
        yield Fact("threshold", f"{measure(limit.high * baseline)} ({limit.high:.3g}×)")
        if limit.low is not None:
            yield Fact("lower threshold", f"{measure(limit.low * baseline)} ({limit.low:.3g}×)")
    is_known = value is not None and not is_nonfinite(value)
    yield Fact("newest / baseline", f"{measure((value or 0.0) / baseline)}×" if is_known else NOTHING)


def _steps(one: FiringGroup) -> str:
    return count(one.first) if one.first == one.last else f"{count(one.first)}–{count(one.last)}"
