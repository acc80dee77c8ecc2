"""Export of a run to the formats of other tools.

Each module of this folder that defines `EXPORT_FORMAT` adds a format.
"""

from __future__ import annotations

import importlib
import pkgutil

from rankscope_storage.formats.common.base import ExportFormat, ExportOptions, ExportReport, Progress

__all__ = ["ExportFormat", "ExportOptions", "ExportReport", "Progress", "export_formats"]


def export_formats() -> dict[str, ExportFormat]:
    """Return all export formats of this package, by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        export_format: ExportFormat | None = getattr(
            importlib.import_module(f"{__name__}.{module.name}"), "EXPORT_FORMAT", None
        )
        if export_format is not None:
            found[export_format.name] = export_format
    return found
