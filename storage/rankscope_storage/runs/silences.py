"""Silences: a user stops the messages about incidents of some runs and rules until a time.

A silence is an event of the store, so that all services of the store follow it, also after a restart. Its run is the
pattern of the names of runs.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rankscope_contract.model.events import EventType
from rankscope_contract.model.redaction import redacted_text
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.connection import connect
from rankscope_storage.runs.tags import add_events, check_note, user_name

log = logging.getLogger(__name__)

_SILENCES: Final = """\
SELECT run, rule, epoch(ts) AS at, details FROM events WHERE type = 'silence' AND ts_origin = 'ingest'
QUALIFY row_number() OVER (PARTITION BY run, rule ORDER BY ordinal DESC) = 1 ORDER BY ordinal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Messages about incidents of runs and rules with names as the patterns `run` and `rule` are not sent.

    The patterns are those of a shell. `until` is the end in UTC seconds.
    """

    run: str
    rule: str
    until: float
    user: str = ""
    note: str = ""

    def covers(self, run: str, rule: str | None) -> bool:
        """Return whether the incident of `rule` in `run` is silenced while the silence is active."""
        return self.covers_run(run) and fnmatch.fnmatchcase(rule or "", self.rule)

    def covers_run(self, run: str) -> bool:
        """Return whether incidents of some rule in `run` are silenced."""
        return fnmatch.fnmatchcase(run, self.run)


def active_silences(store: Location) -> list[Silence]:
    """Return the silences that have not ended. Of several with the same patterns, the last one counts."""
    with connect(store, single_threaded=True) as connection:
        rows = connection.query(_SILENCES).to_pylist()
    found = []
    for row in rows:
        details: dict[str, Any] = json.loads(row["details"])
        found.append(Silence(run=row["run"], rule=row["rule"] or "*", **details))
    return [one for one in found if one.until > dt.datetime.now(dt.UTC).timestamp()]


READ_SECONDS: Final = 1.0
"""Time for which silences that were read from the store are valid."""


class Silences:
    """The active silences of the store in `store`. Used on one thread at a time."""

    def __init__(self, store: Location) -> None:
        self._store = store
        self._known: Sequence[Silence] = ()
        self._read_at = -math.inf

    def covers(self, run: str, rule: str | None) -> bool:
        """Return whether the incident of `rule` in `run` is silenced now. If the store cannot be read, it is not."""
        if time.monotonic() - self._read_at > READ_SECONDS:
            try:
                self._known = active_silences(self._store)
            except (StoreError, OSError) as error:
                self._known = ()
                log.warning("silences cannot be read from the store, messages are sent: %s", error)
            self._read_at = time.monotonic()
        return any(one.covers(run, rule) for one in self._known)


def silence(root: Location, run: str, rule: str, *, seconds: float, note: str, sync: Sync) -> Silence:
    """Silence incidents of runs and rules with these patterns for `seconds`; 0 ends the silence with these patterns.

    Raises StoreError if the note is too long or the store cannot be written.
    """
    check_note(note)
    if not run.isprintable() or not rule.isprintable() or not run or not rule:
        raise StoreError("a pattern of runs or rules must have printable characters, such as 'my-run*'")
    until = dt.datetime.now(dt.UTC).timestamp() + seconds
    made = Silence(run=run, rule=rule, until=until, user=user_name(), note=redacted_text(note.strip()))
    details = {name: value for name, value in asdict(made).items() if name not in {"run", "rule"}}
    end = dt.datetime.fromtimestamp(until, dt.UTC)
    message = f"messages about {rule} in {run} are silenced until {end:%Y-%m-%d %H:%M} UTC"
    row = {"type": EventType.SILENCE, "run": run, "rule": rule, "severity": "info", "message": message}
    add_events(root, [row | {"details": details}], sync)
    return made
