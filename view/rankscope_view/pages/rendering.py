"""Render the templates of the pages: the environment of Jinja2, and the functions that templates call.

Every value is escaped for HTML. `|safe` and `Markup` are only for SVG that this module draws, for pages without
scripts; the style sheet has its colours.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from markupsafe import Markup, escape

from rankscope_contract.model.events import WHOLE_MODEL, RunState
from rankscope_storage.base.escaping import path_segment
from rankscope_view.data.curves import Axis, Curve, notice
from rankscope_view.data.incidents import STATE_TEXTS, Incident, happening, sentence_of
from rankscope_view.data.runs import STOPPING, RunRow, Sparkline, open_count
from rankscope_view.data.series import Floats
from rankscope_view.pages import format as formats
from rankscope_view.pages.format import utc

STATES: Final = (*RunState, STOPPING)
_FOLDER: Final = Path(__file__).parents[1] / "templates"
_BETWEEN_WORDS: Final = re.compile(r"(?<=[^\s>])\s*\n\s*(?=[^\s<])")
_LINE_BREAK: Final = re.compile(r"\s*\n\s*")
_FILTERS: Final = (
    *(formats.count, formats.number, formats.measure, formats.short, formats.percent, formats.kind_words),
    *(formats.duration, formats.ago, formats.age, formats.utc),
)
_MOST_SPANS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Facts for all pages: the prefix of addresses, the digest of the assets, and whether the page is live."""

    base: str = ""
    assets: str = ""  # digest in the addresses of style sheet and scripts
    is_live: bool = False
    has_service: bool = False
    store: str = ""  # folder, for commands on the page; empty if they have no effect on its rows
    version: int = -1  # of the store

    def url(self, *segments: str, **query: object) -> str:
        """Return the address of a page below the prefix. None leaves out a parameter."""
        path = "/".join(map(path_segment, segments))
        # A browser removes the segments `.` and `..` even if they are encoded; their name goes into the query.
        given = {name.rstrip("_"): value for name, value in query.items() if value is not None}
        if len(segments) > 1 and segments[0] == "runs" and segments[1] in (".", ".."):
            path = "/".join(("runs", "-", *segments[2:]))
            given["run"] = segments[1]
        words = urlencode(given, quote_via=quote)
        return f"{self.base}/{path}{'?' if words else ''}{words}"


class _JoinedLines(Extension):
    """Removes the line breaks of templates with the spaces around them; one between two words becomes a space."""

    def filter_stream(self, stream: TokenStream) -> list[Token]:
        tokens = list(stream)
        for at, (line, kind, text) in enumerate(tokens):
            if kind == "data":
                tokens[at] = Token(line, kind, _LINE_BREAK.sub("", _BETWEEN_WORDS.sub(" ", text)))
        return tokens


@functools.cache
def environment() -> Environment:
    """Return the environment of all templates, which keeps the compiled ones."""
    found = Environment(
        loader=FileSystemLoader(_FOLDER),
        extensions=[_JoinedLines],
        undefined=StrictUndefined,
        autoescape=True,
        auto_reload=False,
    )
    found.filters |= {function.__name__: function for function in _FILTERS} | {
        "json": json.dumps,
        "upper_first": upper_first,
    }
    functions = (
        *(happening, happening_of_line, sentence_of, last_state, rank_list, is_nonfinite, tensor_parts),
        *(page_title, state_word, state_words, close_command, open_count, notice),
        *(bar, sparkline, stacked, line_chart),
    )
    found.globals |= {function.__name__: function for function in functions}
    found.globals |= {"NOTHING": formats.NOTHING, "NONFINITE": formats.NONFINITE, "WHOLE_MODEL": WHOLE_MODEL}
    return found


