"""Imports of modules that are found in a folder, or when a configuration first uses them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def import_folder(package: str) -> Any:
    """Import a module, with all modules of its folder if it is a package, and return it."""
    found = importlib.import_module(package)
    for module in pkgutil.iter_modules(getattr(found, "__path__", ())):
        importlib.import_module(f"{package}.{module.name}")
    return found


def extension(part: str) -> Any:
    """Return the module `part` of the package for scripts of another monitor."""
    return import_folder(f"rankscope_msprobe.{part}")
