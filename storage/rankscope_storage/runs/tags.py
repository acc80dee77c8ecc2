"""Tags and notes of a run, which users set, and the closing of its incidents.

Tags and notes are stored as further versions of the run's row in `runs`, and a closed incident as an event.

A service may write versions of the same run's row concurrently. The versions of the service have null tags, and the
column `ordinal` orders them. A version with tags has a null `ordinal`, so that the run's state and steps never come
from it. The view `runs` combines both kinds of versions. Concurrent edits are serialised: they conflict with each other
and with the renaming of runs.
"""

from __future__ import annotations

import datetime as dt
import getpass
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import CLOSED, EventType
from rankscope_contract.model.redaction import redacted, redacted_text
from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import write_file
from rankscope_storage.files.sorting import shared_part
from rankscope_storage.log.delta import Change, Log

MOST_TAGS: Final = 100
LONGEST_KEY: Final = 100
LONGEST_VALUE: Final = 1000
LONGEST_NOTE: Final = 10_000

_RETRIES: Final = 10
_CLOCK_TICK: Final = dt.timedelta(microseconds=1)
_KNOWN: Final = """\
SELECT *, (SELECT max(ts) FROM runs_history WHERE run = $run AND (tags IS NOT NULL OR note IS NOT NULL)) AS tagged_at
FROM runs WHERE run = $run"""


def check_note(note: str) -> None:
    """Raise StoreError if `note` is too long or has characters that are not printable."""
    if len(note) > LONGEST_NOTE or not all(line.isprintable() for line in note.splitlines()):
        raise StoreError(f"a note must consist of at most {LONGEST_NOTE} printable characters")


@dataclass(frozen=True, slots=True)
class TagsAndNote:
    """The tags of a run by key, and its note. An empty note means that the run has no note.

    Raises StoreError if a key, a value or the note is invalid.
    """

    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.tags) > MOST_TAGS:
            raise StoreError(f"a run has at most {MOST_TAGS} tags: remove some with `rankscope runs untag`")
        for key, value in self.tags.items():
            _check_tag(key, value)
        check_note(self.note)

    @classmethod
    def of(cls, tags: str | None, note: str | None) -> TagsAndNote:
        """Return the tags and the note from the values of the columns `tags` and `note`."""
        return cls(parse_tags(tags), note or "")


TagsEdit = Callable[[TagsAndNote], TagsAndNote]


def set_tags(tags: Mapping[str, str]) -> TagsEdit:
    """Return an edit that sets `tags` and keeps all other tags."""
    return lambda known: TagsAndNote({**known.tags, **tags}, known.note)


def remove_tags(keys: Collection[str]) -> TagsEdit:
    """Return an edit that removes the tags with `keys`.

    The edit raises StoreError for a key that the run does not have.
    """

    def remove(known: TagsAndNote) -> TagsAndNote:
        if missing := sorted(set(keys) - known.tags.keys()):
            there = f"its tags are {', '.join(known.tags)}" if known.tags else "it has no tags"
            raise StoreError(f"the run has no tag {', '.join(missing)}: {there}")
        return TagsAndNote({key: value for key, value in known.tags.items() if key not in keys}, known.note)

    return remove


def set_note(note: str) -> TagsEdit:
    """Return an edit that sets the note of a run; an empty text removes the note."""
    return lambda known: TagsAndNote(known.tags, note.strip())