def compile_templates() -> None:
    """Compile all templates, so that no page waits for it."""
    for name in environment().list_templates():
        environment().get_template(name)


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template.

    Control characters and marks of writing direction of a text are shown as escape sequences, but not its line breaks.
    """
    html = environment().get_template(template).render(values)
    html = html.replace("\r\n", "\n")
    if html.replace("\n", "").replace("\t", "").isprintable():
        return html
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in html)


def upper_first(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return f"{text[:1].upper()}{text[1:]}"


def state_word(state: str | None) -> str:
    """Return the word for a state of a run."""
    return {"": "Unknown", RunState.PENDING.value: "Waiting"}.get(state or "", (state or "").capitalize())


def state_words(row: RunRow) -> tuple[str, str]:
    """Return the icon and the words of the state of a run; of an ended run, with the number of its open incidents."""
    if row.end_sentence and row.state != RunState.FAILED:
        return "critical", f"{state_word(row.state)}, {open_count(len(row.incidents))}"
    return row.state if row.state is not None and row.state in STATES else "unknown", state_word(row.state)


def page_title(row: RunRow, title: str) -> str:
    """Return the title of a page of a run, which begins with the number of open incidents if there are any."""
    return f"{open_count(len(row.incidents))}: {title}" if row.incidents else title


def tensor_parts(name: str) -> list[tuple[str, str]]:
    """Return the parts of the name of a tensor as (class, text): above the layer, the layer, the middle, the end."""
    parts = (name or WHOLE_MODEL).split(".")
    at = next((number for number, part in enumerate(parts[:-1]) if part.isdigit()), None)
    begin, end = (0, 0) if at is None else (max(0, at - 1), at + 1)
    head, layer, rest = parts[:begin], parts[begin:end], parts[end:]
    listed = (("th", head), ("tl", layer), ("tm", rest[:-2]), ("te", rest[-2:]))
    return [(kind, ".".join(words)) for kind, words in listed if words]


def happening_of_line(one: Incident) -> str:
    """Return the event of an incident without its rank, if the line above names the rank alone."""
    what = happening(one)
    is_named = one.rank is not None and one.tensor is None
    return what.removeprefix(f"rank {one.rank}").lstrip(": ") if is_named else what


def last_state(one: Incident) -> str:
    """Return whether an incident is open, and its last state, with the user and the note of its end."""
    state = one.states[-1][1] if one.states else "opened"
    words = " by ".join(filter(None, (STATE_TEXTS.get(state, state), one.closed_by)))
    return f"open, {words}" if one.is_open else words


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as words, such as `0, 1, 4–7`; of many, the first."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [
        str(low) if low == high else f"{low}{', ' if high == low + 1 else '–'}{high}"
        for low, high in spans[:_MOST_SPANS]
    ]
    return ", ".join(words) + ("…" if len(spans) > _MOST_SPANS else "")


def is_nonfinite(value: float | None) -> bool:
    """Return whether a known value is NaN or infinite."""
    return value is not None and not math.isfinite(value)


def close_command(place: Place, run: str, number: int | None = None) -> str:
    """Return the command that closes the open incidents of a run, or only one."""
    words = ["rankscope", "incidents", "close", run, *([] if number is None else [str(number)]), "--store", place.store]
    return shlex.join(words)


_WIDTH: Final = 100
_HEIGHT: Final = 26
_LEFT: Final = 46
_BOTTOM: Final = 20
_TOP: Final = 6
_CHARACTER: Final = 6.4
"""Width of a character of a label, in units of a chart."""

Point = tuple[float, float]


def sparkline(line: Sparkline) -> Markup:
    """Return the curve of the loss in a row of the list. Values that are not finite are a bar at the lower edge.

    A value between two others that are not finite is a dot.
    """
    finite = [value for _, value in line.points if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    across, down = (_WIDTH - 4) / max(1, line.places - 1), (_HEIGHT - 6) / ((high - low) or 1.0)
    parts: list[list[Point]] = [[]]
    marks = ""
    for place, value in line.points:
        if math.isfinite(value):
            parts[-1].append((2 + place * across, 3 + (high - value) * down))
        else:
            marks += f'<rect class="nan" x="{0.5 + place * across:.1f}" y="{_HEIGHT - 4}" width="3.5" height="3"/>'
            parts.append([])
    dots = _path(part for part in parts if len(part) == 1)
    return Markup(
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="{_path(parts)}"/><path class="dot" d="{dots}"/>{marks}</svg>'
    )


def _parts(x: Floats, y: Floats) -> list[list[Point]]:
    """Return the points of a line, divided where a value is not finite."""
    known = np.flatnonzero(np.isfinite(y))
    divided = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1) if len(known) else []
    return [list(zip(x[part].tolist(), y[part].tolist(), strict=True)) for part in divided]


def _path(parts: Iterable[Sequence[Point]]) -> str:
    """Return the path of several lines. A line of one point is drawn as a dot."""
    found = []
    for part in parts:
        if len(part) == 1:
            x, y = part[0]
            found.append(f"M{x - 0.5:.1f} {y:.1f}h1")
        elif part:
            found.append("M" + "L".join([f"{x:.1f} {y:.1f}" for x, y in part]))
    return "".join(found)


def bar(share: float, kind: str, marks: Iterable[float] = ()) -> Markup:
    """Return a progress bar that is `share` full, from 0 to 1, with gaps at the shares `marks`."""
    gaps = "".join(f'<rect class="gap" x="{1000 * mark:.1f}" y="0" width="3" height="6"/>' for mark in marks)
    return Markup(
        '<svg class="bar" viewBox="0 0 1000 6" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="rail" width="1000" height="6"/>'
        f'<rect class="{escape(kind)}" width="{1000 * share:.1f}" height="6"/>{gaps}</svg>'
    )


def stacked(parts: Sequence[tuple[str, float]], whole: float) -> Markup:
    """Return a bar of one step: (class, seconds) for each phase, against `whole` seconds."""
    x, found = 0.0, []
    for kind, seconds in parts:
        width = max(0.0, 1000 * seconds / whole) if whole > 0 else 0.0
        found.append(f'<rect class="{kind}" x="{x:.1f}" y="0" width="{max(0.0, width - 2):.1f}" height="14"/>')
        x += width
    return Markup(
        '<svg class="phases" viewBox="0 0 1000 14" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(found)}</svg>"
    )


def line_chart(
    curve: Curve, *, label: str, width: int = 760, height: int = 220, is_cut: bool = False, is_styled: bool = False
) -> Markup:
    """Return the chart of `curve` for readers without scripts: axes, lines, NaN ranges and restarts.

    With `is_styled`, attributes of the drawing have its colours, for documents without the style sheet.
    """
    if curve.extent is None:
        return Markup('<p class="empty">No rows of {}.</p>').format(label)
    x_low, x_high = _wider(_visible(curve))
    low, high = _wider(curve.range(is_cut=is_cut))

    words = {tick: f"{tick:g}" for tick in ticks(low, high, 5)}
    edge = max(_LEFT, 10 + _CHARACTER * max(map(len, words.values()), default=0))

    def across(x: Any) -> Any:
        return edge + (x - x_low) / (x_high - x_low) * (width - edge - 8)

    def down(y: Any) -> Any:
        return _TOP + (high - y) / (high - low) * (height - _TOP - _BOTTOM)

    line_style = ' fill="none" stroke="#3d8fc4" font-size="11"' if is_styled else ""
    text_style = ' fill="#808080" stroke="none"' if is_styled else ""
    about = f'role="img" aria-label="{escape(label)}"'
    found = [f'<svg{line_style} class="chart" viewBox="0 0 {width} {height}" {about}>']
    for tick, word in words.items():
        y = down(tick)
        found.append(f'<path class="grid" d="M{edge:g} {y:.1f}H{width - 8}"/>')
        found.append(f'<text{text_style} x="{edge - 6:g}" y="{y + 4:.1f}" text-anchor="end">{word}</text>')
    for tick in ticks(x_low, x_high, 7):
        word = _axis_label(curve, tick)
        x = min(across(tick), width - _CHARACTER * len(word) / 2)  # the last label is not cut
        found.append(f'<text{text_style} x="{x:.1f}" y="{height - 5}" text-anchor="middle">{word}</text>')
    several = any(line.label and not line.role for line in curve.lines)  # of which no other line may be covered
    for one in curve.nonfinite:
        left, right = across(one.first), across(one.last)
        area = f'y="{_TOP}" width="{max(2.0, right - left):.1f}" height="{8 if several else height - _TOP - _BOTTOM}"'
        found.append(f'<rect class="nan" x="{left:.1f}" {area}><title>{one.word}</title></rect>')
    found += [f'<path class="restart" d="M{across(at):.1f} {_TOP}V{height - _BOTTOM}"/>' for at in curve.restarts]
    # An inner element clips the lines at the range: values outside of it are not drawn at its edge.
    wide, tall = width - edge - 8, height - _TOP - _BOTTOM
    area = f'x="{edge:g}" y="{_TOP}" width="{wide:g}" height="{tall}" viewBox="{edge:g} {_TOP} {wide:g} {tall}"'
    found.append(f"<svg {area}>")
    for line in curve.lines:
        for kind, values in ((line.role or "raw", line.value), ("smooth", line.smoothed)):
            found.append(f'<path class="{kind}" d="{_path(_parts(across(line.x), down(values)))}"/>')
    return Markup("".join(found) + "</svg></svg>")


def _visible(curve: Curve) -> tuple[float, float]:
    low, high = curve.extent or (0.0, 1.0)
    first, last = curve.request.first, curve.request.last
    return (low if first is None else first, high if last is None else last)


def _wider(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    margin = (high - low) * 0.04 or abs(high) * 0.5 or 1.0
    return (low - margin, high + margin) if high - low < 1e300 else bounds


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return round numbers between `low` and `high`, about `wanted` of them."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return []
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first = math.ceil(low / step)
    return [float(f"{number * step:.12g}") for number in range(first, math.floor(high / step) + 1)]


def _axis_label(curve: Curve, tick: float) -> str:
    if curve.request.axis is Axis.TIME:
        return utc(tick, "%H:%M")
    if curve.request.axis is Axis.ARRIVAL and curve.lines and len(curve.lines[0].x):
        line = curve.lines[0]
        row = min(int(np.searchsorted(line.x, tick)), len(line.x) - 1)
        return f"{line.step[row]:,}"
    return f"{tick:,.0f}"
