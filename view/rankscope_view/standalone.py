"""A single HTML file with styles, scripts and curves: it needs no server and no network.

A policy in the file permits exactly these scripts and styles, by their hashes.

The style sheets and the scripts of the pages are joined, because the document loads no file.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_view.assets import ASSETS
from rankscope_view.data.curves import Line

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
class FileAssets:
    """The content of a file besides its document: styles, scripts, the logo in base64, and the policy."""

    sheet: str
    scripts: tuple[str, ...]
    logo: str
    policy: str


@functools.cache
def assets_of_file() -> FileAssets:
    """Return the styles and scripts of all files. The first script selects the theme before the document is shown."""
    sheet = style()
    scripts = (_text("theme.js"), chart_library(), bundle("app"))
    logo = base64.b64encode(ASSETS["icon.svg"].read()).decode()
    return FileAssets(sheet=sheet, scripts=scripts, logo=logo, policy=policy(scripts, sheet))


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
