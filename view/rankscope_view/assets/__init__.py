"""Files that pages load: our style sheet and scripts, and uPlot from the package `uplot-python`.

uPlot (MIT licence, Copyright (c) 2021 Leon Sorokin) is read as a file of that package; its Python code is not imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
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
