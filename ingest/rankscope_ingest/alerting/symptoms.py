"""Anomaly events of one body, boiled down to the first cause per step. Vectorised: a NaN step may bring thousands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.events import NO_CALL, EventType, Severity, causal_key, causal_micro_step, causal_stage
from rankscope_contract.kinds import CAUSAL_STAGE

SEVERITIES: Final = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
"""Ascending; an unknown word of a newer sender counts as the lowest."""

_SHOWN: Final = ("rule", "kind", "tensor", "op", "value", "baseline", "threshold", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """The causally first anomaly of one rank at one step, and how many there were."""

    run: str
    attempt: int
    rank: int | None  # None where nothing singles out one rank
    step: int | None
    severity: str  # the worst at this step
    causal: tuple[float, ...]
    events: int = 1
    rule: str | None = None
    kind: str | None = None
    tensor: str | None = None
    op: str | None = None
    value: float | None = None
    baseline: float | None = None
    threshold: float | None = None
    message: str | None = None
    ranks: str | None = None  # in words, where it is not a matter of `rank` alone

    @property
    def who(self) -> str:
        """Return the ranks to name: `rank 3`, `ranks 0-1`, or `rank unknown`."""
        return self.ranks or f"rank {'unknown' if self.rank is None else self.rank}"

    @property
    def urgency(self) -> int:
        """Return the position of the severity among all."""
        return urgency(self.severity)


def urgency(severity: str | None) -> int:
    """Return a number that grows with the severity."""
    return SEVERITIES.index(Severity(severity)) if severity in SEVERITIES else 0


def symptoms(events: pa.Table | None) -> list[Symptom]:
    """Return one symptom per step of `events`, which come from one rank, in order of steps."""
    if events is None:
        return []
    anomalies = events.filter(pc.equal(events["type"], EventType.ANOMALY))
    if anomalies.num_rows == 0:
        return []
    keys = _causal_columns(anomalies)
    order = np.lexsort(tuple(reversed(keys)))
    steps = keys[0][order]
    firsts = np.flatnonzero(np.concatenate(([True], steps[1:] != steps[:-1])))
    worst = np.maximum.reduceat(_urgencies(anomalies)[order], firsts)
    counts = np.diff(np.append(firsts, len(order)))
    rows = anomalies.take(pa.array(order[firsts])).to_pylist()
    return [_symptom(row, int(level), int(count)) for row, level, count in zip(rows, worst, counts, strict=True)]


def firings(events: pa.Table | None) -> dict[tuple[str, str], int]:
    """Return how often each rule fired on each kind in `events`; a scalar has the kind "", as on the rank's page."""
    if events is None:
        return {}
    chosen = pc.and_(pc.equal(events["type"], EventType.ANOMALY), pc.is_valid(events["rule"]))
    counts = events.filter(chosen).group_by(["rule", "kind"]).aggregate([([], "count_all")])
    return {(row["rule"], row["kind"] or ""): row["count_all"] for row in counts.to_pylist()}


def _symptom(row: dict[str, Any], level: int, count: int) -> Symptom:
    return Symptom(
        run=row["run"],
        attempt=row["attempt"],
        rank=row["rank"],
        step=row["step"],
        severity=SEVERITIES[level],
        causal=causal_key(
            step=row["step"],
            micro_step=row["micro_step"],
            kind=row["kind"],
            vpp_stage=row["vpp_stage"],
            pp_stage=row["pp_stage"],
            call_id=row["call_id"],
        ),
        events=count,
        **{name: row[name] for name in _SHOWN},
    )


def _causal_columns(events: pa.Table) -> list[npt.NDArray[Any]]:
    """Return the parts of `causal_key` as columns, most significant first."""
    stages = _by_word(events["kind"], causal_stage)
    sign = np.where(stages < CAUSAL_STAGE["act_grad_in"], 1, -1)
    micro_steps = _integers(events["micro_step"], NO_CALL)
    without = _by_word(events["kind"], lambda kind: causal_micro_step(None, causal_stage(kind))).astype(np.int64)
    return [
        _integers(events["step"], NO_CALL),
        np.where(micro_steps == NO_CALL, without, micro_steps),
        stages,
        sign * _integers(events["vpp_stage"], 0),
        sign * _integers(events["pp_stage"], 0),
        _integers(events["call_id"], NO_CALL),
    ]


def _urgencies(events: pa.Table) -> npt.NDArray[Any]:
    return _by_word(events["severity"], urgency).astype(np.int64)


def _by_word(column: pa.ChunkedArray, number: Any) -> npt.NDArray[Any]:
    """Return `number(word)` for each word of the column, calling it once per distinct word."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    numbers = np.array([number(word) for word in encoded.dictionary.to_pylist()], dtype=np.float64)
    positions: npt.NDArray[np.int32] = encoded.indices.to_numpy(zero_copy_only=False)
    return numbers[positions]


def _integers(column: pa.ChunkedArray, absent: int) -> npt.NDArray[np.int64]:
    filled = pc.fill_null(column.cast(pa.int64()), pa.scalar(absent, pa.int64()))
    return np.asarray(filled.to_numpy(), dtype=np.int64)
