"""Reduce the anomaly events of one poll response to one symptom per step, the first cause.

The computation is vectorised with Arrow, because one NaN can cause thousands of events.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import NO_CALL, EventType, causal_key, causal_micro_step, causal_stage
from rankscope_contract.model.kinds import CAUSAL_STAGE, LOSS_STAGE
from rankscope_contract.model.redaction import redacted_text
from rankscope_ingest.pipeline.rows import SYMPTOM_COLUMNS
from rankscope_ingest.runs.incident import NON_FINITE, SEVERITIES, Subject, Symptom, urgency

_LONGEST_ERROR: Final = 600
"""Maximum number of characters of an error in the reason of a run and in messages. The event has 4,096 of them."""


def parse_details(text: str | None) -> dict[str, Any]:
    """Return the JSON object in `text`, or {} if `text` contains none. All strings of the result are valid Unicode."""
    try:
        value = json.loads(text or "{}")
        # "\\ud800" is legal in JSON but not valid Unicode: neither Arrow nor a socket accepts it.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def exit_report(details: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the reason and the error message in `details`, the parsed JSON details of an exit event.

    A missing reason is returned as an empty string, a missing error message as None. A long error message is cut.
    """
    reason, error = details.get("reason"), details.get("error")
    return str(reason or ""), None if error is None else redacted_text(str(error), _LONGEST_ERROR)


def exit_reports(events: pa.Table | None) -> list[tuple[str, str | None, int | None, int | None]]:
    """Return (reason, error, time in UTC µs, last completed step) of the exit event among `events`.

    The list has at most one element, because a process exits once.
    """
    if events is None:
        return []
    exits = events.filter(pc.equal(events["type"], EventType.EXIT))
    times = exits["ts"].cast(pa.int64()).to_pylist()
    found = [(parse_details(text), at) for text, at in zip(exits["details"].to_pylist(), times, strict=True)]
    return [(*exit_report(details), at, details.get("last_step")) for details, at in found]


def symptoms(events: pa.Table | None, *, is_past: bool = False) -> list[Symptom]:
    """Return one symptom for each step with anomalies in `events`, ordered by step. All events are from one rank.

    A symptom is the causally first anomaly of a step, together with the number of anomalies of the step. With
    `is_past`, as for the records of an ended process, it has the time of its record.
    """
    if events is None:
        return []
    anomalies = events.filter(pc.equal(events["type"], EventType.ANOMALY))
    if anomalies.num_rows == 0:
        return []
    keys = _causal_columns(anomalies)
    order = np.lexsort(tuple(reversed(keys)))
    steps = keys[0][order]
    firsts = np.flatnonzero(np.concatenate(([True], steps[1:] != steps[:-1])))
    worst = np.maximum.reduceat(_by_word(anomalies["severity"], urgency).astype(np.int64)[order], firsts)
    counts = np.diff(np.append(firsts, len(order)))
    place = anomalies.column_names.index("ts")
    anomalies = anomalies.set_column(place, "ts", anomalies["ts"].cast(pa.int64()))  # after 9999, Python has no date
    rows = anomalies.take(pa.array(order[firsts])).to_pylist()
    subjects = _subjects(anomalies)
    return [
        _symptom(row if is_past else row | {"ts": None}, int(level), int(count), frozenset(subjects[row["step"]]))
        for row, level, count in zip(rows, worst, counts, strict=True)
    ]


def firings(events: pa.Table | None) -> dict[tuple[str, str], int]:
    """Return the number of rule firings in `events` by (rule, kind of tensor).

    For a firing of a rule about a scalar, the kind is the empty string.
    """
    if events is None:
        return {}
    chosen = pc.and_(pc.equal(events["type"], EventType.ANOMALY), pc.is_valid(events["rule"]))
    counts = events.filter(chosen).group_by(["rule", "kind"]).aggregate([([], "count_all")])
    return {(row["rule"], row["kind"] or ""): row["count_all"] for row in counts.to_pylist()}


def latest_events(events: pa.Table | None) -> dict[str, float]:
    """Return the time of the latest event of each type in `events`, in UTC seconds."""
    if events is None:
        return {}
    times = pa.table({"type": events["type"].cast(pa.string()), "ts": events["ts"].cast(pa.int64())})
    rows = times.group_by("type").aggregate([("ts", "max")]).to_pylist()
    return {row["type"]: row["ts_max"] / 1e6 for row in rows}


def _subjects(anomalies: pa.Table) -> dict[int | None, set[Subject]]:
    """Return the subjects of the anomalies of each step.

    A subject is the rule that fired (NON_FINITE for a NaN or infinite value), and the tensor or scalar concerned.
    """
    is_count = pc.is_in(anomalies["op"].cast(pa.string()), pa.array(["nans", "infs"]))
    is_non_finite = pc.or_(is_count, pc.invert(pc.is_finite(pc.fill_null(anomalies["value"], 0.0))))
    rule, tensor, op = (pc.fill_null(anomalies[name].cast(pa.string()), "") for name in ("rule", "tensor", "op"))
    columns = {
        "step": anomalies["step"],
        "rule": pc.if_else(is_non_finite, NON_FINITE, rule),
        "name": pc.if_else(pc.equal(tensor, ""), op, tensor),
    }
    found: dict[int | None, set[Subject]] = defaultdict(set)
    for row in pa.table(columns).group_by(list(columns)).aggregate([]).to_pylist():
        found[row["step"]].add((row["rule"], row["name"]))
    return found


def _symptom(row: dict[str, Any], level: int, count: int, subjects: frozenset[Subject]) -> Symptom:
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
            op=row["op"],
        ),
        events=count,
        further_subjects=subjects,
        message=row["message"],
        at=row["ts"],
        **{name: row[name] for name in SYMPTOM_COLUMNS},
    )


def _causal_columns(events: pa.Table) -> list[npt.NDArray[Any]]:
    """Return arrays by which `events` can be sorted in causal order.

    The arrays contain the elements of the sort key `causal_key`, one value per event; the most significant element is
    first.
    """
    of_scalar = _by_word(events["op"], lambda op: causal_stage(None, op))
    stages = np.where(events["kind"].is_null(), of_scalar, _by_word(events["kind"], causal_stage))
    sign = np.where(stages < CAUSAL_STAGE["act_grad_in"], 1, -1)
    micro_steps = _integers(events["micro_step"], NO_CALL)
    before_backward = np.where(stages == LOSS_STAGE, causal_micro_step(None, LOSS_STAGE), NO_CALL)
    without = np.where(stages < CAUSAL_STAGE["act_in"], causal_micro_step(None, 0), before_backward)
    return [
        _integers(events["step"], NO_CALL),
        np.where(micro_steps == NO_CALL, without, micro_steps),
        stages,
        sign * _integers(events["vpp_stage"], 0),
        sign * _integers(events["pp_stage"], 0),
        _integers(events["call_id"], NO_CALL),
    ]


def _by_word(column: pa.ChunkedArray, number: Any) -> npt.NDArray[Any]:
    """Return an array with the number that `number` returns for each text in `column`.

    `number` is a function that converts a text to a number. It is called once for each distinct text.
    """
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    numbers = np.array([number(word) for word in encoded.dictionary.to_pylist()], dtype=np.float64)
    positions: npt.NDArray[np.int32] = encoded.indices.to_numpy(zero_copy_only=False)
    return numbers[positions]


def _integers(column: pa.ChunkedArray, absent: int) -> npt.NDArray[np.int64]:
    filled = pc.fill_null(column.cast(pa.int64()), pa.scalar(absent, pa.int64()))
    return np.asarray(filled.to_numpy(), dtype=np.int64)
