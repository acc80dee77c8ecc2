"""Finds the `trainer_state.json` files of a run, and tells what is new in each: every checkpoint repeats the history.

A history is a tree: checkpoints of one training agree as far as they go, and where one of them disagrees (it was left
behind by an earlier training in the same folder) it is a branch from there on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import Faults
from rankscope_ingest.importers.common.json_text import Cut, JsonWindow, Malformed
from rankscope_ingest.importers.common.lines import refuse_no_text
from rankscope_ingest.importers.common.values import clean_text, json_text

HISTORY: Final = "log_history"
STEP: Final = "step"

_CHUNK_BYTES: Final = 1 << 16  # an error in the window costs a look at all of it
_PROBE_BYTES: Final = 4096
_MAX_FACTS: Final = 200
_FACT_CHARACTERS: Final = 8192
_NEXT_ENTRY: Final = re.compile(r"\}\s*(?:,\s*(?=\{)|(?=\]))")
_NEXT_KEY: Final = re.compile(r",\s*(?=\"\w{1,64}\"\s*:)")


def chunks(file: IO[bytes], state: StateFile, faults: Faults) -> Iterator[bytes]:
    """Yield the bytes of `file`, the progress noted. Raises IngestError on what is no text."""
    while chunk := file.read(_CHUNK_BYTES):
        if not faults.read_bytes:
            refuse_no_text(Path(state.label), chunk[:_PROBE_BYTES])
        faults.read_bytes += len(chunk)
        yield chunk


def entries(window: JsonWindow, facts: MutableMapping[str, Any], faults: Faults) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of the state at `window`; its other values go into `facts`. Raises Cut where the text ends."""
    if window.peek() == "[":
        yield from _items(window, faults)
        return
    if window.peek() != "{":
        raise IngestError(f"this is no trainer_state.json: it begins with {window.peek()!r}")
    window.take("{")
    while window.peek() != "}":
        try:
            key = window.value()
            window.take(":")
            if key == HISTORY and window.peek() == "[":
                yield from _items(window, faults)
            elif isinstance(key, str):
                _note(facts, key, window.value())
            if window.peek() != "}":
                window.take(",")
        except Malformed as error:
            faults.add(window.line_here, f"no JSON: {error}")
            window.resume_at(_NEXT_KEY)


def starts_with_entry(head: bytes) -> bool:
    """Return whether `head` begins a list of objects that have a step."""
    window = JsonWindow(iter((head,)))
    try:
        window.take("[")
        first = window.value()
    except (Cut, Malformed):
        return False
    return isinstance(first, dict) and STEP in first


def _items(window: JsonWindow, faults: Faults) -> Iterator[Mapping[str, Any]]:
    window.take("[")
    while window.peek() != "]":
        try:
            entry = window.value()
            if isinstance(entry, dict):
                yield entry
            else:
                faults.add(window.line_here, "an entry that is no object")
            if window.peek() != "]":
                window.take(",")
        except Malformed as error:
            faults.add(window.line_here, f"an entry that is no JSON: {error}")
            window.resume_at(_NEXT_ENTRY)
    window.take("]")


def _note(facts: MutableMapping[str, Any], key: str, value: Any) -> None:
    if len(facts) < _MAX_FACTS:
        facts[clean_text(key)] = json.loads(json_text(value, limit=_FACT_CHARACTERS))


STATE_FILE: Final = "trainer_state.json"

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
_MAX_DEPTH: Final = 3
_FINAL: Final = 1 << 62  # the run's own file comes after its checkpoints


@dataclass(frozen=True, slots=True)
class StateFile:
    """One file to read; `label` names it for people."""

    label: str
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    modified: float | None = None  # seconds since 1970


def find_states(path: Path) -> list[StateFile]:
    """Return the states at `path` (a file, a checkpoint, a run, an archive of one), the newest checkpoint last.

    Raises IngestError where there are several runs. A folder name without a number is no checkpoint (S1-08).
    """
    if path.is_dir():
        return [_on_disk(Path(found)) for found in _in_order(path, list(_walk(path)))]
    if zipfile.is_zipfile(path):
        return _in_archive(path)
    return [_on_disk(path)]


def holds_states(path: Path) -> bool:
    """Return whether the folder at `path` holds any state."""
    return any(True for _ in _walk(path))


