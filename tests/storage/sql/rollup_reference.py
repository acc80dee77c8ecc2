"""An independent reference for rollups, computed row by row."""

from __future__ import annotations

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS

Row = Mapping[str, Any]

IDENTITY = ("run", "attempt", "rank", "micro_step", "vpp_stage")
SERIES = {
    "tensor_stats": (*IDENTITY, "kind", "tensor", "index", "placement", "shard_group", "call_seq"),
    "scalars": (*IDENTITY, "name", "unit", "labels"),
}


def rollups(dataset: str, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rollups of all `rows`, one per series and bucket; means are exact fractions, or None."""
    buckets: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        series = tuple(row.get(name) for name in SERIES[dataset])
        buckets[*series, *_bucket(row)].append(row)
    return [_rolled(dataset, key, members) for key, members in buckets.items()]


def _bucket(row: Row) -> tuple[int | None, int | None]:
    if row.get("step") is not None:
        return row["step"] // 100 * 100, None
    return None, None if row["ts"] is None else int(row["ts"].timestamp()) // 600


def _rolled(dataset: str, key: tuple[Any, ...], rows: list[Row]) -> dict[str, Any]:
    steps = [row["step"] for row in rows if row.get("step") is not None]
    moments: list[dt.datetime] = [row["ts"] for row in rows if row["ts"] is not None]
    odd = [row for row in rows if _is_odd(dataset, row)]
    odd_steps = [row["step"] for row in odd if row.get("step") is not None]
    return {
        **dict(zip(SERIES[dataset], key, strict=False)),
        "step": key[-2],
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "first_ts": min(moments, default=None),
        "ts": max(moments, default=None),
        "rows": len(rows),
        "nonfinite_rows": len(odd),
        "first_nonfinite_step": min(odd_steps, default=None),
        **_numbers(VALUE_OPS if dataset == "tensor_stats" else ("value",), rows),
        **_totals(COUNT_OPS if dataset == "tensor_stats" else (), rows),
    }


def _numbers(names: Iterable[str], rows: list[Row]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in names:
        known = [row[name] for row in rows if row.get(name) is not None]
        finite = [Fraction(value) for value in known if math.isfinite(value)]
        told |= {
            f"{name}_min": float(min(finite)) if finite else None,
            f"{name}_max": float(max(finite)) if finite else None,
            f"{name}_avg": float(sum(finite) / len(finite)) if finite else None,
            f"{name}_count": len(finite),
            f"{name}_nans": sum(math.isnan(value) for value in known),
            f"{name}_infs": sum(math.isinf(value) for value in known),
        }
    return told


def _totals(names: Iterable[str], rows: list[Row]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in names:
        known = [row[name] for row in rows if row.get(name) is not None]
        told |= {name: sum(known) if known else None, f"{name}_rows": len(known)}
    return told


def _is_odd(dataset: str, row: Row) -> bool:
    names = VALUE_OPS if dataset == "tensor_stats" else ("value",)
    elements = dataset == "tensor_stats" and any((row.get(name) or 0) > 0 for name in ("nans", "infs"))
    return elements or any(row.get(name) is not None and not math.isfinite(row[name]) for name in names)
