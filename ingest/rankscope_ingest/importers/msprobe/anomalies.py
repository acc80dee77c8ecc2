"""The tool's `anomaly.json` and `anomaly_analyse.json` as events.

The key of an entry lacks the statistic, so that of several only the last one is in the file; the message names it.
`micro_step` in an entry is always 0: the true one stands in the tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.events import EventType, Severity
from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.csv_layout import our_step
from rankscope_ingest.importers.common.importer import Faults, ImportedRecord
from rankscope_ingest.importers.common.values import whole
from rankscope_ingest.importers.msprobe.json_files import members
from rankscope_ingest.importers.msprobe.naming import Named, slot

_TAG: Final = re.compile(r"(?P<name>.*)/rank(?P<rank>\d+)/(?P<task>\w+)", re.DOTALL)
_NAME: Final = re.compile(r"(?:(?P<vpp>\d{1,9}):)?(?P<name>.*?)(?::(?P<micro>\d{1,9}))?", re.DOTALL)
_MESSAGE: Final = re.compile(
    r"Rule (?P<rule>\w+) reports .*, '(?P<op>\w+)'\) at step \d+"
    r"(?:, current value (?P<value>\S+), history mean (?P<baseline>\S+?)\.?$)?",
    re.DOTALL,
)
_KINDS: Final[dict[str, str]] = {
    "acc_grad": Kind.GRAD_UNREDUCED,
    "pre_grad": Kind.GRAD_UNREDUCED,
    "post_grad": Kind.GRAD_REDUCED,
    "exp_avg": Kind.EXP_AVG,
    "exp_avg_sq": Kind.EXP_AVG_SQ,
    "param_origin": Kind.PARAM_BEFORE,
    "param_updated": Kind.PARAM_AFTER,
    # older releases named the slot here
    "input": Kind.ACT_IN,
    "output": Kind.ACT_OUT,
    "input_grad": Kind.ACT_GRAD_IN,
    "output_grad": Kind.ACT_GRAD_OUT,
}
_SLOTTED: Final = ("actv", "actv_grad")
_SMALL_LIMIT: Final = 1 << 31


def read_anomalies(path: Path, faults: Faults, *, attempt: int, source: str) -> Iterator[ImportedRecord]:
    """Yield an event for each entry of the file at `path`."""
    for line, key, entry in members(path, faults):
        step = whole(entry.get("step")) if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or step is None:
            faults.add(line, f"{path.name}: {key[:80]!r} is no anomaly of the tool")
            continue
        yield _record(entry, step, attempt=attempt, source=source)


def _record(entry: Mapping[str, Any], step: int, *, attempt: int, source: str) -> ImportedRecord:
    tag = str(entry.get("tag_name", ""))
    message = str(entry.get("message", ""))
    parts = _TAG.fullmatch(tag)
    named = _NAME.fullmatch(parts["name"] if parts else tag)
    what = _named(named["name"] if named else tag, parts["task"] if parts else "")
    micro = named["micro"] if named else None
    said = _MESSAGE.search(message)
    event = {
        "type": EventType.ANOMALY,
        "severity": Severity.CRITICAL if said and said["rule"] == "AnomalyNan" else Severity.WARNING,
        "rule": said["rule"] if said else None,
        "kind": what.kind or None,
        "tensor": what.tensor,
        "op": said["op"] if said else None,
        "value": _float(said["value"]) if said else None,
        "baseline": _float(said["baseline"]) if said else None,
        "pp_stage": _small(entry.get("pp_stage")),
        "vpp_stage": _small(entry.get("vpp_stage")),
        "call_id": _small(entry.get("call_id")),
        "message": message,
        "details": json.dumps({"group_mates": entry.get("group_mates"), "index": what.index, "tag_name": tag}),
    }
    rank = _small(entry.get("rank"))
    return ImportedRecord(
        rows={"events": [event]},
        step=our_step(what.kind, step),
        rank=rank,
        attempt=attempt,
        micro_step=_small(int(micro)) if micro else None,
        source=source,
    )


def _named(name: str, task: str) -> Named:
    if task in _SLOTTED:
        return slot(name, task) or Named("", name)
    return Named(str(_KINDS.get(task, "")), name)


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _small(value: Any) -> int | None:
    number = whole(value)
    # -1 is the tool's word for "not known"
    return number if number is not None and 0 <= number < _SMALL_LIMIT else None
