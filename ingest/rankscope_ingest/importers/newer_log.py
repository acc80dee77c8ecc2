"""Find a log of JSON lines that is newer than the checkpoints of the Hugging Face Trainer in the same folder.

ms-swift and LLaMA-Factory append each step to such a log, and write a `trainer_state.json` only with a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from rankscope_ingest.importers.common.importer import Faults, ImportedBlock, Importer
from rankscope_ingest.importers.common.lines import readable
from rankscope_ingest.importers.jsonl import IMPORTER as JSON_LINES
from rankscope_ingest.importers.trainer_state import IMPORTER as TRAINER_STATE
from rankscope_ingest.importers.trainer_state import find_states, is_checkpoint


def newer_log(checkpoints: Path) -> Path | None:
    """Return the newest log of JSON lines that has later steps than all `trainer_state.json` files at `checkpoints`.

    `checkpoints` is the folder of a run or of a checkpoint. The log is in this folder, or next to the checkpoint.
    Return None if there is no such log. Raises IngestError if a file cannot be read.
    """
    with readable(checkpoints):
        written = max((state.modified or 0.0 for state in find_states(checkpoints)), default=0.0)
        folders = [checkpoints, *([checkpoints.absolute().parent] if is_checkpoint(checkpoints.absolute()) else [])]
        files = [path for folder in folders for path in folder.iterdir() if path.suffix in {".jsonl", ".ndjson"}]
        newer = [path for path in files if path.is_file() and path.stat().st_mtime > written]
        known = _last_step(checkpoints, TRAINER_STATE) if newer else None
        for path in sorted(newer, key=lambda path: -path.stat().st_mtime):
            step = _last_step(path, JSON_LINES)
            if step is not None and (known is None or step > known):
                return path
    return None


def _last_step(path: Path, importer: Importer) -> int | None:
    """Return the highest step in the log at `path`, or None without a step."""
    blocks = (item for item in importer.read(path, Faults()) if isinstance(item, ImportedBlock))
    steps = (pc.max(table.column("step")).as_py() for block in blocks for table in block.tables.values())
    return max((step for step in steps if step is not None), default=None)
