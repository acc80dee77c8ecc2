"""Writer of rows of the store as events of one TensorBoard event file."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rankscope_contract.model.event_tags import buckets, event_tag
from rankscope_storage.tensorboard.frames import frame
from rankscope_storage.tensorboard.messages import Event, Histogram, put_number
from rankscope_storage.tensorboard.tags import OPS, TensorTag, labelled, parse_tensor_tag, tensor_tag

WRITER: Final = b"rankscope "
"""Start of `source_metadata` in the first event of files that Rankscope wrote.

An event of such a file contains complete rows of the store."""

FILE_VERSION: Final = b"brain.Event:2"
DESCRIBED: Final = {
    "tensor_stats": ("kind", "tensor", "index", "vpp_stage", "micro_step", "placement", "shard_group", "call_seq"),
    "scalars": ("name", "unit", "labels", "vpp_stage", "micro_step"),
    "features": ("kind", "module", "index", "vpp_stage", "micro_step"),
}
"""Columns that identify a series, by dataset; they are written into the description of a tag."""

PLACEMENT: Final = "full"
"""Value of the column `placement` that a reader of the file assumes for a tensor if its tag has no description."""

EVENT_VALUES: Final = 2_000
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
SCALARS: Final = b"scalars"
_DATA_CLASS_SCALAR: Final = 1


class EventFile:
    """Writer of one TensorBoard event file; a context manager that closes the file."""

    def __init__(self, path: Path, *, rank: int | None, attempt: int | None, ops: Sequence[str] = OPS) -> None:
        self._ops = ops
        self.omitted: Counter[str] = Counter()
        self._file = path.open("wb")
        self._rank = rank
        self._tags: dict[tuple[Any, ...], bytes] = {}
        self._taken: set[bytes] = set()
        self._first_of: dict[bytes, dict[str, Any] | None] = {}
        first = Event(file_version=FILE_VERSION)
        first.source_metadata.writer = WRITER + json.dumps({"rank": rank, "attempt": attempt}).encode()
        self._put(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: int, ts: dt.datetime | None, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the rows of one step and time; `rows` maps a dataset to its rows."""
        event = self._event(step, ts)
        for dataset, listed in rows.items():
            for row in listed:
                if len(event.summary.value) > EVENT_VALUES:
                    self._put(event)
                    event = self._event(step, ts)
                if dataset == "tensor_stats":
                    self._add_tensor(event, row)
                elif dataset == "histograms":
                    self._add_histogram(event, row)
                else:
                    self._add_number(event, dataset, row)
        if event.summary.value:
            self._put(event)

    def _event(self, step: int, ts: dt.datetime | None) -> Any:
        event = Event(step=step)
        if ts is not None:
            event.wall_time = (ts - EPOCH) / dt.timedelta(seconds=1)
        return event

    def _put(self, event: Any) -> None:
        self._file.write(frame(event.SerializeToString()))

    def _add_tensor(self, event: Any, row: Mapping[str, Any]) -> None:
        present = [op for op in self._ops if row[op] is not None]
        if not present:
            self.omitted["tensors without any statistic"] += 1
        for op in present:
            self._add(event, "tensor_stats", row, row[op], op)

    def _add_histogram(self, event: Any, row: Mapping[str, Any]) -> None:
        found = buckets(row)
        if found is None:
            self.omitted["histograms without linear bins"] += 1
            return
        value = event.summary.value.add()
        tag = event_tag(row["tensor"], row["kind"], rank=self._rank or 0, vpp_stage=row["vpp_stage"] or 0)
        value.tag = tag.encode("utf-8", "replace")
        fields = {name: getattr(found, name) for name in ("low", "total", "squares", "limits", "counts")}
        value.histo = Histogram(high=found.limits[-1], count=sum(found.counts), **fields).SerializeToString()

    def _add_number(self, event: Any, dataset: str, row: Mapping[str, Any]) -> None:
        if row["value"] is None:
            self.omitted["values that are null"] += 1
        else:
            self._add(event, dataset, row, row["value"], "")

    def _add(self, event: Any, dataset: str, row: Mapping[str, Any], number: float, op: str) -> None:
        key = (dataset, op, *(row[name] for name in DESCRIBED[dataset]))
        tag = self._tags.get(key)
        value = event.summary.value.add()
        if tag is None:
            tag = self._tags[key] = self._new_tag(dataset, row, op)
            value.metadata.plugin_data.plugin_name = SCALARS
            value.metadata.data_class = _DATA_CLASS_SCALAR
            description = self._first_of.pop(tag)
            if description is not None:
                value.metadata.summary_description = json.dumps(description, ensure_ascii=False).encode()
        value.tag = tag
        put_number(value, number)

    def _new_tag(self, dataset: str, row: Mapping[str, Any], op: str) -> bytes:
        """Return a tag that no other series of the event file has.

        The method also stores the description of the tag. The description is written into the file with the first
        value.
        """
        if dataset == "tensor_stats":
            tag, plain = _tensor_tag(row, op, self._rank)
        elif dataset == "scalars":
            tag, plain = labelled(row["name"], row["labels"]), False
        else:
            index = "" if row["index"] is None else f"[{row['index']}]"
            tag, plain = f"{row['module']}/{row['kind']}{index}", False
        unique, number = tag.encode("utf-8", "replace"), 1
        while unique in self._taken:
            number += 1
            unique, plain = f"{tag} ({number})".encode("utf-8", "replace"), False
        self._taken.add(unique)
        described = {name: row[name] for name in DESCRIBED[dataset] if row[name] is not None}
        self._first_of[unique] = None if plain else {"dataset": dataset, **({"op": op} if op else {}), **described}
        return unique


def _tensor_tag(row: Mapping[str, Any], op: str, rank: int | None) -> tuple[str, bool]:
    """Return the tag of a statistic, and whether the tag alone contains all columns that identify the series."""
    names = ("kind", "tensor", "index", "vpp_stage", "micro_step")
    parts = TensorTag(op=op, rank=rank, **{name: row[name] for name in names})
    tag = tensor_tag(parts)
    is_usual = row["placement"] == PLACEMENT and row["shard_group"] is None and row["call_seq"] is None
    return tag, is_usual and parse_tensor_tag(tag) == parts
