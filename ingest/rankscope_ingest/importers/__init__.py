"""Readers of foreign logs. An importer is added by adding a file here that defines `IMPORTER`.

What an importer yields, and how it tells of lines it cannot read, is in `base`; `import_file` brings a file into the
store, and can be repeated: what is stored already is not stored again.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Final

from rankscope_ingest.errors import IngestError
from rankscope_ingest.importers.base import Fault, Faults, ImportedRecord, Importer
from rankscope_ingest.importers.intake import ImportReport, import_records

__all__ = [
    "Fault",
    "Faults",
    "ImportReport",
    "ImportedRecord",
    "Importer",
    "find_importer",
    "import_records",
    "importers",
]

_HEAD_BYTES: Final = 65_536


def importers() -> dict[str, Importer]:
    """Return every importer of this package by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        importer = getattr(importlib.import_module(f"{__name__}.{module.name}"), "IMPORTER", None)
        if importer is not None:
            found[importer.name] = importer
    return found


def find_importer(path: Path) -> Importer:
    """Return the importer that is surest to understand the file. Raises IngestError naming the formats when none is."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    known = importers()
    surest = max(known.values(), key=lambda importer: importer.detect(path, head))
    if surest.detect(path, head) <= 0:
        raise IngestError(f"{path} is in no known format; known are {', '.join(sorted(known))}")
    return surest
