"""Parts that several pages share: the document, the state of a run, names of tensors, incidents, panels."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

from rankscope_contract.model.events import WHOLE_MODEL, RunState
from rankscope_storage.base.escaping import path_segment
from rankscope_view.data.incidents import Incident, happening
from rankscope_view.data.runs import STOPPING, RunRow, open_count
from rankscope_view.pages.format import text

ICONS: Final = {
    "running": '<path d="M4 2.5v11l9-5.5z"/>',
    "completed": '<path fill-rule="evenodd" d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zM4.2 8l1.3-1.3L7 8.200l3.700-3.700L12 5.800l-5 5z"/>',
    "pending": '<path fill-rule="evenodd" d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zm0 1.800a5.200 5.200 0 1 1 0 10.400A5.200 5.200 0 0 1 8 2.800zM7.200 4.500v4.200l3 1.800.8-1.200-2.200-1.400V4.500z"/>',
    "failed": '<path fill-rule="evenodd" d="M5 1h6l4 4v6l-4 4H5l-4-4V5zm.9 3.800L4.800 5.900 6.900 8l-2.100 2.100 1.100 1.100L8 9.100l2.100 2.100 1.100-1.100L9.100 8l2.100-2.100-1.100-1.100L8 6.900z"/>',
    "stopped": '<path d="M3 3h10v10H3z"/>',
    "stalled": '<path d="M3.500 2.500h3v11h-3zM9.500 2.500h3v11h-3z"/>',
    "stopping": '<path d="M2 2h3.500v1.600H3.600v1.900H2zM10.500 2H14v3.500h-1.600V3.600h-1.900zM2 10.500h1.600v1.900h1.900V14H2zM12.400 10.500H14V14h-3.500v-1.600h1.900zM7 2h2v1.600H7zM7 12.400h2V14H7zM2 7h1.600v2H2zM12.400 7H14v2h-1.600z"/>',
    "unknown": '<path fill-rule="evenodd" d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zm0 2a5 5 0 1 1 0 10A5 5 0 0 1 8 3z"/>',
    "critical": '<path fill-rule="evenodd" d="M5 1h6l4 4v6l-4 4H5l-4-4V5zm2.100 3l.3 5h1.200l.3-5zm.1 6.200v1.700h1.600v-1.700z"/>',
    "warning": '<path fill-rule="evenodd" d="M8 1l7.500 13.500H.5zm-.9 5l.3 4.500h1.200L8.900 6zm.1 5.500v1.600h1.600v-1.600z"/>',
    "info": '<path fill-rule="evenodd" d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zm-.9 5.800h1.800V12H7.100zm0-2.800h1.800v1.700H7.100z"/>',
    "search": '<path fill-rule="evenodd" d="M7 1.500a5.500 5.500 0 1 0 3.300 9.900l3.200 3.200 1.100-1.100-3.200-3.200A5.500 5.500 0 0 0 7 1.500zM7 3a4 4 0 1 1 0 8 4 4 0 0 1 0-8z"/>',
    "theme": '<path fill-rule="evenodd" d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zm0 1.600v10.800A5.400 5.400 0 0 1 8 2.600z"/>',
    "logo": '<path d="M1 3h6v2H1zM1 7h9v2H1zM1 11h4v2H1zM11 1h2v14h-2zM14 7h1v2h-1z"/>',
    "checkpoint": '<path d="M8 2l6 6-6 6-6-6z"/>',
    "evaluation": '<path fill-rule="evenodd" d="M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zm0 2.500a3.500 3.500 0 1 1 0 7 3.500 3.500 0 0 1 0-7z"/>',
    "restart": '<path d="M1.500 3h13L8 14z"/>',
    "incident": '<path d="M3.200 2L8 6.700 12.800 2 14 3.200 9.300 8l4.700 4.800-1.200 1.200L8 9.300 3.200 14 2 12.800 6.700 8 2 3.200z"/>',
    "step": '<path d="M8 5.500a2.500 2.500 0 1 0 0 5 2.500 2.500 0 0 0 0-5z"/>',
    "outside": '<path d="M8 4l5 8H3z"/>',
    "other": '<path d="M3 7h10v2H3z"/>',
}  # fmt: skip
"""Paths of the icons in a square of 16 units."""

STATES: Final = (*RunState, STOPPING)
TABS: Final = (
    ("", "Overview", "o"),
    ("tensors", "Tensors", "t"),
    ("ranks", "Ranks", "k"),
    ("incidents", "Incidents", "i"),
    ("events", "Events", "e"),
)
"""Last part of the address, name, and the key behind `g` of each tab of a run."""


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
        """Return the address of a page below the prefix, escaped for an HTML attribute. None leaves out a parameter."""
        path = "/".join(path_segment(segment) for segment in segments)
        # A browser removes the segments `.` and `..` even if they are encoded; their name goes into the query.
        given = {name.rstrip("_"): value for name, value in query.items() if value is not None}
        if len(segments) > 1 and segments[0] == "runs" and segments[1] in (".", ".."):
            path = "/".join(("runs", "-", *segments[2:]))
            given["run"] = segments[1]
        words = urlencode(given, quote_via=quote)
        return text(f"{self.base}/{path}{'?' if words else ''}{words}")


def icon(name: str, kind: str = "") -> str:
    """Return the icon `name`, with the colour class `kind` or that of the name."""
    return (
        f'<svg class="i {kind or name}" viewBox="0 0 16 16" aria-hidden="true">{ICONS.get(name, ICONS["other"])}</svg>'
    )


def state_word(state: str | None) -> str:
    """Return the word for a state of a run."""
    return {"": "Unknown", RunState.PENDING.value: "Waiting"}.get(state or "", (state or "").capitalize())


def state_words(row: RunRow) -> tuple[str, str]:
    """Return the icon and the words of the state of a run; of an ended run, with the number of its open incidents."""
    if row.end_sentence and row.state != RunState.FAILED:
        return "critical", f"{state_word(row.state)}, {open_count(len(row.incidents))}"
    return row.state if row.state is not None and row.state in STATES else "unknown", text(state_word(row.state))


def run_pill(row: RunRow) -> str:
    """Return the state of a run as icon and words on a coloured ground, which is that of a failure if it is ruined."""
    kind, words = state_words(row)
    return f'<span class="pill {"failed" if kind == "critical" else kind}">{icon(kind)}{words}</span>'


def page_title(row: RunRow, title: str) -> str:
    """Return the title of a page of a run, which begins with the number of open incidents if there are any."""
    return f"{open_count(len(row.incidents))}: {title}" if row.incidents else title


def tag_list(tags: Iterable[tuple[str, str]]) -> str:
    """Return tags of a run."""
    return "".join(
        f'<span class="tag"><bdi>{text(key)}{"=" if value else ""}<b>{text(value)}</b></bdi></span>'
        for key, value in tags
    )


def tensor_name(name: str) -> str:
    """Return the name of a tensor on one line, of which the prefix and the middle give way first."""
    name = name or WHOLE_MODEL
    parts = name.split(".")
    at = next((number for number, part in enumerate(parts[:-1]) if part.isdigit()), None)
    if at is None:
        head, layer, middle, leaf = "", "", ".".join(parts[:-2]), ".".join(parts[-2:])
    else:
        layer = ".".join(parts[max(0, at - 1) : at + 1])
        head, rest = ".".join(parts[: max(0, at - 1)]), parts[at + 1 :]
        middle, leaf = ".".join(rest[:-2]), ".".join(rest[-2:])
    spans = ((head, "th"), (layer, "tl"), (middle, "tm"), (leaf, "te"))
    shown = [f'<span class="{kind}">{text(part)}{"" if kind == "te" else "."}</span>' for part, kind in spans if part]
    return f'<bdi class="tensor" title="{text(name)}">{"".join(shown)}</bdi>'


def incident_line(one: Incident, more: int = 0) -> str:
    """Return an incident in two lines: rank and tensor, then the event and the step."""
    subject = [f"rank {one.rank}"] if one.rank is not None else []
    first = " · ".join([*subject, *([] if one.tensor is None else [tensor_name(one.tensor)])]) or text(
        one.rule or "incident"
    )
    further = f' <span class="count">+{more}</span>' if more else ""
    severity = "critical" if one.is_critical else "warning"
    what = happening(one)
    if one.rank is not None and one.tensor is None:
        what = what.removeprefix(f"rank {one.rank}").lstrip(": ")  # the line above names the rank
    return (
        f'<span class="trouble">{icon(severity)}<span><span class="first">{first}{further}</span>'
        f'<span class="second">{text(what)}{one.place}</span></span></span>'
    )


def close_command(place: Place, run: str, number: int | None = None) -> str:
    """Return the command that closes the open incidents of a run, or only one, with a button that copies it."""
    words = ["rankscope", "incidents", "close", run, *([] if number is None else [str(number)]), "--store", place.store]
    command = text(shlex.join(words))
    return f'<button class="copy" data-text="{command}">Copy</button><code>{command}</code>'


def panel(title: str, body: str, *, note: str = "", aside: str = "", kind: str = "", name: str = "") -> str:
    """Return a box with a title. `note` is small text behind it; `aside` and `body` are HTML."""
    named = f' id="{name}"' if name else ""
    return (
        f'<section class="panel {kind}"{named}><header><h2>{title}</h2><span class="dim">{note}</span>'
        f'<span class="aside">{aside}</span></header>{body}</section>'
    )


def verdict(severity: str, sentence: str, evidence: str = "", actions: str = "") -> str:
    """Return a finding as a sentence, with its evidence and links. The arguments are HTML."""
    second = f"<p>{evidence}</p>" if evidence else ""
    return (
        f'<div class="verdict {severity}">{icon(severity)}<div><strong>{sentence}</strong>{second}</div>{actions}</div>'
    )


def fact_table(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and values, which are HTML, as a table."""
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in facts)
    return f'<table class="facts">{rows}</table>'


