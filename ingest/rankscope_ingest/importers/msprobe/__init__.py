"""Output of the msprobe training monitor: folders of CSV files, anomaly records, model structure and call stacks.

Steps and Adam's moments are converted (see `rankscope_contract.msprobe.csv_layout`), `nan` is taken apart into
absent and not finite (see `statistics`). A time stands only in the names of folders, without a year: rows have none.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported, ImportedRun
from rankscope_ingest.importers.msprobe.anomalies import read_anomalies
from rankscope_ingest.importers.msprobe.discovery import Folder, Found, find, rank_of
from rankscope_ingest.importers.msprobe.json_files import read_stacks, read_structure
from rankscope_ingest.importers.msprobe.tables import FamilyReader

_CSV_HEAD: Final = re.compile(rb"(?:\xef\xbb\xbf)?vpp_stage,name,step,")
_STACKS_HEAD: Final = re.compile(rb"(?:\xef\xbb\xbf)?module_name,stack_info\r?\n")
_SECOND_MONITOR: Final = re.compile(rb"(?:\xef\xbb\xbf)?vpp_stage,step,module_name,scope,")


class Msprobe:
    """The importer."""

    name = "msprobe"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Say what of the tool's output `path` is."""
        if path.is_dir():
            return _detect_folder(find(path))
        if _CSV_HEAD.match(head):
            return Detection(0.99, "the columns of msprobe's monitor")
        if _STACKS_HEAD.match(head):
            return Detection(0.95, "the call stacks that msprobe writes")
        if _SECOND_MONITOR.match(head):
            return Detection(0.9, "the columns of msprobe's monitor_v2")
        if b'"tag_name"' in head and b'"call_id"' in head:
            return Detection(0.98, "anomaly records of msprobe")
        if b'"config"' in head and b'"input"' in head and b"size=(" in head:
            return Detection(0.9, "a model structure that msprobe printed")
        return NOT_MINE

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield launch after launch, then structures and anomalies, then what is known of the run."""
        found = find(path)
        if found.is_empty:
            raise IngestError(
                f"{path} holds nothing that msprobe's monitor (not monitor_v2) writes: actv_0-9.csv, anomaly.json, …"
            )
        attempt = 0
        for launch in found.launches:
            deepest = 0
            for folder in launch:
                for item in _read_folder(folder, faults, attempt):
                    if isinstance(item, int):
                        deepest = max(deepest, item)
                    else:
                        yield item
            attempt += 1 + deepest
        last = max(0, attempt - 1)
        for file in found.structures:
            yield from read_structure(file, faults, rank=rank_of(file), source=_source(path, file))
        for file in found.anomalies:
            yield from read_anomalies(file, faults, attempt=last, source=_source(path, file))
        yield _run(found)


def _detect_folder(found: Found) -> Detection:
    if found.is_empty:
        return NOT_MINE
    folders = [folder for launch in found.launches for folder in launch]
    files = sum(len(listed) for folder in folders for listed in folder.families.values())
    others = len(found.structures) + len(found.anomalies)
    return Detection(
        0.95, f"{files} statistics files of {len(folders)} rank folders and {others} JSON files of msprobe"
    )


def _read_folder(folder: Folder, faults: Faults, attempt: int) -> Iterator[Imported | int]:
    """Yield what the files of one rank say, and behind each family how often its steps were repeated."""
    for family, files in folder.families.items():
        reader = FamilyReader(family, rank=folder.rank, attempt=attempt, source=folder.source)
        for _, path in files:
            yield from reader.blocks(path, faults)
        yield reader.deepest
    if folder.stacks:
        source = f"{folder.source}/{folder.stacks.name}"
        yield from read_stacks(folder.stacks, faults, rank=folder.rank, attempt=attempt, source=source)


def _source(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix() if root.is_dir() else file.name


def _run(found: Found) -> ImportedRun:
    folders = [folder for launch in found.launches for folder in launch]
    ranks = [folder.rank for folder in folders if folder.rank is not None]
    started = _started(folders[0]) if folders else None
    return ImportedRun(
        world_size=max(ranks) + 1 if ranks else None,
        started_at=None if started is None else int(started.timestamp()) * 1_000_000,
    )


def _started(folder: Folder) -> dt.datetime | None:
    """Return when the first folder was made: its name says all but the year, and its files are not older than that."""
    named = folder.named.time if folder.named else None
    files = [path for listed in folder.families.values() for _, path in listed]
    if named is None or not files:
        return None
    written = dt.datetime.fromtimestamp(min(path.stat().st_mtime for path in files), named.tzinfo)
    for year in range(written.year + 1, written.year - 8, -1):
        try:
            moment = named.replace(year=year)
        except ValueError:  # the 29th of February
            continue
        if moment <= written + dt.timedelta(days=1):
            return moment
    return None


IMPORTER = Msprobe()
