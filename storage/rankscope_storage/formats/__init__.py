"""Export of a run to the formats of other tools, one module per format."""

from __future__ import annotations

from rankscope_storage.formats.export import ExportFormat, ExportOptions, ExportReport, Progress

__all__ = ["ExportFormat", "ExportOptions", "ExportReport", "Progress", "export_formats"]


def export_formats() -> dict[str, ExportFormat]:
    """Return all export formats of this package, by name."""
    from rankscope_storage.formats import csv_msprobe, openmetrics, parquet, sqlite, tensorboard  # noqa: PLC0415 - slow

    modules = (csv_msprobe, openmetrics, parquet, sqlite, tensorboard)
    return {module.EXPORT_FORMAT.name: module.EXPORT_FORMAT for module in modules}
