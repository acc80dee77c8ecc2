"""The Hugging Face Trainer's `trainer_state.json`: a file, a checkpoint, a run with its checkpoints, a zip of one.

Each entry of `log_history` is a record; what else the state says becomes the run's `config`, `planned_steps` and state.
A file of any size is read through a window. One that was cut while it was written gives the entries that are whole, and
says so. Also read: a bare list of entries, NaN and Infinity. The Trainer logs no time, so that records have none; the
run ended, as far as anyone can tell, when its newest file was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from rankscope_contract.model.events import EventType, RunState, Severity
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.blocks import BlockBuilder
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported, ImportedRun
from rankscope_ingest.importers.common.json_text import Cut, JsonWindow
from rankscope_ingest.importers.common.objects import ObjectReader
from rankscope_ingest.importers.common.values import clean_text, whole
from rankscope_ingest.importers.trainer_state.state_files import (
    STATE_FILE,
    Branch,
    History,
    StateFile,
    chunks,
    entries,
    find_states,
    holds_states,
    starts_with_entry,
)

_LISTED_FILES: Final = 20


class TrainerState:
    """The importer."""

    name = "trainer_state"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Look for `log_history`, for the file's own name, or for a list of entries."""
        if path.is_dir():
            return Detection(0.9, f"a folder with {STATE_FILE}") if holds_states(path) else NOT_MINE
        if head.startswith(b"PK\x03\x04"):
            return Detection(0.9, f"an archive with {STATE_FILE}") if _archived(path) else NOT_MINE
        text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"{") and b'"log_history"' in head:
            return Detection(0.98, 'a JSON object with "log_history"')
        if text.startswith(b"{") and path.name == STATE_FILE:
            return Detection(0.9, f"called {STATE_FILE}")
        if text.startswith(b"[") and starts_with_entry(head):
            return Detection(0.85, "a JSON list of logged entries")
        return NOT_MINE

    def identity(self, path: Path) -> str | None:
        """Return what the first entry says: each checkpoint repeats it, though the file is written anew."""
        states = find_states(path)
        if not states:
            return None
        follower = History(1).follow()
        with states[0].open() as file:
            try:
                window = JsonWindow(chunks(file, states[0], Faults()))
                first = next(entries(window, {}, Faults()), None)
            except Cut:
                return None
        branch = None if first is None else follower.new(first)
        return None if branch is None else f"{self.name}/{branch.source}"

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield the entries of every state at `path` once, in order, and at last what they say of the run."""
        states = find_states(path)
        reading = _Reading(faults, len(states))
        for state in states:
            yield from reading.file(state)
        yield reading.run()


class _Reading:
    """The reading of one run."""

    def __init__(self, faults: Faults, files: int) -> None:
        self._faults = faults
        self._history = History(files)
        self._objects = ObjectReader()
        self._entries = 0
        self._facts: dict[str, Any] = {}
        self._files: list[str] = []
        self._cut: list[str] = []
        self._modified: float | None = None

    def file(self, state: StateFile) -> Iterator[Imported]:
        """Yield what `state` adds to the files before it."""
        self._files.append(state.label)
        if state.modified is not None:
            self._modified = max(self._modified or 0.0, state.modified)
        follower = self._history.follow()
        builder: BlockBuilder | None = None
        with state.open() as file:
            for entry in self._entries_of(file, state):
                branch = follower.new(entry)
                if branch is None:
                    continue
                disagrees = None
                if builder is None:
                    builder = BlockBuilder(branch.source)
                    disagrees = state.label if follower.has_branched else None
                self._add(entry, builder, branch, disagrees)
                if builder.is_full and (block := builder.take()):
                    yield block
        if builder and (block := builder.take()):
            yield block

    def run(self) -> ImportedRun:
        """Return what the newest file says of the run."""
        about = {"entries": self._entries, "cut": bool(self._cut), "files": self._files[-_LISTED_FILES:]}
        said = self._objects.run(about, trainer_state=self._facts)
        step, planned = whole(self._facts.get("global_step")), whole(self._facts.get("max_steps"))
        is_planned = planned is not None and planned > 0
        reached = is_planned and not self._cut and step is not None and step >= (planned or 0)
        return replace(
            said,
            state=RunState.COMPLETED if reached else said.state,
            reason="global_step has reached max_steps" if reached else said.reason,
            planned_steps=planned if is_planned else None,
            ended_at=None if self._modified is None else int(self._modified * 1e6),
        )

    def _entries_of(self, file: IO[bytes], state: StateFile) -> Iterator[Mapping[str, Any]]:
        window = JsonWindow(chunks(file, state, self._faults))
        count = 0
        try:
            for entry in entries(window, self._facts, self._faults):
                count += 1
                yield entry
        except Cut:
            self._cut.append(state.label)
            self._faults.add(window.line_here, f"{state.label} ends inside a value, after {count:,} whole entries")
        self._entries = max(self._entries, count)

    def _add(self, entry: Mapping[str, Any], builder: BlockBuilder, branch: Branch, disagrees: str | None) -> None:
        self._objects.add(entry, builder, attempt=branch.attempt)
        if disagrees:
            message = f"{disagrees} disagrees with earlier checkpoints from here on: kept as attempt {branch.attempt}"
            builder.event(EventType.NOTE, Severity.WARNING, clean_text(message))


def _archived(path: Path) -> bool:
    try:
        return bool(find_states(path))
    except (IngestError, OSError):
        return False


IMPORTER = TrainerState()
