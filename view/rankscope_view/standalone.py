"""A single HTML file with styles, scripts and curves: it needs no server and no network.

A policy in the file permits exactly these scripts and styles, by their hashes.

The style sheets and the scripts of the pages are joined, because the document loads no file.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rankscope_view.assets import ASSETS
from rankscope_view.data.curves import Line
from rankscope_view.pages.format import text
from rankscope_view.pages.parts import icon

_IMPORT: Final = re.compile(r'^import \{ ([^}]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


@functools.cache
def bundle(entry: str) -> str:
    """Return the module `entry` and all modules that it imports as one script without imports.

    Each imported module becomes a function that is called once, so that its names remain its own.
    """
    modules: dict[str, str] = {}
    _collect(entry, modules)
    main = modules.pop(entry)
    parts = [
        f"const {name} = (() => {{\n{code}\nreturn {{ {', '.join(_exports(name))} }};\n}})();\n"
        for name, code in modules.items()
    ]
    return f'"use strict";\n(() => {{\n{"".join(parts)}{main}}})();\n'


@functools.cache
def style() -> str:
    """Return the style sheets of all pages and that of a single file as one."""
    return "\n".join(_text(name) for name in ("uPlot.min.css", "style.css", "report.css") if name in ASSETS)


@functools.cache
def chart_library() -> str:
    """Return the script of uPlot; empty if it is not installed."""
    return _text("uPlot.iife.js") if "uPlot.iife.js" in ASSETS else ""


def _collect(name: str, modules: dict[str, str]) -> None:
    """Add the module `name` to `modules`, after the modules that it imports."""
    source = _text(f"{name}.js")
    for _, other in _IMPORT.findall(source):
        if other not in modules:
            _collect(other, modules)
    code = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {found[2]};\n", source)
    modules[name] = _EXPORT.sub(r"\1", code)


def _exports(name: str) -> list[str]:
    return [found[2] for found in _EXPORT.finditer(_text(f"{name}.js"))]


def _text(name: str) -> str:
    return ASSETS[name].read().decode()


_DIGITS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePage:
    """The parts of a file. All but `title`, `subject` and `documents` are HTML."""

    title: str
    subject: str  # name in the header
    place: str  # text in the header behind the subject
    state: str  # text at the end of the header
    body: str
    kind: str  # name of the page, for scripts and styles
    axis: str  # default axis of the curves
    documents: Mapping[str, str] = field(default_factory=dict)  # JSON for scripts, by the id of its element


@dataclass(frozen=True, slots=True)
class File:
    """A file: the complete HTML document, and its policy."""

    html: str
    policy: str


def file(page: FilePage) -> File:
    """Return the file of a page, with its styles and scripts."""
    sheet = style()
    scripts = [ASSETS["theme.js"].read().decode(), chart_library(), bundle("app")]
    permitted = policy(scripts, sheet)
    logo = base64.b64encode(ASSETS["icon.svg"].read()).decode()
    first, *others = [f"<script>{script}</script>" for script in scripts]
    data = "\n".join(_data(name, document) for name, document in page.documents.items())
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{permitted}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(page.title)} · Rankscope</title>
<link rel="icon" href="data:image/svg+xml;base64,{logo}">
<style>{sheet}</style>
{first}
</head>
<body data-page="{page.kind}" data-axis="{page.axis}">
<header class="top"><span class="brand">{icon("logo")}<b>Rankscope</b></span>
<span class="crumbs"><b><bdi>{text(page.subject)}</bdi></b><span class="slash">/</span><span>{page.place}</span></span>
<span class="right"><span class="history"><i></i>{page.state}</span>
<button id="theme" title="Theme (T)" aria-label="Change the theme">{icon("theme")}</button>
<button id="help" title="Keys (?)" aria-label="Keys"><kbd>?</kbd></button></span></header>
<main class="{page.kind}">{page.body}</main>
{data}
{"".join(others)}
</body>
</html>
"""
    return File(html, permitted)


def _data(name: str, document: str) -> str:
    """Return a JSON document as an element that is no script. It cannot end the element early."""
    escaped = document.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{escaped}</script>'


def policy(scripts: Sequence[str], sheet: str) -> str:
    """Return a Content-Security-Policy that permits `scripts` and `sheet` by their hashes, and no request."""
    allowed = " ".join(_hash(script) for script in scripts if script)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(sheet)}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def kept_line(line: Line) -> dict[str, Any]:
    """Return a line for JSON. Columns that repeat another one are null, and `logic.js` completes them."""
    places = [short_number(round(x, 3)) for x in line.x.tolist()]
    value, low, high, smoothed = (_rounded(column) for column in (line.value, line.low, line.high, line.smoothed))
    return {
        "label": line.label,
        "role": line.role,
        "x": places,
        "step": None if line.step.tolist() == places else line.step.tolist(),
        "value": value,
        "smoothed": smoothed if any(one is not None for one in smoothed) else None,
        "low": None if low == value else low,
        "high": None if high == value else high,
    }


def _rounded(values: Any) -> list[float | int | None]:
    """Return values with seven digits, which no chart can distinguish from all digits; null in place of NaN."""
    finite = np.isfinite(values).tolist()
    return [
        short_number(float(f"{one:.{_DIGITS}g}")) if is_finite else None
        for one, is_finite in zip(values.tolist(), finite, strict=True)
    ]


def short_number(value: float) -> float | int:
    """Return an integer in place of a float with an integer value, which is shorter in JSON."""
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
