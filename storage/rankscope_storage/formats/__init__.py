"""Writers of other tools' formats. A format is added by adding a file here that defines `EXPORTER`."""

from __future__ import annotations

import importlib
import pkgutil

from rankscope_storage.formats.common.base import Exporter, ExportOptions, ExportReport, Progress

__all__ = ["ExportOptions", "ExportReport", "Exporter", "Progress", "exporters"]


def exporters() -> dict[str, Exporter]:
    """Return every exporter of this package by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        exporter: Exporter | None = getattr(importlib.import_module(f"{__name__}.{module.name}"), "EXPORTER", None)
        if exporter is not None:
            found[exporter.name] = exporter
    return found
