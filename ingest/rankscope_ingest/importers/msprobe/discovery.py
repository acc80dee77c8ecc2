"""Find the files in a folder of msprobe output, and interpret the names of folders, files and rows.

msprobe stores no run id, and the time in the name of a folder has no year. A new launch begins with the second folder
of the same rank. If the folders extend across the end of a year, they are ordered such that they cover the shortest
time.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankscope_msprobe.files.csv_layout import (
    ANOMALY_FILE,
    CALLS,
    FEATURES,
    KIND_OF_FAMILY,
    RANKED_ANOMALY_FILE,
    SLOTS,
    STACKS_FILE,
    STRUCTURE_FILE,
    FamilyFile,
    RankFolder,
    parse_call,
    parse_file,
    parse_folder,
)

_DEPTH: Final = 5
_NO_TIME: Final = dt.datetime.min.replace(tzinfo=dt.UTC)
_SLOT: Final = re.compile(r"(?P<module>.*)\.(?P<slot>input|output)(?:_(?P<index>\d{1,9}))?", re.DOTALL)
_ENDING: Final = re.compile(r"(?P<module>.*)(?P<ending>\.[a-z_]+?)(?:_(?P<index>\d{1,9}))?", re.DOTALL)
_KINDS_OF_SLOTS: Final = frozenset(kind for slots in SLOTS.values() for kind in slots.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The msprobe files of one rank. `source` is the path of their folder relative to the imported folder."""

    source: str
    named: RankFolder | None
    families: dict[str, list[tuple[FamilyFile, Path]]] = field(default_factory=dict)
    stacks: Path | None = None

    @property
    def rank(self) -> int | None:
        """The rank in the name of the folder of these files; None if the name contains no rank."""
        return None if self.named is None else self.named.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All msprobe files below a path.

    `launches` are in order of time; each has one folder per rank.
    """

    launches: list[list[Folder]]
    structures: list[Path]
    anomalies: list[Path]

    @property
    def is_empty(self) -> bool:
        """True if no msprobe file was found."""
        return not (self.launches or self.structures or self.anomalies)


def find(path: Path) -> Found:
    """Return the msprobe files at `path`, which is a folder or a single msprobe file."""
    root, listed = (path, _walk(path)) if path.is_dir() else (path.parent, [(path.parent, [path.name])])
    folders: list[Folder] = []
    structures: list[Path] = []
    anomalies: list[Path] = []
    for folder, names in listed:
        found = _folder(root, folder, names)
        if found.families or found.stacks:
            folders.append(found)
        structures += [folder / name for name in names if name == STRUCTURE_FILE]
        anomalies += [folder / name for name in names if name in {ANOMALY_FILE, RANKED_ANOMALY_FILE}]
    # The file of ranked anomalies repeats entries of the ranks' own files.
    of_ranks = [file for file in anomalies if file.name == ANOMALY_FILE]
    return Found(launches=_launches(folders), structures=structures, anomalies=of_ranks or anomalies)


def rank_of(path: Path) -> int | None:
    """Return the rank in the name of the folder that contains `path`; None if the name contains no rank."""
    named = parse_folder(path.absolute().parent.name)
    return None if named is None else named.rank


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    for folder, folders, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = sorted(folders) if depth < _DEPTH else []
        yield Path(folder), sorted(files)


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
        stacks=folder / STACKS_FILE if STACKS_FILE in names else None,
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
    ordered = sorted(folders, key=_order)
    times = [folder.named.time for folder in ordered if folder.named and folder.named.time]
    if len(times) < len(ordered) or len(times) < 2:
        return ordered
    # The times lie on a circle of one year. The first folder follows the longest gap.
    year = dt.timedelta(days=366)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    gaps.append(times[0] + year - times[-1])
    start = (gaps.index(max(gaps)) + 1) % len(ordered)
    return ordered[start:] + ordered[:start]


def _order(folder: Folder) -> tuple[dt.datetime, str, int, str]:
    named = folder.named
    if named is None:
        return (_NO_TIME, "", -1, folder.source)
    return (named.time or _NO_TIME, named.tail, named.rank, folder.source)


@dataclass(frozen=True, slots=True)
class Named:
    """The kind and the tensor or module that the name of a row in an msprobe file identifies.

    `kind` is empty for rows that are stored in the dataset `features`, because their kind depends on the column.
    """

    kind: str
    tensor: str
    index: int | None = None
    call_seq: int | None = None

    @property
    def described(self) -> tuple[str, str, int | None]:
        """Key under which the description of the tensor is stored.

        All calls of a module have the same key, so that the tensor is described once.
        """
        return self.kind, self.tensor, self.index

    @property
    def module(self) -> str | None:
        """The module that has the input or output, or that owns the parameter, to which a row belongs.

        The value is None for a row about a call of a module.
        """
        if self.kind in CALLS:
            return None
        if self.kind in _KINDS_OF_SLOTS:
            return self.tensor
        return self.tensor.rpartition(".")[0] or None


def is_tensor_family(family: str) -> bool:
    """Return whether `family` is a known family of files with tensor statistics."""
    return family in SLOTS or family in CALLS or family in KIND_OF_FAMILY


def parse_name(family: str, name: str) -> Named | None:
    """Return the kind and the tensor or module of the row `name` in a file of `family`.

    Return None if the name does not fit the family.
    """
    if family in SLOTS:
        match = _SLOT.fullmatch(name)
        return None if match is None else Named(str(SLOTS[family][match["slot"]]), match["module"], _index(match))
    if family in FEATURES:
        match = _ENDING.fullmatch(name)
        if match is None or match["ending"] != FEATURES[family].suffix:
            return Named("", name)
        return Named("", match["module"], _index(match))
    if family in CALLS:
        tensor, call_seq, index = parse_call(name)
        return Named(family, tensor, index, call_seq)
    return Named(str(KIND_OF_FAMILY[family]), name)


def _index(match: re.Match[str]) -> int | None:
    return int(match["index"]) if match["index"] else None