def segmented(label: str, choices: Sequence[tuple[str, str, str]], chosen: str, name: str) -> str:
    """Return a row of links of which one is chosen: (value, word, address)."""
    links = "".join(
        f'<a href="{url}" data-{name}="{text(value)}"{" aria-current=true" if value == chosen else ""}>{text(word)}</a>'
        for value, word, url in choices
    )
    return f'<span class="choice"><span class="label">{text(label)}</span><span class="segmented" role="group">{links}</span></span>'


def tabs(place: Place, row: RunRow, chosen: str) -> str:
    """Return the tabs of a run."""
    found = []
    for name, word, key in TABS:
        segments = ("runs", row.run, name) if name else ("runs", row.run)
        badge = f' <span class="count bad">{len(row.incidents)}</span>' if name == "incidents" and row.incidents else ""
        current = ' aria-current="page"' if name == chosen else ""
        found.append(f'<a href="{place.url(*segments)}" data-go="{key}"{current}>{word}{badge}</a>')
    found.append(f'<a href="{place.url("compare", run=row.run)}" data-go="c">Compare</a>')
    return f'<nav class="tabs" id="tabs" data-live>{"".join(found)}</nav>'


def run_document(place: Place, row: RunRow, title: str, body: str, *, page: str, tab: str = "", last: str = "") -> str:
    """Return the document of a page of a run; `last` is the name of the last place above it, by default the title."""
    crumbs = [(row.run, place.url("runs", row.run)), (last or title, None)]
    title = page_title(row, f"{title} of {row.run}")
    return document(place, title, body, crumbs=crumbs, nav=tabs(place, row, tab or page), page=page)


