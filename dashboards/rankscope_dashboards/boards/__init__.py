"""The boards. One is added by adding a file here with a function `board()`; the file's name becomes the board's uid."""

from __future__ import annotations

import importlib
import pkgutil

from grafana_foundation_sdk.builders.dashboard import Dashboard


def boards() -> dict[str, Dashboard]:
    """Return every board by the name of its file; links to `rankscope-<name>` stay stable as long as the file does."""
    found = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        board: Dashboard = importlib.import_module(f"{__name__}.{module.name}").board()
        found[module.name] = board.uid(f"rankscope-{module.name.replace('_', '-')}").readonly()
    return found
