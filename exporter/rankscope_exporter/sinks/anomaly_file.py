"""Writes firings to `anomaly_detected/rank<r>/anomaly.json`, in the format of msprobe.

The file is one JSON object that is complete after every step: new entries overwrite its last bracket, with one write,
so that a step costs the same however many entries there are. A run deletes the entries of an earlier run when it
begins. In msprobe the key does not contain the statistic, so that of several anomalies of one tensor only the last one
is left; here each has its own key, and the fields are those of msprobe. Tags (`0:layers.0.input_1:0/rank3/actv`)
consist of chunk, name, tensor of several, and micro-batch; then rank; then the measured kind.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.csv_layout import row_name, their_step
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks import files
from rankscope_exporter.sinks.base import Sink

_TASKS: Final[dict[str, str]] = {
    Kind.GRAD_UNREDUCED: "acc_grad",
    Kind.GRAD_REDUCED: "post_grad",
    Kind.PARAM_BEFORE: "param_origin",
    Kind.PARAM_AFTER: "param_updated",
    Kind.ACT_IN: "actv",
    Kind.ACT_OUT: "actv",
    Kind.ACT_GRAD_IN: "actv_grad",
    Kind.ACT_GRAD_OUT: "actv_grad",
}
"""A kind that the tool does not have goes under its own name; its moments have ours."""


def tag(
    kind: str,
    tensor: str,
    rank: int,
    *,
    index: int | None = None,
    micro_step: int | None = None,
    vpp_stage: int | None = None,
) -> str:
    """Return the name of a tensor."""
    micro = "" if micro_step is None else f":{micro_step}"
    return f"{vpp_stage or 0}:{row_name(kind, tensor, index)}{micro}/rank{rank}/{_TASKS.get(kind, kind)}"


NOT_KNOWN = -1


class Steps(NamedTuple):
    """Our number of a step, and of the step that is the tool's 0."""

    ours: int
    first: int


def entries(
    events: Iterable[Event], steps: Steps, *, rank: int, pp_stage: int, group_mates: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield key and JSON text of each anomaly of a tensor among the `events` of a step."""
    keys: set[str] = set()
    for event in events:
        if event.type != EventType.ANOMALY or event.tensor is None or event.kind is None:
            continue
        name = tag(event.kind, event.tensor, rank, micro_step=event.micro_step, vpp_stage=event.vpp_stage)
        theirs = max(0, their_step(event.kind, steps.ours, steps.first))
        call = NOT_KNOWN if event.call_id is None else event.call_id
        entry = {
            "rank": rank,
            "step": theirs,
            "micro_step": event.micro_step or 0,
            "pp_stage": pp_stage if event.pp_stage is None else event.pp_stage,
            "vpp_stage": event.vpp_stage or 0,
            "call_id": call,
            "tag_name": name,
            "message": _message(event, name, theirs),
            "group_mates": list(group_mates),
        }
        key = _unused(f"{name}_step_{theirs}_call_{call}", event.op, keys)
        keys.add(key)
        yield key, json.dumps(entry, ensure_ascii=False)


def _unused(key: str, op: str | None, keys: set[str]) -> str:
    candidates = [key, f"{key}_{op}", *(f"{key}_{op}_{number}" for number in range(2, len(keys) + 3))]
    return next(candidate for candidate in candidates if candidate not in keys)


def _message(event: Event, name: str, step: int) -> str:
    return (
        f"Rule {event.rule} reports anomaly signal in ('{name}', '{event.op}') at step {step}, "
        f"current value {_number(event.value)}, history mean {_number(event.baseline)}."
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


MOST_BYTES: Final = 256 << 20
_FOLDER: Final = "anomaly_detected"
_END: Final = b"\n}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyOptions:
    """Settings of the sink."""

    folder: str | None = None
    """MONITOR_OUTPUT_DIR, or ./monitor_output, where it is not given."""

    def __post_init__(self) -> None:
        files.check_folder(self.folder)


class Anomalies(Sink):
    """The sink."""

    name = "anomalies"
    options_class = AnomalyOptions

    def __init__(self, options: AnomalyOptions, identity: Identity) -> None:
        self._rank = identity.rank
        self._path = files.output_folder(options.folder) / _FOLDER / f"rank{identity.rank}" / "anomaly.json"
        self._numbering = files.Numbering()
        self._stage, self._mates = identity.rank, tuple(range(identity.world_size))
        self._begun = False
        self._bytes = 0

    def place(self, pp_stage: int, group_mates: Sequence[int]) -> None:
        """Say where this rank stands in its pipeline, and with whom; without a word it is one of all ranks."""
        self._stage, self._mates = pp_stage, tuple(group_mates)

    def put(self, record: StepRecord) -> None:
        """Add the anomalies of a step."""
        if not self._begun:
            self._path.unlink(missing_ok=True)
            self._begun = True
        first = self._numbering.first(record)
        if record.step is None:
            return
        steps = Steps(record.step, first)
        found = dict(entries(record.events, steps, rank=self._rank, pp_stage=self._stage, group_mates=self._mates))
        if found:
            self._add(",\n".join(f" {json.dumps(key, ensure_ascii=False)}: {entry}" for key, entry in found.items()))

    def _add(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace") + _END
        if self._bytes + len(data) > MOST_BYTES:
            raise OSError(f"{self._path} holds {self._bytes:,} bytes already, and takes no more")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if os.fstat(handle).st_size != self._bytes:  # somebody took it away
                os.ftruncate(handle, 0)
                self._bytes = 0
            place = max(0, self._bytes - len(_END))
            data = (b",\n" if self._bytes else b"{\n") + data
            written = os.pwrite(handle, data, place)
            if written != len(data):  # a full disk: the object must stay whole
                os.pwrite(handle, _END, place)
                os.ftruncate(handle, self._bytes)
                raise OSError(f"{self._path}: {written} of {len(data)} bytes were written")
            self._bytes = place + len(data)
        finally:
            os.close(handle)
