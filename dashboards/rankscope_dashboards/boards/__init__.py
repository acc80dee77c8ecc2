"""The boards. To add one, add a module here with a function `board()`. The module name becomes the uid of the board."""

from __future__ import annotations

import importlib
import pkgutil

from grafana_foundation_sdk.builders.dashboard import Dashboard


def boards() -> dict[str, Dashboard]:
    """Return all boards by module name. Each uid is `rankscope-<module name>`, so links to a board do not change."""
    found = {}
    modules = (module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)
    for name in sorted(modules):
        board: Dashboard = importlib.import_module(f"{__name__}.{name}").board()
        found[name] = board.uid(f"rankscope-{name.replace('_', '-')}").readonly()
    return found
