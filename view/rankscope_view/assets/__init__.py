"""Files that pages load: our style sheet and scripts, and uPlot from the package `uplot-python`.

A report contains them: it loads no file, so that the style sheets and the scripts are joined.

uPlot (MIT licence, Copyright (c) 2021 Leon Sorokin) is read as a file of that package; its Python code is not imported.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_IMPORT: Final = re.compile(r'^import \{ ([^}]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
UPLOT: Final = {
    "uPlot.iife.js": "655bc8aa33781e8721c5af6b59f1699c03c9bda951aa74a6ab518ac20cc4326d",
    "uPlot.min.css": "3f121cd4a997b634e07a887658850018e475c26f0bddd874109a8d382c19de87",
}
"""SHA-256 of the files of uPlot, which a test compares with the installed files."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, and its media type."""

    path: Path
    type: str

    def read(self) -> bytes:
        """Return the content of the file."""
        return self.path.read_bytes()


def _uplot_folder() -> Path | None:
    """Return the folder with the files of uPlot, without an import of the package; None if it is not installed."""
    found = importlib.util.find_spec("uplot")
    return None if found is None or found.origin is None else Path(found.origin).parent / "static"


def _assets() -> dict[str, Asset]:
    own = [path for path in _FOLDER.iterdir() if path.suffix in _TYPES]
    folder = _uplot_folder()
    others = [] if folder is None else [folder / name for name in UPLOT]
    return {path.name: Asset(path, _TYPES[path.suffix]) for path in (*own, *others)}


ASSETS: Final = _assets()
"""All files by name."""


@functools.cache
def digest() -> str:
    """Return a short digest of all files, which their addresses contain: browsers may keep them forever."""
    content = b"".join(ASSETS[name].read() for name in sorted(ASSETS))
    return hashlib.sha256(content).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAssets:
    """The content of a file apart from its document: styles, scripts, the logo in base64, and the policy."""

    sheet: str
    scripts: tuple[str, ...]
    logo: str
    policy: str


@functools.cache
def assets_of_file() -> FileAssets:
    """Return the styles and scripts of all files. The first script selects the theme before the document is shown.

    The policy permits exactly these by their hashes, and no request.
    """
    sheet = "\n".join(_text(name) for name in ("uPlot.min.css", "style.css", "report.css") if name in ASSETS)
    library = [_text("uPlot.iife.js")] if "uPlot.iife.js" in ASSETS else []
    scripts = (_text("theme.js"), *library, bundle("app"))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(sheet)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    logo = base64.b64encode(ASSETS["icon.svg"].read()).decode()
    return FileAssets(sheet=sheet, scripts=scripts, logo=logo, policy=policy)


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


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
