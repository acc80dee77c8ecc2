"""Importers, which store the log files of other training programs as runs of Rankscope.

To add an importer, add a module to this package that defines `IMPORTER`; `common.importer` describes the interface.
`import_records` imports one log. A repeated import of the same log stores only the records that were added to the log
since the last import.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Final

from rankscope_contract.rules.curve import IMPORT_RULES
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.branches import stored_scalars
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
    Options,
)
from rankscope_ingest.importers.common.lines import open_log, readable, refuse_binary, skip_hole
from rankscope_ingest.importers.common.live_run import is_live
from rankscope_ingest.importers.common.log_group import GROUP_LOGS, LogGroup
from rankscope_ingest.importers.common.log_identity import KnownImport, known_imports
from rankscope_ingest.importers.common.reimport import replaceable
from rankscope_ingest.importers.common.report import ImportReport
from rankscope_ingest.importers.common.runner import NO_END, import_records
from rankscope_ingest.importers.newer_log import newer_log
from rankscope_ingest.importers.textlog import nearest_miss

__all__ = [
    "GROUP_LOGS",
    "IMPORT_RULES",
    "NOT_MINE",
    "NO_END",
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
    "LogGroup",
    "Options",
    "detections",
    "find_importer",
    "import_records",
    "importers",
    "is_live",
    "known_imports",
    "newer_log",
    "replaceable",
    "run_name",
    "stored_scalars",
]

_HEAD_BYTES: Final = 65_536
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+")
_ROTATED: Final = re.compile(r"\.\d{1,9}$")


def importers() -> dict[str, Importer]:
    """Return all importers of this package; the key is the name of the importer."""
    return {importer.name: importer for importer in _importers()}


@functools.cache  # the list of modules takes 3 ms, and is needed for each of thousands of logs
def _importers() -> tuple[Importer, ...]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(module.IMPORTER for module in modules if hasattr(module, "IMPORTER"))


def detections(path: Path) -> list[tuple[Importer, Detection]]:
    """Return all importers, each with its confidence that it can read `path`, by descending confidence.

    `path` is a file or a folder. Raises IngestError if the file or folder cannot be read.
    """
    with readable(path):
        head = b"" if path.is_dir() else _head(path)
        found = [(importer, importer.detect(path, head)) for importer in importers().values()]
    return sorted(found, key=lambda pair: -pair[1].confidence)


def find_importer(path: Path) -> Importer:
    """Return the importer that most probably can read `path`. Raises IngestError with the known formats if none can."""
    found = detections(path)
    if not found or found[0][1].confidence <= 0:
        if path.is_file():
            if not path.stat().st_size:
                raise IngestError(f"{path} is empty: check the path")
            refuse_binary(path, _head(path))
        raise IngestError(f"{path} has an unknown format; known formats: {', '.join(sorted(importers()))}{_hint(path)}")
    return found[0][0]


def _hint(path: Path) -> str:
    """Return the requirements of a record, and the missing part of the most similar line of a file."""
    if not path.is_file():
        return ""
    miss = nearest_miss(_head(path))
    return (
        ". A record is a line with a step or an epoch and a number, such as `step 10 loss 2.5`, or a JSON object on a "
        f"line{f'; {miss}' if miss else ''}: see docs/importing-training-logs.md"
    )


def run_name(path: Path) -> str:
    """Return the run name for the log at `path` if the user gave none.

    The run name is the name of the file without suffix, or the name of the folder. A number at the end of a rotated log
    is removed too: `train.log.1` belongs to the run `train`. The names `trainer_state.json` and `checkpoint-N` are the
    same in every run, so the name of the enclosing folder is returned instead.
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
        raise IngestError(f"{path} is neither a file nor a folder: write its content to a file first")
    with open_log(path) as file:
        skip_hole(file)
        return file.read(_HEAD_BYTES)
