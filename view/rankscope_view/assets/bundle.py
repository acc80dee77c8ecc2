"""Join the style sheets and the scripts of the pages, for a document that loads no file."""

from __future__ import annotations

import functools
import re
from typing import Final

from rankscope_view.assets import ASSETS

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
def style(own: str) -> str:
    """Return the style sheets of all pages and the sheet `own` of one page as one."""
    return "\n".join(_text(name) for name in ("uPlot.min.css", "style.css", own) if name in ASSETS)


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