def document(
    place: Place, title: str, body: str, *, crumbs: Sequence[tuple[str, str | None]] = (), nav: str = "",
    page: str = "", about: str = "",
) -> str:  # fmt: skip
    """Return a complete HTML document. `crumbs` are (name, address) of the places above the page.

    `about` is small text behind them.
    """
    steps = "".join(
        f'<span class="slash">/</span>{f"<a href={chr(34)}{url}{chr(34)}>" if url else "<b>"}<bdi>{text(name)}</bdi>{"</a>" if url else "</b>"}'
        for name, url in crumbs
    )
    state = (
        '<span class="live" id="following" data-live><i></i><span>Live</span></span>'
        if place.is_live
        else '<span class="history" id="following" data-live><i></i>History</span>'
    )
    asset = f"{place.base}/assets/{place.assets}"
    service = f'<a href="{place.url("service")}">Service</a>' if place.has_service else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)} · Rankscope</title>
<link rel="icon" href="{asset}/icon.svg">
<link rel="stylesheet" href="{asset}/uPlot.min.css">
<link rel="stylesheet" href="{asset}/style.css">
<script src="{asset}/theme.js"></script>
<script src="{asset}/uPlot.iife.js" defer></script>
<script src="{asset}/app.js" type="module"></script>
</head>
<body data-page="{page}" data-base="{text(place.base)}" data-version="{"" if place.version < 0 else place.version}">
<header class="top"><a class="brand" href="{place.url()}" data-go="r">{icon("logo")}<b>Rankscope</b></a>
<span class="crumbs"><a href="{place.url()}">Runs</a>{steps}{f'<span class="dim" id="about" data-live>{about}</span>' if about else ""}</span>
<span class="right">{service}{state}<button id="theme" title="Theme (T)" aria-label="Change the theme">{icon("theme")}</button>
<button id="help" title="Keys (?)" aria-label="Keys"><kbd>?</kbd></button></span></header>
{nav}
<main>{body}</main>
</body>
</html>
"""
