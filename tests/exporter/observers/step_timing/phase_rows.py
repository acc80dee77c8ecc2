"""Phases of steps, read from the records of a rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Rows = dict[int | None, dict[str, float]]


def phase_rows(records: Iterable[dict[str, Any]], name: str = "step_phase_seconds") -> Rows:
    """Return seconds by step and phase."""
    found: Rows = defaultdict(dict)
    for record in records:
        for scalar in record["scalars"] or ():
            if scalar["name"] == name:
                found[record["step"]][json.loads(scalar["labels"])["phase"]] = scalar["value"]
    return dict(found)


def totals(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the latest total of each phase."""
    latest: dict[str, float] = {}
    for phases in phase_rows(records, "phase_seconds").values():
        latest.update(phases)
    return latest