def _on_disk(path: Path) -> StateFile:
    return StateFile(label=_label(path), open=lambda: path.open("rb"), modified=path.stat().st_mtime)


def _in_archive(path: Path) -> list[StateFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise IngestError(f"{path} is a damaged archive: {error}") from error
    members = [PurePosixPath(name) for name in names if PurePosixPath(name).name == STATE_FILE]
    return [
        StateFile(label=_label(name), open=functools.partial(_member, path, str(name)))
        for name in _in_order(PurePosixPath(), members)
    ]


@contextmanager
def _member(path: Path, name: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise IngestError(f"{name} in {path} cannot be unpacked: {error}") from error


def _walk(root: Path) -> Iterator[Path]:
    """Yield the states below `root`, not too deep; links to folders are not followed."""
    for folder, below, files in os.walk(root):
        here = Path(folder)
        if len(here.relative_to(root).parts) >= _MAX_DEPTH:
            below.clear()
        if STATE_FILE in files and (here / STATE_FILE).is_file():
            yield here / STATE_FILE


def _in_order(root: PurePath, found: Sequence[PurePath]) -> list[PurePath]:
    """Return the states of one run: those of the run at `root` itself, or else of the only run below it."""
    runs: dict[PurePath, list[PurePath]] = {}
    for state in found:
        folder = state.parent
        is_checkpoint = _CHECKPOINT.fullmatch(folder.name) is not None and folder != root
        runs.setdefault(folder.parent if is_checkpoint else folder, []).append(state)
    if root in runs:
        runs = {root: runs[root]}
    if len(runs) > 1:
        listed = ", ".join(sorted(str(run) for run in runs)[:5])
        raise IngestError(f"{root} holds {len(runs)} runs ({listed}): import them one at a time")
    return sorted((state for states in runs.values() for state in states), key=_number)


def _number(state: PurePath) -> int:
    found = _CHECKPOINT.fullmatch(state.parent.name)
    return int(found[1]) if found else _FINAL


def _label(state: PurePath) -> str:
    return f"{state.parent.name}/{state.name}" if state.name == STATE_FILE else state.name


@dataclass(slots=True)
class Branch:
    """One course of the history. Its records are known by what the first of them says, and are numbered from there."""

    source: str
    attempt: int
    digests: array[int] = field(default_factory=lambda: array("Q"))


class History:
    """What has been seen of a run, over all its files."""

    def __init__(self, files: int) -> None:
        self._branches: list[Branch] = []
        self._files = files

    def follow(self) -> Follower:
        """Return what compares the entries of the next file with those seen so far."""
        self._files -= 1
        return Follower(self._branches, is_last=self._files <= 0)


class Follower:
    """Goes through the entries of one file and finds what no file before it had."""

    def __init__(self, branches: list[Branch], *, is_last: bool) -> None:
        self._branches = branches
        self._is_last = is_last  # nothing will be compared with it
        self._agreeing = list(branches)
        self._prefix: array[int] = array("Q")
        self._own: Branch | None = None
        self._has_branched = False

    def new(self, entry: Any) -> Branch | None:
        """Return the branch that `entry`, the file's next, is new in; None when it is known."""
        if self._own is not None and self._is_last:
            return self._own
        digest = int.from_bytes(hashlib.blake2b(repr(entry).encode(errors="replace"), digest_size=8).digest())
        if self._own is None and self._is_known(digest):
            self._prefix.append(digest)
            return None
        if self._own is None:
            self._own = self._extended() or self._opened(digest)
        self._own.digests.append(digest)
        return self._own

    @property
    def has_branched(self) -> bool:
        """Whether the file disagrees with an earlier one."""
        return self._has_branched

    def _is_known(self, digest: int) -> bool:
        at = len(self._prefix)
        agreeing = [b for b in self._agreeing if len(b.digests) > at and b.digests[at] == digest]
        if agreeing:
            self._agreeing = agreeing
        return bool(agreeing)

    def _extended(self) -> Branch | None:
        """Return the branch that ends exactly here, and so goes on with this file."""
        return next((branch for branch in self._agreeing if len(branch.digests) == len(self._prefix)), None)

    def _opened(self, digest: int) -> Branch:
        source = f"history-{len(self._prefix)}-{digest:016x}"
        branch = Branch(source, len(self._branches), array("Q", self._prefix))
        self._has_branched = branch.attempt > 0
        self._branches.append(branch)
        return branch
