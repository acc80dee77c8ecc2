"""Render the templates of the pages: the environment of Jinja2, and the functions that templates call.

Every value is escaped for HTML. `|safe` and `Markup` are only for SVG that this package draws.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from rankscope_contract.model.events import WHOLE_MODEL, RunState
from rankscope_storage.base.escaping import path_segment
from rankscope_view.data.curves import notice
from rankscope_view.data.incidents import STATE_TEXTS, Incident, happening, sentence_of
from rankscope_view.data.runs import STOPPING, RunRow, open_count
from rankscope_view.pages import format as formats
from rankscope_view.pages import svg

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
        *(svg.bar, svg.sparkline, svg.stacked, svg.line_chart),
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
