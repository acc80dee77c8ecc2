"""The package for scripts of another monitor, of which the parts are imported when a configuration first uses them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def extension(part: str) -> Any:
    """Return the module `part` of the package. All modules of a folder are imported with it."""
    found = importlib.import_module(f"rankscope_msprobe.{part}")
    for module in pkgutil.iter_modules(getattr(found, "__path__", ())):
        importlib.import_module(f"{found.__name__}.{module.name}")
    return found
