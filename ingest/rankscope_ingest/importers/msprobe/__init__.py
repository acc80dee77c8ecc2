"""Import the output of msprobe's monitor: folders of CSV files, anomaly records, module structure, call stacks.

`rankscope_msprobe.files.csv_layout` describes how steps and the moments of Adam are converted. msprobe writes `nan`
both for absent values and for values that are not finite; `tables` distinguishes the two. msprobe stores times only in
the names of folders, without a year, so the imported rows have no time.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported, ImportedRun
from rankscope_ingest.importers.msprobe.discovery import Folder, Found, find, rank_of
from rankscope_ingest.importers.msprobe.json_files import read_anomalies, read_stacks, read_structure
from rankscope_ingest.importers.msprobe.tables import FamilyReader
from rankscope_msprobe.files.csv_layout import DEFAULT_TIME_ZONE, in_time_zone

_HEADS: Final = (
    (re.compile(rb"(?:\xef\xbb\xbf)?vpp_stage,name,step,"), 0.99, "the columns of msprobe's monitor"),
    (re.compile(rb"(?:\xef\xbb\xbf)?module_name,stack_info\r?\n"), 0.95, "the call stacks that msprobe writes"),
    (re.compile(rb"(?:\xef\xbb\xbf)?vpp_stage,step,module_name,scope,"), 0.9, "the columns of msprobe's monitor_v2"),
)


class Msprobe:
    """The importer of the output of msprobe's monitor. `time_zone` is that of the times in the names of folders."""

    name = "msprobe"

    def __init__(self, time_zone: str = DEFAULT_TIME_ZONE) -> None:
        self._time_zone = time_zone

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that `path` is output of msprobe, and the kind of output as the reason."""
        if path.is_dir():
            return _detect_folder(find(path))
        for pattern, confidence, because in _HEADS:
            if pattern.match(head):
                return Detection(confidence, because)
        if b'"tag_name"' in head and b'"call_id"' in head:
            return Detection(0.98, "the file contains anomaly records of msprobe")
        if b'"config"' in head and b'"input"' in head and b"size=(" in head:
            return Detection(0.9, "the file contains a model structure that msprobe printed")
        return NOT_MINE

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield the records launch by launch, then module structures and anomalies, then the facts about the run."""
        found = find(path)
        if found.is_empty:
            raise IngestError(
                f"{path} contains no file of msprobe's monitor (monitor_v2 is not supported): "
                "expected files such as actv_0-9.csv or anomaly.json"
            )
        attempt = 0
        for launch in found.launches:
            repeats = 0
            for folder in launch:
                repeats = max(repeats, (yield from _read_folder(folder, faults, attempt)))
            attempt += 1 + repeats
        for file in found.structures:
            yield read_structure(file, faults, rank=rank_of(file), source=_source(path, file))
        for file in found.anomalies:
            yield read_anomalies(file, faults, attempt=max(0, attempt - 1), source=_source(path, file))
        yield _run(found, self._time_zone)


def _detect_folder(found: Found) -> Detection:
    if found.is_empty:
        return NOT_MINE
    folders = [folder for launch in found.launches for folder in launch]
    files = sum(len(listed) for folder in folders for listed in folder.families.values())
    others = len(found.structures) + len(found.anomalies)
    return Detection(
        0.95, f"{files} statistics files of {len(folders)} rank folders and {others} JSON files of msprobe"
    )


def _read_folder(folder: Folder, faults: Faults, attempt: int) -> Generator[Imported, None, int]:
    """Yield the records in the msprobe files of one rank.

    Return how often the files of a family (such as `actv`) repeat their steps: the largest number over all families.
    """
    repeats = 0
    for family, files in folder.families.items():
        reader = FamilyReader(family, rank=folder.rank, attempt=attempt, source=folder.source)
        for _, path in files:
            yield from reader.blocks(path, faults)
        repeats = max(repeats, reader.repeats)
    if folder.stacks:
        source = f"{folder.source}/{folder.stacks.name}"
        yield read_stacks(folder.stacks, faults, rank=folder.rank, attempt=attempt, source=source)
    return repeats


def _source(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix() if root.is_dir() else file.name


def _run(found: Found, time_zone: str) -> ImportedRun:
    folders = [folder for launch in found.launches for folder in launch]
    ranks = [folder.rank for folder in folders if folder.rank is not None]
    started = _started(folders[0], time_zone) if folders else None
    return ImportedRun(
        world_size=max(ranks) + 1 if ranks else None,
        started_at=None if started is None else int(started.timestamp()) * 1_000_000,
    )


def _started(folder: Folder, time_zone: str) -> dt.datetime | None:
    """Return the start time of a launch, or None if its year cannot be derived.

    The name of the first folder of the launch contains the time without the year. The year is derived from the
    modification times of the files in that folder.
    """
    named = folder.named.time if folder.named else None
    files = [path for listed in folder.families.values() for _, path in listed]
    if named is None or not files:
        return None
    written = dt.datetime.fromtimestamp(min(path.stat().st_mtime for path in files), dt.UTC)
    for year in range(written.year + 1, written.year - 8, -1):
        try:
            moment = in_time_zone(named.replace(year=year), time_zone)
        except ValueError:  # the 29th of February
            continue
        if moment <= written + dt.timedelta(days=1):
            return moment
    return None


IMPORTER = Msprobe()
