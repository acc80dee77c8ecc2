"""Step records printed one JSON object a line: `{"step": 10, "loss": 2.07, "lr": 7.5e-05}`.

Every number at the top level becomes a scalar under its own name; null is absent; NaN and Infinity, which JSON does not
have but Python prints, are values. Text, lists and nested objects are left out. A line that is no object is counted
with its number: a log with other output between the records can be read, and nothing is skipped in silence.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.base import Detection, Faults, ImportedRecord

STEP_KEYS: Final = ("step", "global_step", "iteration", "iter", "current_steps")
TIME_KEY: Final = "timestamp"

_MAX_LINE_BYTES: Final = 1 << 24
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SHOWN_CHARACTERS: Final = 60


class JsonLines:
    """The importer."""

    name = "jsonl"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the share of lines that are JSON objects, a little more for the usual suffix."""
        lines = [line for line in head.split(b"\n")[:-1] or [head] if line.strip()]
        objects = sum(_object(line) is not None for line in lines)
        share = objects / len(lines) if lines else 0.0
        confidence = share * (1.0 if path.suffix in {".jsonl", ".ndjson"} else 0.9)
        return Detection(confidence, f"{objects} of the first {len(lines)} lines are JSON objects")

    def read(self, path: Path, faults: Faults) -> Iterator[ImportedRecord]:
        """Yield a record per line that is an object."""
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
                if not line.strip():
                    continue
                document = _object(line)
                if document is None:
                    shown = line[:_SHOWN_CHARACTERS].decode(errors="replace").strip()
                    faults.add(number, f"not a JSON object: {shown}")
                else:
                    yield _record(document)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _record(document: Mapping[str, Any]) -> ImportedRecord:
    step_key = next((key for key in STEP_KEYS if _whole(document.get(key)) is not None), None)
    rank = _whole(document.get("rank"))
    scalars = [
        {"name": name, "value": number}
        for name, value in document.items()
        if name not in {step_key, "rank", TIME_KEY} and (number := _number(value)) is not None
    ]
    return ImportedRecord(
        rows={"scalars": scalars},
        step=None if step_key is None else _whole(document[step_key]),
        rank=rank if rank is not None and 0 <= rank < 1 << 31 else None,
        ts=_micros(document.get(TIME_KEY)),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _whole(value: Any) -> int | None:
    number = _number(value)
    if number is None or not number.is_integer() or abs(number) >= 1 << 53:
        return None
    return int(number)


def _micros(value: Any) -> int | None:
    """Return an ISO time as UTC µs; one without a zone is taken for UTC."""
    if not isinstance(value, str):
        return None
    try:
        moment = dt.datetime.fromisoformat(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    return (moment - _EPOCH) // dt.timedelta(microseconds=1)


IMPORTER = JsonLines()
