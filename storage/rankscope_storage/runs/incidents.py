"""Close incidents of a run: an event that a user adds to the store, also while a service writes to it."""

from __future__ import annotations

import datetime as dt
import getpass
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope_contract.model.events import CLOSED, EventType
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.files.encoding import write_file
from rankscope_storage.files.sorting import shared_part
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.runs.tags import check_note


def close_incidents(root: Path, found: Sequence[Mapping[str, Any]], note: str, sync: Sync) -> None:
    """Commit one event for each incident in `found`, which states that a user has closed it.

    An element of `found` contains columns of the first event of the incident, and its `details` as a mapping. Raises
    StoreError if the note is too long or the store cannot be written.
    """
    check_note(note)
    log = Log.open(root, sync)
    now = dt.datetime.now(dt.UTC)
    ordinal = round(now.timestamp() * 1e6)
    added = {"type": EventType.INCIDENT, "ts": now, "ordinal": ordinal, "ts_origin": "ingest"}
    closing = {"state": CLOSED, "user": _user(), "note": note.strip()}
    rows = [
        {**one, **added, "details": json.dumps({**one["details"], **closing}, sort_keys=True, ensure_ascii=False)}
        for one in found
    ]
    table = conform(pa.Table.from_pylist(rows, schema=dataset_schema("events")), "events")
    try:
        log.commit(Change(added=[write_file(root, "events", shared_part(now.date()), table, sync)]))
    except OSError as error:
        raise StoreError(f"cannot write to {root}: {error.strerror or error}") from error


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for the user
        return "unknown"
