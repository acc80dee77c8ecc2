"""Import the Hugging Face Trainer's `trainer_state.json`: a file, a checkpoint, a run with its checkpoints, or a zip.

Each entry of `log_history` is a record. The other values become the run's `config`, `planned_steps` and state. The
complete entries of a truncated file are imported, and the truncation is reported as a fault. A list of entries without
an enclosing object, NaN and Infinity are accepted. The Trainer logs no time, so records have none; the end of the run
is the modification time of its newest file.

Every checkpoint repeats the history of the earlier checkpoints, so only the entries that earlier checkpoints do not
contain are imported. The histories of all checkpoints form a tree. Histories of one training agree up to the end of the
shorter one. The history of a checkpoint of an earlier training in the same folder differs. From the first entry that
differs, this history is another branch of the tree.
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
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Final

import pyarrow.compute as pc

from rankscope_contract.model.events import EventType, RunState, Severity
from rankscope_contract.model.redaction import redacted_name, redacted_text
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import (
    NOT_MINE,
    BlockBuilder,
    Detection,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRun,
    Importer,
)
from rankscope_ingest.importers.common.lines import checked_text, open_log, readable
from rankscope_ingest.importers.common.object_reader import ObjectReader
from rankscope_ingest.importers.common.values import Cut, JsonReader, Malformed, json_text, whole
from rankscope_ingest.importers.jsonl import IMPORTER as JSON_LINES

HISTORY: Final = "log_history"
STATE_FILE: Final = "trainer_state.json"

_MAX_FACTS: Final = 200
_FACT_CHARACTERS: Final = 8192
_LISTED_FILES: Final = 20
_NEXT_ENTRY: Final = re.compile(r"\}\s*(?:,\s*(?=\{)|(?=\]))")
_NEXT_OBJECT: Final = re.compile(rb"\}\s*\n\{")
"""A regular expression for the beginning of another object, as in a log with one object per line."""
_NEXT_KEY: Final = re.compile(r",\s*(?=\"\w{1,64}\"\s*:)")
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
_MAX_DEPTH: Final = 3
_FINAL: Final = 1 << 62  # the run's own file follows its checkpoints


class TrainerState:
    """The importer of the file `trainer_state.json`, which the Hugging Face Trainer writes."""

    name = "trainer_state"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that `path` is a `trainer_state.json`, or a folder or archive with such files.

        The confidence depends on the key `log_history`, on the file name, and on whether the file is a list of entries.
        """
        if path.is_dir():
            return Detection(0.9, f"a folder with {STATE_FILE}") if any(_walk(path)) else NOT_MINE
        if head.startswith(b"PK\x03\x04"):
            return Detection(0.99, f"an archive with {STATE_FILE}") if _is_archive(path) else NOT_MINE
        text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"{") and b'"log_history"' in text and not _NEXT_OBJECT.search(text):
            return Detection(0.98, 'the file is a JSON object with the key "log_history"')
        if text.startswith(b"{") and path.name == STATE_FILE:
            return Detection(0.9, f"the name {STATE_FILE}")
        if text.startswith(b"[") and _begins_with_entry(head):
            return Detection(0.85, "the file is a JSON list of logged entries")
        return NOT_MINE

    def identity(self, path: Path) -> str | None:
        """Return a text that identifies the run, derived from the first entry of the history; None without an entry.

        Each checkpoint rewrites the file, but the first entry remains the same.
        """
        states = find_states(path)
        if not states:
            return None
        try:
            first = next(_entries(JsonReader(checked_text(states[0].read(), path, Faults())), {}, Faults()), None)
        except Cut:
            return None
        branch = None if first is None else _Follower([], is_last=True).new(first)
        return None if branch is None else f"{self.name}/{branch.source}"

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield each entry of the files at `path` once, in order, then the facts about the run."""
        states = find_states(path)
        objects, entries = ObjectReader(faults), 0
        branches: list[_Branch] = []
        facts: dict[str, Any] = {}
        cut: list[str] = []
        for position, state in enumerate(states, 1):
            follower = _Follower(branches, is_last=position == len(states))
            builder: BlockBuilder | None = None
            count = 0
            text = JsonReader(checked_text(state.read(), Path(state.label), faults))
            try:
                for entry in _entries(text, facts, faults):
                    count += 1
                    branch = follower.new(entry)
                    if branch is None:
                        continue
                    has_branched = builder is None and follower.has_branched
                    builder = builder or BlockBuilder(branch.source)
                    objects.line = text.line_here
                    objects.add(entry, builder, attempt=branch.attempt)
                    if has_branched:
                        differs = f"{state.label} differs from earlier checkpoints from here on"
                        note = redacted_text(f"{differs}: attempt {branch.attempt}")
                        builder.event(EventType.NOTE, Severity.WARNING, note)
                    if builder.is_full and (block := builder.take()):
                        yield block
            except Cut:
                cut.append(state.label)
                note = f"{state.label} is truncated: it ends inside a value, after {count:,} whole entries"
                faults.add(text.line_here, note)
            entries = max(entries, count)
            if builder and (block := builder.take()):
                yield block
        about = {"entries": entries, "cut": bool(cut), "files": [state.label for state in states[-_LISTED_FILES:]]}
        modified = max((state.modified for state in states if state.modified is not None), default=None)
        yield _run(objects.run(about, trainer_state=facts), facts, about, modified)


def _run(run: ImportedRun, facts: Mapping[str, Any], about: Mapping[str, Any], modified: float | None) -> ImportedRun:
    """Return `run` with the facts in its newest file, of which `modified` is the time of the last change."""
    step, planned = whole(facts.get("global_step")), whole(facts.get("max_steps"))
    is_planned = planned is not None and planned > 0
    reached = is_planned and not about["cut"] and step is not None and step >= (planned or 0)
    return replace(
        run,
        state=RunState.COMPLETED if reached else run.state,
        reason="global_step has reached max_steps" if reached else run.reason,
        planned_steps=planned if is_planned else None,
        last_step=None if about["entries"] else step,
        ended_at=None if modified is None else int(modified * 1e6),
    )


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path) and bool(_in_archive(path))
    except (IngestError, OSError):
        return False


def _entries(text: JsonReader, facts: MutableMapping[str, Any], faults: Faults) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a file, and store its other values in `facts`.

    Invalid entries are recorded in `faults`. Raises Cut where a truncated file ends.
    """
    if text.peek() == "[":
        yield from _items(text, faults)
        return
    if text.peek() != "{":
        raise IngestError(f"the file is not a trainer_state.json: it begins with {text.peek()!r}, not with '{{' or '['")
    text.take("{")
    while text.peek() != "}":
        try:
            key = text.value()
            text.take(":")
            if key == HISTORY and text.peek() == "[":
                yield from _items(text, faults)
            elif isinstance(key, str):
                value = text.value()
                if len(facts) < _MAX_FACTS:
                    facts[redacted_name(key)] = json.loads(json_text(value, limit=_FACT_CHARACTERS))
            if text.peek() != "}":
                text.take(",")
        except Malformed as error:
            faults.add(text.line_here, f"invalid JSON: {error}")
            text.resume_at(_NEXT_KEY)