def parse_tags(text: str | None) -> dict[str, str]:
    """Return the tags in a text of the column `tags`.

    Values that are not texts, which other programs may have written, are ignored.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    is_object = isinstance(found, dict)
    return {key: value for key, value in found.items() if isinstance(value, str)} if is_object else {}


def edit_tags(root: Location, run: str, change: TagsEdit, sync: Sync) -> TagsAndNote:
    """Apply the edit `change` to the tags and the note of `run`, mask secrets, commit the result and return it.

    A service may write the run at the same time.
    """
    log = Log.open(root, sync)
    log.add_missing_columns()
    edited = TagsAndNote()

    def build() -> Change:
        nonlocal edited
        known = _known(root, run)  # not older than the handle: a concurrent edit or rename would move the mutex
        edited = change(TagsAndNote.of(known["tags"], known["note"]))
        edited = TagsAndNote(redacted(edited.tags), redacted_text(edited.note, LONGEST_NOTE))
        row, part = conform(_new_version(known, edited), "runs"), shared_part(dt.datetime.now(dt.UTC).date())
        try:
            return Change(added=[write_file(root, "runs", part, row, sync)])
        except OSError as error:
            raise StoreError(f"cannot write to {root}: {error.strerror or error}") from error

    try:
        log.replace_files(build, tries=_RETRIES)
    except ConflictError as error:
        raise StoreError(f"the tags of {run!r} were changed concurrently {_RETRIES} times: try again") from error
    return edited


def _new_version(known: Mapping[str, Any], edited: TagsAndNote) -> pa.Table:
    now, before = dt.datetime.now(dt.UTC), known["tagged_at"]
    columns = {name: known[name] for name in dataset_schema("runs").names}
    # Later than the previous tags, even if the clock was set back.
    columns["ts"] = now if before is None else max(now, before + _CLOCK_TICK)
    columns |= {"ordinal": None, "ts_origin": "ingest", "note": edited.note}
    columns["tags"] = json.dumps(dict(sorted(edited.tags.items())), ensure_ascii=False, separators=(",", ":"))
    return pa.Table.from_pylist([columns], schema=dataset_schema("runs"))


def _known(root: Location, run: str) -> dict[str, Any]:
    with connect(root) as connection:
        rows: list[dict[str, Any]] = connection.query(_KNOWN, {"run": run}).to_pylist()
    if not rows:
        raise StoreError(f"run {run!r} is not registered in the store: only a registered run can have tags")
    return rows[0]


def _check_tag(key: str, value: str) -> None:
    if not key or len(key) > LONGEST_KEY or not key.isprintable() or key != key.strip() or "=" in key:
        raise StoreError(f"{key!r} is not a valid tag key: a key has 1 to {LONGEST_KEY} printable characters without =")
    if len(value) > LONGEST_VALUE or not value.isprintable():
        raise StoreError(f"the value of tag {key} must consist of at most {LONGEST_VALUE} printable characters")


def close_incidents(root: Location, found: Sequence[Mapping[str, Any]], note: str, sync: Sync) -> None:
    """Commit one event for each incident in `found`, which states that a user has closed it.

    An element of `found` contains columns of the first event of the incident, and its `details` as a mapping. Raises
    StoreError if the note is too long or the store cannot be written.
    """
    check_note(note)
    closing = {"state": CLOSED, "user": user_name(), "note": note.strip()}
    rows = [{**one, "type": EventType.INCIDENT, "details": {**one["details"], **closing}} for one in found]
    add_events(root, rows, sync)


def add_events(root: Location, rows: Sequence[Mapping[str, Any]], sync: Sync) -> None:
    """Commit events of a user, now. The `details` of each row are a mapping.

    Raises StoreError if the store cannot be written.
    """
    log = Log.open(root, sync)
    now = dt.datetime.now(dt.UTC)
    added = {"ts": now, "ordinal": round(now.timestamp() * 1e6), "ts_origin": "ingest"}
    texts = [json.dumps(row["details"], sort_keys=True, ensure_ascii=False) for row in rows]
    made = [{**row, **added, "details": text} for row, text in zip(rows, texts, strict=True)]
    table = conform(pa.Table.from_pylist(made, schema=dataset_schema("events")), "events")
    try:
        log.commit(Change(added=[write_file(root, "events", shared_part(now.date()), table, sync)]))
    except OSError as error:
        raise StoreError(f"cannot write to {root}: {error.strerror or error}") from error


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for the user
        return "unknown"
