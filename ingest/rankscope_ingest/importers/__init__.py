"""Readers of foreign logs. An importer is added by adding a file here that defines `IMPORTER`.

What an importer yields, and how it tells of lines it cannot read, is in `base`; `import_file` brings a file into the
store, and can be repeated: what is stored already is not stored again.
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
from rankscope_ingest.importers.common.lines import refuse_no_text
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
        said = [(importer, importer.detect(path, head)) for importer in importers().values()]
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    return sorted(said, key=lambda pair: -pair[1].confidence)


def find_importer(path: Path) -> Importer:
    """Return the importer that is surest to understand `path`. Raises IngestError naming the formats when none is."""
    said = detections(path)
    if not said or said[0][1].confidence <= 0:
        if path.is_file():
            refuse_no_text(path, _head(path))
        raise IngestError(f"{path} is in no known format; known are {', '.join(sorted(importers()))}")
    return said[0][0]


def run_name(path: Path) -> str:
    """Return what a run is called that is imported without a name: after the log, or the folder that names it.

    `train.log.1`, which a rotation leaves behind, is a part of `train`; `trainer_state.json` is called the same
    everywhere, and a checkpoint is one of many, so that the folder around them is the run.
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
