"""Importers of the logs of other programs. To add an importer, add a module here that defines `IMPORTER`.

`common.importer` describes the interface of an importer. `import_records` stores a log; it can be repeated and stores
only new records.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import (
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
from rankscope_ingest.importers.common.lines import readable, refuse_no_text
from rankscope_ingest.importers.common.log_identity import KnownImport, known_imports
from rankscope_ingest.importers.common.runner import ImportReport, import_records

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
    "KnownImport",
    "detections",
    "find_importer",
    "import_records",
    "importers",
    "known_imports",
    "run_name",
]

_HEAD_BYTES: Final = 65_536
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+")
_ROTATED: Final = re.compile(r"\.\d{1,9}$")


def importers() -> dict[str, Importer]:
    """Return all importers of this package by name."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {module.IMPORTER.name: module.IMPORTER for module in modules if hasattr(module, "IMPORTER")}


def detections(path: Path) -> list[tuple[Importer, Detection]]:
    """Return each importer with its detection for the file or folder, in descending confidence.

    Raises IngestError if `path` cannot be read.
    """
    with readable(path):
        head = b"" if path.is_dir() else _head(path)
        found = [(importer, importer.detect(path, head)) for importer in importers().values()]
    return sorted(found, key=lambda pair: -pair[1].confidence)


def find_importer(path: Path) -> Importer:
    """Return the importer with the highest confidence for `path`. Raises IngestError with the formats if all are 0."""
    found = detections(path)
    if not found or found[0][1].confidence <= 0:
        if path.is_file():
            refuse_no_text(path, _head(path))
        raise IngestError(f"{path} is in no known format; known are {', '.join(sorted(importers()))}")
    return found[0][0]


def run_name(path: Path) -> str:
    """Return the name of a run that is imported without one: the name of the log, or of the folder that names it.

    `train.log.1`, the name after a rotation, is a part of `train`. The names `trainer_state.json` and `checkpoint-N`
    are the same in every run, so the folder around them names the run.
    """
    path = path.absolute()
    while path.stem == "trainer_state" or _CHECKPOINT.fullmatch(path.name):
        if path.parent == path:
            break
        path = path.parent
    if path.is_dir():
        return path.name or "import"
    return Path(_ROTATED.sub("", path.name)).stem


def _head(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise IngestError(f"{path} is neither a file nor a folder: write it to a file first")
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
