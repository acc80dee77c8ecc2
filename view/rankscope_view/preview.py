"""A preview of a board as a single HTML file: the panels of a board, drawn with the charts of the pages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_view.data.curves import Axis, Curve, CurveRequest, Line, NonfiniteRange, Smoothing
from rankscope_view.data.history import Floats
from rankscope_view.pages.board import board_row
from rankscope_view.pages.format import text, utc
from rankscope_view.standalone import File, FilePage, file, kept_line

LABEL: Final = "Preview, not Grafana"
"""Label of each preview."""

HEIGHT_SCRIPT: Final = """\
addEventListener("load", () => {
  setTimeout(() => { document.title = `height ${document.documentElement.scrollHeight}`; }, 500);
});
"""
"""Script that writes the height of the page into its title, for a program that takes a picture of all of it."""

_BREAK: Final = 1.5
"""Two samples that are more than this many steps apart have missing samples between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The content of a preview. `rows` are (title, note, panels as HTML); `facts` are name and value."""

    title: str
    start: float  # UTC seconds
    end: float
    facts: Sequence[tuple[str, str]]
    notices: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[str]]]
    curves: Sequence[tuple[Curve, Sequence[tuple[str, float, bool]]]]  # with (group, time, is critical) of marks


def preview(content: Preview, *, made_at: float, scripts: Sequence[str] = ()) -> File:
    """Return the file of a preview. `made_at` is in UTC seconds."""
    span = f"{utc(content.start, '%Y-%m-%d %H:%M:%S')} to {utc(content.end, '%Y-%m-%d %H:%M:%S')} UTC"
    facts = "".join(
        f"<span>{text(name)} <b>{text(value)}</b></span>" for name, value in (("range", span), *content.facts)
    )
    notices = "".join(f"<p>{text(one)}</p>" for one in content.notices)
    rows = "".join(board_row(*one) for one in content.rows)
    return file(
        FilePage(
            title=f"{content.title}, preview",
            subject=content.title,
            place=LABEL,
            state=f"Queried at {utc(made_at, '%Y-%m-%d %H:%M')} UTC",
            body=(
                f'<div class="verdict info"><div><strong>{LABEL}</strong><p>The queries and settings are those of the '
                f"board in Grafana. The drawing is not.</p>{notices}</div></div>"
                f'<p class="facts">{facts}</p><div id="run" data-run="">{rows}</div>'
            ),
            kind="preview",
            axis=Axis.TIME,
            documents={"curves": json.dumps({Axis.TIME: _documents(content)}, allow_nan=False, separators=(",", ":"))},
            scripts=scripts,
            sheet="preview.css",
        )
    )


def _documents(content: Preview) -> dict[str, Any]:
    """Return the curves for scripts by name."""
    return {
        curve.name: curve.document()
        | {
            "lines": [kept_line(line) for line in curve.lines],
            "nonfinite": [[one.first, one.last, one.word] for one in curve.nonfinite],
            "markers": [[group, time, 0, "", is_critical] for group, time, is_critical in marks],
        }
        for curve, marks in content.curves
    }


def chart_name(title: str) -> str:
    """Return the name of the chart of a panel, for files that a reader saves."""
    return re.sub(r"\W+", "_", title.lower()).strip("_") or "panel"


def time_curve(
    name: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    window: tuple[float, float],
    step: float,
    restarts: Sequence[float] = (),
) -> Curve:
    """Return a curve over time of lines with a label, times in UTC seconds and values.

    A line breaks where samples are missing, that is at more than one and a half times `step` seconds.
    """
    drawn = [_line(label, np.array(times, float), np.array(values, float), step) for label, times, values in lines]
    finite = np.concatenate([line.value[np.isfinite(line.value)] for line in drawn])
    return Curve(
        name=name,
        request=CurveRequest(axis=Axis.TIME, smoothing=Smoothing.NONE),
        lines=tuple(drawn),
        nonfinite=tuple(one for _, times, values in lines for one in _nonfinite(times, values, step)),
        restarts=tuple(restarts),
        rows=sum(len(times) for _, times, _ in lines),
        rows_left_out=0,
        bucket_width=None,
        buckets=0,
        extent=window,
        bulk=(float(finite.min()), float(finite.max())) if len(finite) else None,
    )


def _line(label: str, times: Floats, values: Floats, step: float) -> Line:
    gaps = np.flatnonzero(np.diff(times) > _BREAK * step) + 1
    x = np.insert(times, gaps, times[gaps - 1] + step / 2)
    value = np.insert(np.where(np.isfinite(values), values, np.nan), gaps, np.nan)
    return Line(
        label=label, x=x, step=x.astype(np.int64), value=value, smoothed=np.full(len(x), np.nan), low=value, high=value
    )


def _nonfinite(times: Sequence[float], values: Sequence[float], step: float) -> list[NonfiniteRange]:
    """Return the ranges of samples that are not finite."""
    found: list[NonfiniteRange] = []
    for time, value in zip(times, values, strict=True):
        if np.isfinite(value):
            continue
        word = "NaN" if np.isnan(value) else "Inf"
        if found and found[-1].word == word and time - found[-1].last < _BREAK * step:
            first, rows = found[-1].first, found.pop().rows + 1
        else:
            first, rows = time, 1
        found.append(NonfiniteRange(first=first, last=time, first_step=0, last_step=0, rows=rows, word=word))
    return found
