"""Convert the events of one TensorBoard file into rows of the store. The module performs no I/O.

`rankscope_storage.tensorboard.frames` reads the bytes of events from the file; this module interprets them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType, Severity
from rankscope_contract.model.kinds import COUNT_OPS
from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.importer import FROM_FILE, RECORD_COLUMN, ImportedBlock
from rankscope_ingest.importers.common.log_names import canonical
from rankscope_ingest.importers.common.values import micros
from rankscope_storage.tensorboard.events import DESCRIBED, PLACEMENT, WRITER
from rankscope_storage.tensorboard.messages import SESSION_START, DecodeError, Event, scalar_value, text_value
from rankscope_storage.tensorboard.tags import OPS, parse_tensor_tag, parse_tree_tag

BLOCK_ROWS: Final = 50_000
MAX_TAGS: Final = 1_000_000
"""The maximum number of tags whose descriptions and restarts are remembered.

The values of further tags are imported too, but nothing about these tags is remembered.
"""
MAX_TAGS_BYTES: Final = 128 << 20
MAX_TAG_BYTES: Final = 4_096
_TEXT_CHARACTERS: Final = 16_384

_OTHER_AXES: Final = (" vs samples", " vs steps", " vs tokens")
"""Suffixes of those Megatron tags whose x-axis is not the step.

Megatron writes each curve a second time over the number of samples or tokens; TensorBoard's step of such a tag is that
number.
"""

_COMMON: Final = ("step", "rank", "ts", "ts_origin", "attempt")
_COLUMNS: Final = {
    "tensor_stats": (*_COMMON, *DESCRIBED["tensor_stats"], *OPS),
    "scalars": (*_COMMON, *DESCRIBED["scalars"], "value"),
    "features": (*_COMMON, *DESCRIBED["features"], "value"),
    "events": (*_COMMON, "type", "severity", "message", "details"),
}
_TENSOR_COLUMNS: Final = ("kind", "tensor", "index", "vpp_stage", "micro_step", "call_seq")
_INT32: Final = 1 << 31
_MAX_COUNT: Final = float(1 << 63)

Row = dict[str, Any]
Place = tuple[int | None, int, str | None]
"""Rank, attempt and msprobe family of a file, as the names of its folders state them."""


class Rewinds:
    """Counts the restarts of training in the event files of one folder.

    Decreasing steps are detected per tag, because tags may be logged at different intervals.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._last: dict[int, tuple[int, int]] = {}
        self._highest: int | None = None

    def attempt_of(self, tag: bytes, step: int) -> int:
        """Return the attempt to which the value of `tag` at `step` belongs."""
        key = hash(tag)
        last = self._last.get(key)
        if last is not None and last[0] == self.attempt and step < last[1]:
            self.attempt += 1
        if last is not None or len(self._last) < MAX_TAGS:
            self._last[key] = (self.attempt, step)
        self._highest = step if self._highest is None else max(self._highest, step)
        return self.attempt

    def restart(self, step: int) -> None:
        """Count a restart if a session starts at `step` and values of this or a later step exist already.

        The new session replaces these values.
        """
        if self._highest is not None and step <= self._highest:
            self.attempt += 1
            self._highest = None


@dataclass(slots=True)
class _Series:
    """The dataset in which the values of a tag are stored, and the columns that are equal in all rows of the tag."""

    dataset: str
    columns: Row
    op: str = ""
    factor: float = 1.0
    axis_is_step: bool = True
    rank: int | None = None


