"""Sink that writes firings of rules to `anomaly_detected/rank<r>/anomaly.json`, in the format of msprobe.

The file is one JSON object, which is complete after every step. New entries overwrite the closing bracket of the object
with one write, so the cost of a step does not depend on the number of entries. The first record of a run deletes the
file of an earlier run.

In msprobe, the key of an entry does not contain the statistic, so msprobe's file has only the last of several anomalies
of a tensor. In the file of this sink, each anomaly has a separate key. An entry identifies its tensor by a tag: a text
with stage, tensor name, micro-batch, rank and kind. `rankscope_contract.msprobe.files` describes these tags.
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
from rankscope_contract.msprobe.csv_layout import their_step
from rankscope_contract.msprobe.files import ANOMALY_FILE, ANOMALY_FOLDER, NOT_KNOWN, anomaly_message, anomaly_tag
from rankscope_exporter.base.validation import validate
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks import files
from rankscope_exporter.sinks.base import Sink

MOST_BYTES: Final = 256 << 20
_END: Final = b"\n}\n"


class Steps(NamedTuple):
    """The number of a step in Rankscope, and the number in Rankscope that corresponds to step 0 of msprobe."""

    ours: int
    first: int


def entries(
    events: Iterable[Event], steps: Steps, *, rank: int, pp_stage: int, group_mates: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield the key and the JSON text of each anomaly in the `events` of a step."""
    keys: set[str] = set()
    for event in events:
        if event.type != EventType.ANOMALY or event.tensor is None or event.kind is None:
            continue
        tag = anomaly_tag(event.kind, event.tensor, rank, micro_step=event.micro_step, vpp_stage=event.vpp_stage)
        step = max(0, their_step(event.kind, steps.ours, steps.first))
        call = NOT_KNOWN if event.call_id is None else event.call_id
        entry = {
            "rank": rank,
            "step": step,
            "micro_step": event.micro_step or 0,
            "pp_stage": pp_stage if event.pp_stage is None else event.pp_stage,
            "vpp_stage": event.vpp_stage or 0,
            "call_id": call,
            "tag_name": tag,
            "message": anomaly_message(
                rule=event.rule,
                tag=tag,
                op=event.op,
                step=step,
                value=math.nan if event.value is None else event.value,
                baseline=math.nan if event.baseline is None else event.baseline,
            ),
            "group_mates": list(group_mates),
        }
        key = _unused(f"{tag}_step_{step}_call_{call}", event.op, keys)
        keys.add(key)
        yield key, json.dumps(entry, ensure_ascii=False)


def _unused(key: str, op: str | None, keys: set[str]) -> str:
    candidates = [key, f"{key}_{op}", *(f"{key}_{op}_{number}" for number in range(2, len(keys) + 3))]
    return next(candidate for candidate in candidates if candidate not in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyOptions:
    """Settings of the sink `anomalies`."""

    folder: files.Folder | None = None
    """The output folder. The default is the environment variable MONITOR_OUTPUT_DIR, or else ./monitor_output."""

    def __post_init__(self) -> None:
        validate(self)


class Anomalies(Sink):
    """The sink `anomalies`, which writes the anomalies of one rank to a JSON file."""

    name = "anomalies"
    options_class = AnomalyOptions

    def __init__(self, options: AnomalyOptions, identity: Identity) -> None:
        self._rank = identity.rank
        self._path = files.output_folder(options.folder) / ANOMALY_FOLDER / f"rank{identity.rank}" / ANOMALY_FILE
        self._numbering = files.Numbering()
        self._stage, self._mates = identity.rank, tuple(range(identity.world_size))
        self._begun = False
        self._bytes = 0

    def place(self, pp_stage: int, group_mates: Sequence[int]) -> None:
        """Set the pipeline stage of this rank and the ranks of its pipeline group. The file contains both.

        By default, the stage is the number of the rank, and the group contains all ranks.
        """
        self._stage, self._mates = pp_stage, tuple(group_mates)

    def put(self, record: StepRecord) -> None:
        """Write the anomalies in the events of a record to the file."""
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
            raise OSError(f"{self._path}: limit of {MOST_BYTES:,} bytes reached; further anomalies are not written")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if os.fstat(handle).st_size != self._bytes:  # another process replaced or removed the file
                os.ftruncate(handle, 0)
                self._bytes = 0
            place = max(0, self._bytes - len(_END))
            data = (b",\n" if self._bytes else b"{\n") + data
            written = os.pwrite(handle, data, place)
            if written != len(data):  # the disk is full: the object must remain complete
                os.pwrite(handle, _END, place)
                os.ftruncate(handle, self._bytes)
                raise OSError(f"{self._path}: only {written} of {len(data)} bytes were written; the disk may be full")
            self._bytes = place + len(data)
        finally:
            os.close(handle)
