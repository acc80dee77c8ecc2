"""Panels of a board as HTML: latest values, tables, states over time and charts, in a grid of 24 columns.

The caller gives the data as text and numbers. A colour is one of the names in `_KINDS`, or an empty text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final

from rankscope_view.data.curves import Curve
from rankscope_view.pages import svg
from rankscope_view.pages.format import measure, text, utc
from rankscope_view.pages.parts import icon, panel

GRID: Final = 24
"""Columns of a board."""

Word = tuple[str, str]
"""A text and its colour."""

_KINDS: Final = {
    "green": "running",
    "blue": "completed",
    "yellow": "pending",
    "orange": "stalled",
    "red": "failed",
    "purple": "stopping",
    "text": "stopped",
}
"""Classes of the style sheet by colour."""

_FEW: Final = 6
"""The legend of a chart has at most this many names. Charts with more lines have a list."""


def latest_values(values: Iterable[tuple[str, Word, float | None]]) -> str:
    """Return the latest value of each series: name, text and colour, and its share of a gauge or None."""
    found = []
    for name, (word, colour), share in values:
        kind = _KINDS.get(colour, "stopped")
        bar = "" if share is None else svg.bar(share, kind)
        label = f"<span>{text(name)}</span>" if name else ""
        found.append(f'<div class="tone {kind}"><b>{text(word)}</b>{label}{bar}</div>')
    return f'<div class="latest">{"".join(found)}</div>'


def cell_table(headings: Sequence[str], rows: Sequence[Sequence[Word]]) -> str:
    """Return a table of texts. A cell with a colour is a mark of this colour."""
    head = "".join(f"<th>{text(one)}</th>" for one in headings)
    body = "".join(f"<tr>{''.join(f'<td>{_word(*one)}</td>' for one in row)}</tr>" for row in rows)
    return f'<div class="cells"><table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _word(word: str, colour: str) -> str:
    return f'<span class="tag tone {_KINDS.get(colour, "stopped")}">{text(word)}</span>' if colour else text(word)


def state_rows(
    rows: Sequence[tuple[str, Sequence[tuple[float, float, Word]]]], key: Sequence[Word], start: float, end: float
) -> str:
    """Return one row of coloured cells for each series between two times. `key` has the meanings of the colours."""
    scale = 1000 / ((end - start) or 1.0)
    drawn = []
    for name, cells in rows:
        parts = []
        for first, last, (word, colour) in cells:
            kind = _KINDS.get(colour, "stopped")
            left, right = ((min(max(one, start), end) - start) * scale for one in (first, last))
            about = f"<title>{utc(first)}{' ' if word else ''}{text(word)}</title>"
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" width="{max(0.0, right - left):.1f}" height="14">{about}</rect>'
            )
        picture = f'<svg class="phases" viewBox="0 0 1000 14" preserveAspectRatio="none">{"".join(parts)}</svg>'
        drawn.append(f'<tr><th scope="row">{text(name)}</th><td>{picture}</td></tr>')
    marks = "".join(_word(*one) for one in key)
    edges = f'<tr class="edges"><th></th><td><span>{utc(start, "%m-%d %H:%M")}</span>{marks}<span>{utc(end, "%m-%d %H:%M")}</span></td></tr>'
    return f'<table class="states"><tbody>{"".join(drawn)}{edges}</tbody></table>'


def chart(curve: Curve, *, is_logarithmic: bool, has_zero: bool, width: int) -> str:
    """Return the chart of `curve` and the latest value of each line. The scripts of the page replace the drawing."""
    known = {"name": curve.name, "log": is_logarithmic, "fixed": True, "zero": has_zero}
    drawn = svg.line_chart(curve, label=curve.name, height=190, width=max(300, 48 * width))
    return (
        f'<div class="plot" data-chart="{text(json.dumps(known))}" tabindex="0" role="group" '
        f'aria-label="{text(curve.name)}">{drawn}</div>{_lines(curve)}'
    )


def _lines(curve: Curve) -> str:
    """Return the latest finite value of each line of a chart with many lines."""
    if len(curve.lines) <= _FEW:
        return ""
    latest = [
        (one.label or "", next((value for value in one.value[::-1] if math.isfinite(value)), None))
        for one in curve.lines
    ]
    rows = "".join(f'<tr><td>{text(name)}</td><td class="n">{measure(value)}</td></tr>' for name, value in latest)
    return (
        f"<details><summary>{len(latest)} series, latest values</summary>"
        f'<table class="list"><tbody>{rows}</tbody></table></details>'
    )


def board_panel(title: str, body: str, *, unit: str, description: str, width: int, notes: Sequence[str]) -> str:
    """Return a panel of a board, `width` columns wide. `body` is HTML."""
    below = "".join(f'<p class="hint">{text(one)}</p>' for one in notes)
    about = f'<abbr title="{text(description)}">{icon("info", "about")}</abbr>' if description else ""
    legend = '<span class="legend"></span>' if 'class="plot"' in body else ""
    return panel(text(title), body + below, note=text(unit), aside=legend + about, kind=f"w{min(max(width, 1), GRID)}")


def board_row(title: str, note: str, panels: Sequence[str]) -> str:
    """Return a row of a board: its title and its panels in a grid."""
    head = f'<h2 class="part">{text(title)} <span class="dim">{text(note)}</span></h2>' if title else ""
    return f'{head}<div class="board">{"".join(panels)}</div>'


def empty(reason: str) -> str:
    """Return the text of a panel without data."""
    return f'<p class="empty">{text(reason)}</p>'