class EventRows:
    """The rows of one event file. Events must be added in the order of the file."""

    def __init__(self, source: str, rewinds: Rewinds, place: Place, labels: Mapping[str, str]) -> None:
        self.passed_over = 0  # images, audio, histograms
        self._source = source
        self._rewinds = rewinds
        self._rank, self._attempt, self._family = place
        self._labels = labels
        self._is_export = False
        self._series: dict[bytes, _Series | None] = {}
        self._open: dict[tuple[Any, ...], Row] = {}  # rows of the current step, which consist of several events
        self._open_step: tuple[int, int] | None = None
        self._rows: dict[str, list[Row]] = {}
        self._count = 0
        self._records = 0
        self._record: int | None = None  # of the current event, once it has a row
        self._tag_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if at least 50,000 rows or 50,000 records are collected, so that they should be yielded as a block."""
        return self._count >= BLOCK_ROWS or self._records >= BLOCK_ROWS

    def take(self, data: bytes) -> str | None:
        """Add the rows of one event, which is serialized in `data`.

        Return the reason if the bytes cannot be decoded, otherwise None.
        """
        try:
            event = Event.FromString(data)
        except DecodeError:
            return "not an event: its bytes cannot be decoded"
        if event.source_metadata.writer.startswith(WRITER):
            self._take_own_header(event.source_metadata.writer)
        kind = event.WhichOneof("what")
        if kind == "session_log" and event.session_log.status == SESSION_START:
            self._rewinds.restart(event.step)
        elif kind == "summary":
            self._take_summary(event)
        return None

    def blocks(self) -> Iterator[ImportedBlock]:
        """Yield the collected rows as a block, and begin an empty block."""
        if self._records:
            tables = {dataset: _table(dataset, rows) for dataset, rows in self._rows.items() if rows}
            yield ImportedBlock(records=self._records, tables=tables, source=self._source)
        self._rows, self._count, self._records = {}, 0, 0

    def finish(self, *, settled: bool) -> Iterator[ImportedBlock]:
        """Yield the remaining rows.

        `settled` states that the file does not grow any more. If `settled` is false, the tensor statistics of the last
        step in the file are left out, because they may be incomplete.
        """
        if settled:
            self._close_step()
        yield from self.blocks()

    def _take_own_header(self, writer: bytes) -> None:
        self._is_export = True
        try:
            header = json.loads(writer[len(WRITER) :])
            rank, attempt = header["rank"], header["attempt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        self._rank = rank if _is_int32(rank) else None
        self._attempt = attempt if _is_int32(attempt) else 0

    def _take_summary(self, event: Any) -> None:
        common: Row = {"step": event.step, "ts": micros(event.wall_time)}
        self._record = None
        begun: dict[tuple[Any, ...], Row] = {}
        for value in event.summary.value:
            series = self._series_of(value)
            number = None if series is None else scalar_value(value)
            if series is None or number is None:
                text = text_value(value)
                if text is None:
                    self.passed_over += 1
                else:
                    self._add_note(common, value.tag, text)
                continue
            row = {**common, "rank": self._rank if series.rank is None else series.rank, **series.columns}
            if self._is_export:
                row["attempt"] = self._attempt
            elif not self._place(row, value.tag, series):
                row["step"] = None
            if series.dataset != "tensor_stats":
                self._add(series.dataset, {**row, "value": number * series.factor})
            elif self._is_export:
                self._add_own_statistic(begun, row, series, number)
            else:
                self._add_foreign_statistic(row, series, number)

    def _place(self, row: Row, tag: bytes, series: _Series) -> bool:
        """Set the attempt of `row`. If the row begins another step, store the tensor statistics of the previous step.

        Return True if the x-axis of the tag is the step, and False if it is a number of samples or tokens.
        """
        if not series.axis_is_step:
            row["attempt"] = self._attempt + self._rewinds.attempt
            return False
        row["attempt"] = self._attempt + self._rewinds.attempt_of(tag, row["step"])
        if self._open_step != (row["attempt"], row["step"]):
            self._close_step()
            self._open_step = (row["attempt"], row["step"])
        return True

    def _add_own_statistic(self, begun: dict[tuple[Any, ...], Row], row: Row, series: _Series, number: float) -> None:
        """Add a statistic of a Rankscope export to a row of `tensor_stats`.

        `begun` has the rows of `tensor_stats` that were created for earlier statistics of the same TensorBoard event.
        If the row of the tensor already contains this statistic, `row` is added as a new row.
        """
        key = tuple(series.columns.values())
        if key not in begun or series.op in begun[key]:
            begun[key] = row
            self._add("tensor_stats", row)
        begun[key][series.op] = _statistic(series.op, number)

    def _add_foreign_statistic(self, row: Row, series: _Series, number: float) -> None:
        """Add a statistic of msprobe to the row of its tensor at the current step.

        msprobe writes one statistic per event, so an earlier event may have created the row.
        """
        key = (row["rank"], *series.columns.values())
        if series.op in self._open.get(key, ()):
            opened = self._open_step
            self._close_step()
            self._open_step = opened
        self._open.setdefault(key, row)[series.op] = _statistic(series.op, number)

    def _close_step(self) -> None:
        """Store the tensor statistics of the current step, which is complete, as a separate record."""
        current, self._record = self._record, None
        for row in self._open.values():
            self._add("tensor_stats", row)
        self._record = current
        self._open, self._open_step = {}, None

    def _add_note(self, common: Row, tag: bytes, text: str) -> None:
        note = {
            "rank": self._rank,
            "attempt": self._attempt + (0 if self._is_export else self._rewinds.attempt),
            "type": EventType.NOTE,
            "severity": Severity.INFO,
            "message": text[:_TEXT_CHARACTERS],
            "details": json.dumps({"tag": _text(tag)}, ensure_ascii=False),
        }
        self._add("events", {**common, **note})

    def _add(self, dataset: str, row: Row) -> None:
        """Add a row to the record of the current event. The first row of an event begins the record."""
        if self._record is None:
            self._record = self._records
            self._records += 1
        row[RECORD_COLUMN] = self._record
        row["ts_origin"] = None if row["ts"] is None else FROM_FILE
        self._rows.setdefault(dataset, []).append(row)
        self._count += 1

    def _series_of(self, value: Any) -> _Series | None:
        """Return how the values of the tag of `value` are stored; None if the values of this tag are not numbers.

        The result contains the dataset, and the columns that are equal in all rows of the tag. Only the first value of
        a tag in a file may contain a description of the tag.
        """
        tag: bytes = value.tag
        if tag in self._series:
            return self._series[tag]
        series = self._describe(value)
        if len(self._series) < MAX_TAGS and self._tag_bytes < MAX_TAGS_BYTES:
            self._series[tag] = series
            self._tag_bytes += len(tag)
        return series

    def _describe(self, value: Any) -> _Series | None:
        plugin = value.metadata.plugin_data.plugin_name
        if plugin not in (b"", b"scalars") or len(value.tag) > MAX_TAG_BYTES:
            return None
        tag = _text(value.tag)
        described = _described(value.metadata.summary_description) if self._is_export else None
        if described is not None:
            return described
        found = parse_tensor_tag(tag) or (parse_tree_tag(tag, self._family, self._rank) if self._family else None)
        if found is not None:
            columns = {name: getattr(found, name) for name in _TENSOR_COLUMNS}
            columns["placement"] = PLACEMENT if self._is_export else None
            return _Series("tensor_stats", columns, found.op, rank=None if self._is_export else found.rank)
        alias = canonical(tag)
        columns = {"name": alias.name, "unit": alias.unit, "labels": alias.labels(tag, self._labels)}
        return _Series("scalars", columns, factor=alias.factor, axis_is_step=not tag.endswith(_OTHER_AXES))


def _described(description: bytes) -> _Series | None:
    """Return how the values of a tag are stored: their dataset, and the columns that are equal in all rows.

    `description` is the description of the tag in a Rankscope export. Return None for any other description.
    """
    try:
        columns = json.loads(description)
        dataset = columns.pop("dataset")
        op = columns.pop("op", "")
        known = DESCRIBED[dataset]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    schema = table_schema(dataset)
    fits = all(name in known and _fits(value, schema.field(name).type) for name, value in columns.items())
    required = all(schema.field(name).nullable or name in columns for name in known)
    if not fits or not required or (op not in OPS if dataset == "tensor_stats" else op):
        return None
    return _Series(dataset, {name: columns.get(name) for name in known}, op)


def _fits(value: Any, type_: pa.DataType) -> bool:
    if pa.types.is_string(type_):
        return isinstance(value, str) and _text(value.encode("utf-8", "replace")) == value
    if type_ == pa.int32():
        return _is_int32(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_int32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT32 <= value < _INT32


def _statistic(op: str, number: float) -> float | int | None:
    if op not in COUNT_OPS:
        return number
    return int(number) if math.isfinite(number) and abs(number) < _MAX_COUNT else None


def _text(tag: bytes) -> str:
    return tag.decode("utf-8", "replace")


def _table(dataset: str, rows: list[Row]) -> pa.Table:
    schema = table_schema(dataset)
    columns = {name: pa.array([row.get(name) for row in rows], schema.field(name).type) for name in _COLUMNS[dataset]}
    return pa.table({RECORD_COLUMN: pa.array([row[RECORD_COLUMN] for row in rows], pa.int32()), **columns})
