"""Compare the rows of an imported log with the facts about it, which `INPUT.expected.json` contains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.common.decisions import Choices

WORDS = {
    "file", "format", "about", "rows", "losses", "first_step", "last_step", "attempts", "ranks", "planned_steps",
    "has_time", "error_events", "anomalies_at_least", "forbid_names", "forbid_summary", "refused", "two_runs", "series",
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if b is None or a is None:
        return a is b
    a, b = float(a), float(b)
    return (math.isnan(a) and math.isnan(b)) or a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)


def any_of(a: Any, choices: Any) -> bool:
    return any(same(a, choice) for choice in (choices if isinstance(choices, list) else [choices]))


def judge(label: str, rows: Sequence[Mapping[str, Any]], want: Mapping[str, Any]) -> list[str]:
    values = [row["value"] for row in rows]
    if not values:
        return [] if want.get("optional") else [f"no {label}"]
    finite = [value for value in values if math.isfinite(value)]
    got = {
        "count": len(values), "first": values[0], "last": values[-1], "min": min(finite, default=None),
        "nonfinite": len(values) - len(finite), "max": max(finite, default=None),
    }  # fmt: skip
    wrong = []
    for key in ("count", "first", "last", "min", "nonfinite"):
        if key in want and not same(got[key], want[key]):
            wrong.append(f"{label} {key} {got[key]}, not {want[key]}")
        if f"{key}_one_of" in want and not any_of(got[key], want[f"{key}_one_of"]):
            wrong.append(f"{label} {key} {got[key]}, none of {want[f'{key}_one_of']}")
    if "nonfinite" not in want and "count" in want and got["nonfinite"]:
        wrong.append(f"{label} has {got['nonfinite']} that are not finite")
    if got["count"] < want.get("count_at_least", 0):
        wrong.append(f"{label} count {got['count']}, less than {want['count_at_least']}")
    if "max_one_of" in want and not any_of(got["max"], want["max_one_of"]):
        wrong.append(f"{label} greatest {got['max']}, none of {want['max_one_of']}")
    if "never_above" in want and got["max"] is not None and got["max"] > want["never_above"]:
        wrong.append(f"{label} reaches {got['max']:g}, more than {want['never_above']}")
    if "steps" in want and [row["step"] for row in rows] != want["steps"]:
        wrong.append(f"{label} at steps {[row['step'] for row in rows]}, not {want['steps']}")
    return wrong


def differences(
    rows: Sequence[Mapping[str, Any]], others: Mapping[str, int | None], want: Mapping[str, Any]
) -> list[str]:
    """Return the differences of a log from the facts in `want`."""
    # `rows` has its scalars, and `others` the number of events by type and the planned steps as `planned`.
    named: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        named.setdefault(row["name"], []).append(row)
    losses = named.get("loss", [])
    wrong = judge("loss", losses, want["losses"]) if "losses" in want else []
    series = {key: value for key, value in want.items() if key not in WORDS} | want.get("series", {})
    for name, facts in series.items():
        found = next((named[each] for each in [name, *facts.get("or_names", [])] if each in named), [])
        wrong += judge(name, found, facts)
    steps = [row["step"] for row in (losses or rows) if row["step"] is not None]
    for key, value in (("first_step", min(steps, default=None)), ("last_step", max(steps, default=None))):
        if key in want and not any_of(value, want[key]):
            wrong.append(f"{key} {value}, not {want[key]}")
    for key, column in (("attempts", "attempt"), ("ranks", "rank")):
        seen = len({row[column] for row in rows if row[column] is not None})
        if key in want and seen != want[key]:
            wrong.append(f"{seen} {key}, not {want[key]}")
    if want.get("has_time") and not all(row["timed"] for row in (losses or rows)):
        wrong.append("records without their time")
    if want.get("planned_steps", others.get("planned")) != others.get("planned"):
        wrong.append(f"planned steps {others.get('planned')}, not {want['planned_steps']}")
    for key, kind in (("error_events", "error"), ("anomalies_at_least", "anomaly")):
        if (others.get(kind) or 0) < want.get(key, 0):
            wrong.append(f"{others.get(kind) or 0} {kind} events, not {want[key]}")
    if strange := [name for name in want.get("forbid_names", []) if name in named]:
        wrong.append(f"series that are none: {strange}")
    return wrong


def read(path: Path, choices: Choices | None = None) -> tuple[list[dict[str, Any]], Faults]:
    """Return the scalars of a log in its order, and the object that describes how it was read."""
    faults = Faults(choices=choices)
    blocks = [item for item in find_importer(path).read(path, faults) if isinstance(item, ImportedBlock)]
    return [row for block in blocks if "scalars" in block.tables for row in block.tables["scalars"].to_pylist()], faults
