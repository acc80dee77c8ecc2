"""Read the output of a sink with the importer: rows of datasets, without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankscope_ingest.importers import importers
from rankscope_ingest.importers.common.importer import Faults, ImportedBlock, ImportedRecord


def imported(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], Faults]:
    """Return the rows of each dataset, as dictionaries without nulls, and the faults."""
    faults = Faults()
    rows: dict[str, list[dict[str, Any]]] = {}
    for item in importers()["msprobe"].read(folder, faults):
        tables: dict[str, list[dict[str, Any]]] = {}
        if isinstance(item, ImportedBlock):
            tables = {name: table.to_pylist() for name, table in item.tables.items()}
        elif isinstance(item, ImportedRecord):
            tables = {name: [dict(row) for row in listed] for name, listed in item.rows.items()}
        for name, listed in tables.items():
            rows.setdefault(name, []).extend(listed)
    return rows, faults