def _items(text: JsonReader, faults: Faults) -> Iterator[Mapping[str, Any]]:
    text.take("[")
    while text.peek() != "]":
        try:
            entry = text.value()
            if isinstance(entry, dict):
                yield entry
            else:
                faults.add(text.line_here, "an entry is not a JSON object and is skipped")
            if text.peek() != "]":
                text.take(",")
        except Malformed as error:
            faults.add(text.line_here, f"an entry is not valid JSON and is skipped: {error}")
            text.resume_at(_NEXT_ENTRY)
    text.take("]")


def _begins_with_entry(head: bytes) -> bool:
    """Return whether `head` is the beginning of a JSON list of objects with a step."""
    text = JsonReader(head)
    try:
        text.take("[")
        first = text.value()
    except (Cut, Malformed):
        return False
    return isinstance(first, dict) and "step" in first


@dataclass(frozen=True, slots=True)
class StateFile:
    """One `trainer_state.json` to read. `label` is the name of the file in messages."""

    label: str
    read: Callable[[], bytes]
    modified: float | None = None  # seconds since 1970


def find_states(path: Path) -> list[StateFile]:
    """Return the `trainer_state.json` files at `path`, with the newest checkpoint last.

    `path` is such a file, a checkpoint, a run, or a zip archive of one of them. Raises IngestError if it contains
    several runs. A folder whose name has no number is not a checkpoint.
    """
    if path.is_dir():
        return [_on_disk(Path(found)) for found in _in_order(path, list(_walk(path)))]
    if zipfile.is_zipfile(path) and (found := _in_archive(path)):
        return found
    return [_on_disk(path)]


