"""The Grafana boards. To add a board, add a module with a function `board()` to this folder.

The name of the module becomes the uid of the board. The boards need Grafana's SDK, which only developers install. Its
import is deferred to `boards()`, so that `boards.elements.pages` does not need the SDK.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard


def boards() -> dict[str, Dashboard]:
    """Return all boards by module name.

    The uid of a board is always `rankscope-<module name>`, so that links remain valid.
    """
    found = {}
    modules = (module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)
    for name in sorted(modules):
        board: Dashboard = importlib.import_module(f"{__name__}.{name}").board()
        found[name] = board.uid(f"rankscope-{name.replace('_', '-')}").readonly()
    return found
