"""Import TensorBoard event files: one file, or a folder of them, such as `runs/` of a training or a Rankscope export.

Numbers become scalars under stored names. Tags in msprobe's format become rows of `tensor_stats`, and texts become
events of type note. Images, audio, graphs and histograms are skipped, because no dataset stores them. The files of one
folder are read as one continuous log. A new attempt begins where the step of a tag decreases, or where a session
restarts at an earlier step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import NOT_MINE, SETTLED_SECONDS, Detection, Faults, Imported

if TYPE_CHECKING:
    from rankscope_ingest.importers.tensorboard.rows import EventRows, Place

MARK: Final = "tfevents"
_VERSION_MARK: Final = b"brain.Event:"
_SAMPLED_FILES: Final = 2_000
_FOLDER_RANK: Final = re.compile(r"(?:.*-)?rank[_-]?(\d{1,9})(?:-attempt(\d{1,9})|-[0-9a-f]{8})?")


class TensorBoard:
    """The importer of TensorBoard event files.

    `clock` returns the time in seconds since 1970, which is compared with the modification times of files.
    """

    name = "tensorboard"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that `path` is an event file or a folder of event files.

        An event file begins with a version record.
        """
        if path.is_dir():
            return _detect_folder(path)
        if _VERSION_MARK in head[:64]:
            return Detection(1.0, "the first record of the file has the version of the event file format")
        if MARK in path.name and head[4:8] == bytes(4):
            return Detection(0.8, f"the file name contains {MARK}, and the file begins with the length of a record")
        return NOT_MINE

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield blocks of rows, file by file. The records of each file are numbered separately."""
        try:
            yield from self._read(path, faults)
        except ModuleNotFoundError as error:
            raise IngestError(
                f"TensorBoard event files need the module {error.name}: run pip install protobuf google-crc32c"
            ) from error

    def is_settled(self, path: Path) -> bool:
        """Return whether the file at `path` has not changed for 600 seconds, so that its last step is complete."""
        return self._clock() - path.stat().st_mtime > SETTLED_SECONDS

    def _read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        from rankscope_ingest.importers.tensorboard.rows import EventRows, Rewinds  # noqa: PLC0415 - needs the extra

        root, files = (path, _event_files(path)) if path.is_dir() else (path.parent, [path])
        folder, rewinds = root, Rewinds()
        for file in files:
            if file.parent != folder:
                folder, rewinds = file.parent, Rewinds()
            source = "" if file == path else str(file.relative_to(root))
            rows = EventRows(source, rewinds, _place(folder), _labels(folder.relative_to(root)))
            yield from self._read_file(file, faults, rows)

    def _read_file(self, path: Path, faults: Faults, rows: EventRows) -> Iterator[Imported]:
        from rankscope_storage.tensorboard.frames import read_frames  # noqa: PLC0415 - needs the extra

        before, is_settled = faults.read_bytes, self.is_settled(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for number, data in read_frames(file, size, faults.add):
                problem = rows.take(data)
                if problem:
                    faults.add(number, problem)
                if rows.is_full:
                    faults.read_bytes = before + file.tell()
                    yield from rows.blocks()
        faults.read_bytes = before + size
        faults.passed_over += rows.passed_over
        yield from rows.finish(settled=is_settled)


def _detect_folder(path: Path) -> Detection:
    events = others = 0
    for file in _walk(path):
        events, others = events + (MARK in file.name), others + (MARK not in file.name)
        if events + others >= _SAMPLED_FILES:
            break
    if not events:
        return NOT_MINE
    found = f"{events} event file{'s' if events > 1 else ''}"
    if not others:
        return Detection(0.95, f"the folder contains {found} and no other file")
    return Detection(0.4, f"the folder contains {found} and other files")


def _walk(path: Path) -> Iterator[Path]:
    # Links are not followed: they may form a cycle or lead out of the folder.
    for folder, folders, files in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(files))


def _event_files(path: Path) -> Iterable[Path]:
    """Return the event files below `path`, folder by folder, in the order in which they were created."""
    return (file for file in _walk(path) if MARK in file.name and file.is_file() and not file.is_symlink())


def _place(folder: Path) -> Place:
    """Return rank, attempt and msprobe family of the files in `folder`, from the names of the folder and its parent.

    Only folders that msprobe's conversion has written contain a family.
    """
    resolved = folder.absolute()
    for rank_folder, family in ((resolved, None), (resolved.parent, resolved.name)):
        if match := _FOLDER_RANK.fullmatch(rank_folder.name):
            return int(match[1]), int(match[2] or 0), family
    return None, 0, None


def _labels(relative: Path) -> dict[str, str]:
    """Return the label `folder` for the files in the folder `relative`, to distinguish `train/` from `validation/`.

    The value of the label consists of the folder names, without those for ranks and attempts, because rank and attempt
    are columns. If no other folder name remains, the result is empty.
    """
    parts = [part for part in relative.parts if not _FOLDER_RANK.fullmatch(part)]
    return {"folder": "/".join(parts)} if parts else {}


IMPORTER = TensorBoard()