def _on_disk(path: Path) -> StateFile:
    return StateFile(label=_label(path), read=functools.partial(_bytes, path), modified=path.stat().st_mtime)


def _bytes(path: Path) -> bytes:
    with open_log(path) as file:
        return file.read()


def _in_archive(path: Path) -> list[StateFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise IngestError(f"{path} is a damaged archive: {error}") from error
    members = [PurePosixPath(name) for name in names if PurePosixPath(name).name == STATE_FILE]
    return [
        StateFile(label=_label(name), read=functools.partial(_member, path, str(name)))
        for name in _in_order(PurePosixPath(), members)
    ]


def _member(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise IngestError(f"{name} in {path} cannot be unpacked: {error}") from error


def _walk(root: Path) -> Iterator[Path]:
    """Yield the `trainer_state.json` files below `root`, down to three levels.

    Symbolic links to folders are not followed.
    """
    for folder, below, files in os.walk(root):
        here = Path(folder)
        if len(here.relative_to(root).parts) >= _MAX_DEPTH:
            below.clear()
        if STATE_FILE in files and (here / STATE_FILE).is_file():
            yield here / STATE_FILE


def _in_order(root: PurePath, found: Sequence[PurePath]) -> list[PurePath]:
    """Return the files of one run, ordered by checkpoint: those of the run at `root`, or else of the only run below it.

    Raises IngestError if there are several runs below `root`.
    """
    runs: dict[PurePath, list[PurePath]] = {}
    for state in found:
        folder = state.parent
        is_below = is_checkpoint(folder) and folder != root
        runs.setdefault(folder.parent if is_below else folder, []).append(state)
    if root in runs:
        runs = {root: runs[root]}
    if len(runs) > 1:
        listed = ", ".join(sorted(str(run) for run in runs)[:5])
        raise IngestError(f"{root} contains {len(runs)} runs ({listed}): import them one at a time")
    return sorted((state for states in runs.values() for state in states), key=_number)


def is_checkpoint(folder: PurePath) -> bool:
    """Return whether the name of `folder` is that of a checkpoint: `checkpoint-500`."""
    return _CHECKPOINT.fullmatch(folder.name) is not None


def _number(state: PurePath) -> int:
    found = _CHECKPOINT.fullmatch(state.parent.name)
    return int(found[1]) if found else _FINAL


def _label(state: PurePath) -> str:
    return f"{state.parent.name}/{state.name}" if state.name == STATE_FILE else state.name


@dataclass(slots=True)
class _Branch:
    """One branch of the tree that the histories of all checkpoints form.

    The branch is identified by the first entry that only this branch has; its records are numbered from that entry on.
    """

    source: str
    attempt: int
    digests: array[int] = field(default_factory=lambda: array("Q"))


class _Follower:
    """Compares the entries of one `trainer_state.json` with the histories (branches) of the files read before it."""

    def __init__(self, branches: list[_Branch], *, is_last: bool) -> None:
        self.has_branched = False
        """True if the file begins a new branch: one of its entries differs from those of all files read before it."""
        self._branches = branches
        self._is_last = is_last  # no file will be compared with this one
        self._agreeing = list(branches)
        self._prefix: array[int] = array("Q")
        self._own: _Branch | None = None

    def new(self, entry: Any) -> _Branch | None:
        """Return the branch to which `entry`, the next entry of the file, belongs.

        Return None if a previously read file of the run contains the entry, so that the entry is already imported.
        """
        if self._own is not None and self._is_last:
            return self._own
        digest = int.from_bytes(hashlib.blake2b(repr(entry).encode(errors="replace"), digest_size=8).digest())
        if self._own is None:
            at = len(self._prefix)
            agreeing = [other for other in self._agreeing if len(other.digests) > at and other.digests[at] == digest]
            if agreeing:
                self._agreeing = agreeing
                self._prefix.append(digest)
                return None
            # A branch that ends exactly here continues with this file.
            ended = (other for other in self._agreeing if len(other.digests) == at)
            self._own = next(ended, None) or self._open(digest)
        self._own.digests.append(digest)
        return self._own

    def _open(self, digest: int) -> _Branch:
        source = f"history-{len(self._prefix)}-{digest:016x}"
        branch = _Branch(source, len(self._branches), array("Q", self._prefix))
        self.has_branched = branch.attempt > 0
        self._branches.append(branch)
        return branch


IMPORTER = TrainerState()


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
        known = _last_step(checkpoints, IMPORTER) if newer else None
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
