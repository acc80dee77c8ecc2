"""What a starting service reads back about replicas: what was told, and hashes that still wait for other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import pyarrow as pa

from rankscope_contract.events import EventType
from rankscope_ingest.alerting.details import parse_details
from rankscope_ingest.desync.book import Apart

_TOLD: Final = """\
SELECT run, attempt, step, kind, tensor, vpp_stage, details, type FROM events
WHERE rule = 'ReplicaDesync' AND ts_origin = 'ingest' AND type IN ('anomaly', 'note') AND step IS NOT NULL
ORDER BY ordinal"""

# What all ranks of a group have reached was compared; what one has not is still to be.
_WAITING: Final = """\
WITH live AS (SELECT run, attempt FROM attempts WHERE state NOT IN ('completed', 'stopped', 'failed')),
last AS (
  SELECT run, attempt, replicas, rank, max(step) AS step FROM hashes
  WHERE replicas IS NOT NULL AND (run, attempt) IN (SELECT (run, attempt) FROM live)
  GROUP BY run, attempt, replicas, rank
),
reached AS (SELECT run, attempt, replicas, min(step) AS step FROM last GROUP BY run, attempt, replicas)
SELECT hashes.run, hashes.attempt, hashes.rank, hashes.step, hashes.replicas, kind, tensor, vpp_stage, hash
FROM hashes JOIN reached ON hashes.run = reached.run AND hashes.attempt = reached.attempt
  AND hashes.replicas = reached.replicas AND hashes.step > reached.step
ORDER BY hashes.ordinal"""


_NAMES: Final = ("run", "attempt", "kind", "tensor", "vpp_stage")


class Reader(Protocol):
    """A connection to the store."""

    def query(self, query: str) -> pa.Table:
        """Return the rows of an SQL query."""
        ...


def read_apart(reader: Reader) -> list[Apart]:
    """Return the tensors that were told to be apart, and not to be equal again since."""
    found: dict[tuple[Any, ...], Apart] = {}
    for row in reader.query(_TOLD).to_pylist():
        details = parse_details(row["details"])
        key = (*(row[name] for name in _NAMES), details.get("replicas"))
        if row["type"] != EventType.ANOMALY:
            found.pop(key, None)
        elif (item := _apart(row, details)) is not None:
            found[key] = item
    return list(found.values())


def read_hashes(reader: Reader) -> pa.Table:
    """Return the hashes of steps that not all ranks of their group have reached."""
    return reader.query(_WAITING)


def _apart(row: Mapping[str, Any], details: Mapping[str, Any]) -> Apart | None:
    try:
        camps = tuple((int(text, 16), tuple(map(int, ranks))) for text, ranks in details["hashes"].items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    camps = tuple(sorted(camps, key=lambda camp: (-len(camp[1]), camp[1])))
    if len(camps) < 2:
        return None
    names = {name: row[name] for name in ("step", "kind", "tensor", "vpp_stage")}
    return Apart(attempt_key=(row["run"], row["attempt"]), replicas=str(details.get("replicas")), camps=camps, **names)
