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
from rankscope_ingest.importers.base import (
    NOT_MINE,
    Detection,
    Fault,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRecord,
    ImportedRun,
    Importer,
)
from rankscope_ingest.importers.intake import ImportReport, import_records

__all__ = [
    "NOT_MINE",
    "Detection",
    "Fault",
    "Faults",
    "ImportReport",
    "Imported",
    "ImportedBlock",
    "ImportedRecord",
    "ImportedRun",
    "Importer",
    "detections",
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


def detections(path: Path) -> list[tuple[Importer, Detection]]:
    """Return what every importer says of the file or folder, the surest first. Raises IngestError when unreadable."""
    try:
        head = b"" if path.is_dir() else _head(path)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    said = [(importer, importer.detect(path, head)) for importer in importers().values()]
    return sorted(said, key=lambda pair: -pair[1].confidence)


def find_importer(path: Path) -> Importer:
    """Return the importer that is surest to understand `path`. Raises IngestError naming the formats when none is."""
    said = detections(path)
    if not said or said[0][1].confidence <= 0:
        raise IngestError(f"{path} is in no known format; known are {', '.join(sorted(importers()))}")
    return said[0][0]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
