"""Writes what rules found to `anomaly_detected/rank<r>/anomaly.json`, in the words of the existing tool.

One JSON object that is whole after every step: what is new goes over its last bracket, with one write, so that a step
costs the same however many there were before. What an earlier run left in the file goes when a run begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.identity import Identity
from rankscope_exporter.msprobe.anomaly_entries import Steps, entries
from rankscope_exporter.record import StepRecord
from rankscope_exporter.sinks import output
from rankscope_exporter.sinks.base import Sink

MOST_BYTES: Final = 256 << 20
_FOLDER: Final = "anomaly_detected"
_END: Final = b"\n}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyOptions:
    """Settings of the sink."""

    folder: str | None = None
    """MONITOR_OUTPUT_DIR, or ./monitor_output, where it is not given."""

    def __post_init__(self) -> None:
        output.check_folder(self.folder)


class Anomalies(Sink):
    """The sink."""

    name = "anomalies"
    options_class = AnomalyOptions

    def __init__(self, options: AnomalyOptions, identity: Identity) -> None:
        self._rank = identity.rank
        self._path = output.output_folder(options.folder) / _FOLDER / f"rank{identity.rank}" / "anomaly.json"
        self._numbering = output.Numbering()
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
