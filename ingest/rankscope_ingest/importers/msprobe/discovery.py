"""What stands where in a folder of msprobe output: rank folders in the order of their launches, and JSON files.

The tool gives no run id, and the time in a folder's name has no year. A launch begins where a rank that has a folder
already gets another; across a turn of the year the order is the one that spans the shortest time.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankscope_contract.msprobe.csv_layout import FamilyFile, RankFolder, parse_file, parse_folder

STACKS: Final = "stack_info.csv"
STRUCTURE: Final = "module_struct.json"
ANOMALIES: Final = "anomaly.json"
RANKED_ANOMALIES: Final = "anomaly_analyse.json"

_DEPTH: Final = 5
_NO_TIME: Final = dt.datetime.min.replace(tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The files of one rank. `source` names the folder within what is imported."""

    source: str
    named: RankFolder | None
    families: dict[str, list[tuple[FamilyFile, Path]]] = field(default_factory=dict)
    stacks: Path | None = None

    @property
    def rank(self) -> int | None:
        """Return the rank, if the folder's name says it."""
        return None if self.named is None else self.named.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything of msprobe under a path. `launches` are in order, each with the folders of its ranks."""

    launches: list[list[Folder]]
    structures: list[Path]
    anomalies: list[Path]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read."""
        return not (self.launches or self.structures or self.anomalies)


def find(path: Path) -> Found:
    """Return what of msprobe's output is at `path`, a folder or one of its files."""
    if not path.is_dir():
        return _collect(path.parent, [(path.parent, [path.name])])
    found = _collect(path, _walk(path))
    # The file of the ranked ones repeats what the ranks' own files say.
    own = [file for file in found.anomalies if file.name == ANOMALIES]
    return Found(launches=found.launches, structures=found.structures, anomalies=own or found.anomalies)


def rank_of(path: Path) -> int | None:
    """Return the rank that the folder of `path` is named after."""
    named = parse_folder(path.absolute().parent.name)
    return None if named is None else named.rank


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    for folder, folders, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = sorted(folders) if depth < _DEPTH else []
        yield Path(folder), sorted(files)


def _collect(root: Path, listed: Iterable[tuple[Path, list[str]]]) -> Found:
    folders: list[Folder] = []
    structures: list[Path] = []
    anomalies: list[Path] = []
    for folder, names in listed:
        own = _folder(root, folder, names)
        if own.families or own.stacks:
            folders.append(own)
        structures += [folder / name for name in names if name == STRUCTURE]
        anomalies += [folder / name for name in names if name in {ANOMALIES, RANKED_ANOMALIES}]
    return Found(launches=_launches(folders), structures=structures, anomalies=anomalies)


def _folder(root: Path, folder: Path, names: Sequence[str]) -> Folder:
    families: dict[str, list[tuple[FamilyFile, Path]]] = {}
    for name in names:
        file = parse_file(name)
        if file is not None:
            families.setdefault(file.family, []).append((file, folder / name))
    return Folder(
        source=folder.relative_to(root).as_posix(),
        named=parse_folder(folder.absolute().name),
        families={family: sorted(files) for family, files in sorted(families.items())},
        stacks=folder / STACKS if STACKS in names else None,
    )


def _launches(folders: Iterable[Folder]) -> list[list[Folder]]:
    launches: list[list[Folder]] = []
    seen: set[int | None] = set()
    for folder in _in_order(folders):
        if not launches or folder.rank in seen:
            launches.append([])
            seen = set()
        seen.add(folder.rank)
        launches[-1].append(folder)
    return launches


def _in_order(folders: Iterable[Folder]) -> list[Folder]:
    ordered = sorted(folders, key=_key)
    times = [folder.named.time for folder in ordered if folder.named and folder.named.time]
    if len(times) < len(ordered) or len(times) < 2:
        return ordered
    # The year is a circle: it is cut where nothing happened for longest.
    year = dt.timedelta(days=366)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    gaps.append(times[0] + year - times[-1])
    start = (gaps.index(max(gaps)) + 1) % len(ordered)
    return ordered[start:] + ordered[:start]


def _key(folder: Folder) -> tuple[dt.datetime, str, int, str]:
    named = folder.named
    if named is None:
        return (_NO_TIME, "", -1, folder.source)
    return (named.time or _NO_TIME, named.tail, named.rank, folder.source)
