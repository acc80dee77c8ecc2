"""What people say about a run: tags and a note, kept as further versions of its row in `runs`.

A service may write versions of the same run at the same time. So a version with labels has no ordinal, by which it can
never be taken for the newest of state and steps, and the service's versions say nothing of labels: the view `runs`
takes each from where it stands. Two who label at once take turns by the mutex of compaction, under which a run is also
renamed.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.files.parquet import DataFile, write_file
from rankscope_storage.files.partitioning import shared_part
from rankscope_storage.log.delta import Log
from rankscope_storage.log.translation import Change

MOST_TAGS: Final = 100
LONGEST_KEY: Final = 100
LONGEST_VALUE: Final = 1000
LONGEST_NOTE: Final = 10_000

_RETRIES: Final = 10
_CLOCK_TICK: Final = dt.timedelta(microseconds=1)
_KNOWN: Final = """\
SELECT *, (SELECT max(ts) FROM runs_history WHERE run = $run AND (tags IS NOT NULL OR note IS NOT NULL)) AS labelled_at
FROM runs WHERE run = $run"""


@dataclass(frozen=True, slots=True)
class TagsAndNote:
    """Tags by key, and a note; empty text is no note. Raises StoreError for what nobody could type again."""

    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.tags) > MOST_TAGS:
            raise StoreError(f"a run has at most {MOST_TAGS} tags: take some away with `rankscope runs untag`")
        for key, value in self.tags.items():
            _check_tag(key, value)
        if len(self.note) > LONGEST_NOTE or not all(line.isprintable() for line in self.note.splitlines()):
            raise StoreError(f"a note has at most {LONGEST_NOTE} characters, all of them printable")

    @classmethod
    def of(cls, tags: str | None, note: str | None) -> TagsAndNote:
        """Return what the columns of those names hold."""
        return cls(parse_tags(tags), note or "")


TagsEdit = Callable[[TagsAndNote], TagsAndNote]


def set_tags(tags: Mapping[str, str]) -> TagsEdit:
    """Return what sets `tags`, and leaves those of other keys."""
    return lambda known: TagsAndNote({**known.tags, **tags}, known.note)


def remove_tags(keys: Collection[str]) -> TagsEdit:
    """Return what takes the tags of `keys` away. It raises StoreError for a key that there is not."""

    def take(known: TagsAndNote) -> TagsAndNote:
        if missing := sorted(set(keys) - known.tags.keys()):
            there = ", ".join(known.tags) or "none"
            raise StoreError(f"the run has no tag {', '.join(missing)}: it has {there}")
        return TagsAndNote({key: value for key, value in known.tags.items() if key not in keys}, known.note)

    return take


def set_note(note: str) -> TagsEdit:
    """Return what sets the note; an empty one takes it away."""
    return lambda known: TagsAndNote(known.tags, note.strip())


def parse_tags(text: str | None) -> dict[str, str]:
    """Return the tags in a column `tags`; what is no object of text, as other programs may have written, is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    is_object = isinstance(found, dict)
    return {key: value for key, value in found.items() if isinstance(value, str)} if is_object else {}


def edit_tags(root: Path, run: str, change: TagsEdit, sync: Sync) -> TagsAndNote:
    """Commit what `change` makes of the labels of `run`, also while a service writes it; return them."""
    log = Log.open(root, sync)
    log.add_missing_columns()
    labels = TagsAndNote()

    def build() -> Change:
        nonlocal labels
        # What is read here is not older than the handle: who labels or renames meanwhile moves the mutex.
        known = _known(root, run)
        labels = change(TagsAndNote.of(known["tags"], known["note"]))
        return Change(added=[_written(root, _version(known, labels), sync)])

    try:
        log.replace_files(build, tries=_RETRIES)
    except ConflictError as error:
        raise StoreError(f"the labels of {run!r} were changed by others all the time: try again") from error
    return labels


def _written(root: Path, row: pa.Table, sync: Sync) -> DataFile:
    today = dt.datetime.now(dt.UTC).date()
    try:
        return write_file(root, "runs", shared_part(today), conform(row, "runs"), sync)
    except OSError as error:
        raise StoreError(f"cannot write to {root}: {error.strerror or error}") from error


def _known(root: Path, run: str) -> dict[str, Any]:
    with connect(root) as connection:
        rows: list[dict[str, Any]] = connection.query(_KNOWN, {"run": run}).to_pylist()
    if not rows:
        raise StoreError(f"the store knows nothing of {run!r} beside its rows: there is no version to label")
    return rows[0]


def _version(known: Mapping[str, Any], labels: TagsAndNote) -> pa.Table:
    now = dt.datetime.now(dt.UTC)
    before = known["labelled_at"]
    columns = {name: known[name] for name in dataset_schema("runs").names}
    # Later than the labels before, though the clock was set back since.
    columns["ts"] = now if before is None else max(now, before + _CLOCK_TICK)
    columns |= {"ordinal": None, "ts_origin": "ingest", "note": labels.note}
    columns["tags"] = json.dumps(dict(sorted(labels.tags.items())), ensure_ascii=False, separators=(",", ":"))
    return pa.Table.from_pylist([columns], schema=dataset_schema("runs"))


def _check_tag(key: str, value: str) -> None:
    if not key or len(key) > LONGEST_KEY or not key.isprintable() or key != key.strip() or "=" in key:
        raise StoreError(f"{key!r} is no key of a tag: it has 1 to {LONGEST_KEY} printable characters, and no =")
    if len(value) > LONGEST_VALUE or not value.isprintable():
        raise StoreError(f"the tag {key} has a value of at most {LONGEST_VALUE} printable characters")
