"""Sink that writes TensorBoard event files with the tags of msprobe, without protobuf.

The path of a file and the tag of a value have these forms:

    <folder>/rank<R>[/<family>]/events.out.tfevents.<seconds>.<8 hex>
    <stage>:<name>[.<input|output>][:<micro step>]/rank<R>/<family>_<statistic>

Scalars are in the folder of the rank, statistics in a folder for each family. A file contains the number of its first
step, and readers discard this step and all later steps of older files in the same folder. Each family needs its own
folder, because the families differ in their first step. The numbers of steps are those of msprobe, from 0 on. Every
step is on disk when `put` returns.

A file is a sequence of records, each with a length, a checksum, an `Event` message and a checksum. A message consists
of the constant bytes of its tags, which are computed once per plan, and of four bytes for each value.
"""

from __future__ import annotations

import functools
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.identity import Identity
from rankscope_contract.msprobe.csv_layout import MICRO_STEP_FAMILIES, OPS, OTHER, plain, their_step
from rankscope_contract.msprobe.event_tags import Buckets, buckets, event_tag, scalar_tag
from rankscope_exporter.base.validation import validate
from rankscope_exporter.records.step_record import Scalar, StepRecord
from rankscope_exporter.sinks import files
from rankscope_exporter.sinks.base import Sink
from rankscope_exporter.sinks.families import FamilyRows, FeatureRow, PlannedRows, columns_of, feature_rows

WALL_TIME: Final = b"\x09"  # field 1 of Event, a double
STEP: Final = b"\x10"  # field 2, a varint
FILE_VERSION: Final = b"\x1a"  # field 3, text
SUMMARY: Final = b"\x2a"  # field 5, a message of values
SESSION_LOG: Final = b"\x3a"  # field 7, a message
VALUE: Final = b"\x0a"  # field 1 of Summary
TAG: Final = b"\x0a"  # field 1 of Value
SIMPLE_VALUE: Final = b"\x15"  # field 2 of Value, a float
HISTOGRAM: Final = b"\x2a"  # field 5 of Value, a message with these five doubles and two lists of doubles
LOW, HIGH, COUNT, TOTAL, SQUARES = (bytes([8 * number + 1]) for number in range(1, 6))
LIMITS, COUNTS = b"\x32", b"\x3a"

_START: Final = b"\x08\x01"  # field 1 of SessionLog: readers discard the steps of earlier files from this step on
_NUMBER: Final = struct.Struct("<f")
_LENGTH: Final = struct.Struct("<Q")
_SUM: Final = struct.Struct("<I")
_DOUBLE: Final = struct.Struct("<d")
_POLYNOMIAL: Final = 0x82F63B78
_LARGEST: Final = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def beginning(seconds: float, step: int) -> bytes:
    """Return the bytes with which a TensorBoard event file begins.

    `step` is the step of the first value in the file.
    """
    version = WALL_TIME + _DOUBLE.pack(seconds) + _with_length(FILE_VERSION, b"brain.Event:2")
    return _record(version) + _record(_head(seconds, step) + _with_length(SESSION_LOG, _START))


def value_head(tag: str) -> bytes:
    """Return the constant bytes that precede a float32 value with the tag `tag` in a TensorBoard event file."""
    named = _with_length(TAG, tag.encode("utf-8", "replace")) + SIMPLE_VALUE
    return VALUE + _varint(len(named) + _NUMBER.size) + named


def histogram_value(tag: str, histogram: Buckets) -> bytes:
    """Return the bytes of a value that is a histogram, with the tag `tag`, in an event file."""
    numbers = {
        LOW: histogram.low,
        HIGH: histogram.limits[-1],
        COUNT: sum(histogram.counts),
        TOTAL: histogram.total,
        SQUARES: histogram.squares,
    }
    message = b"".join(field + _DOUBLE.pack(number) for field, number in numbers.items())
    for field, listed in ((LIMITS, histogram.limits), (COUNTS, histogram.counts)):
        message += _with_length(field, b"".join(map(_DOUBLE.pack, listed)))
    return _with_length(VALUE, _with_length(TAG, tag.encode("utf-8", "replace")) + _with_length(HISTOGRAM, message))


def event(seconds: float, step: int, values: Iterable[bytes]) -> bytes:
    """Return the TensorBoard record of some values of one step."""
    return _record(_head(seconds, step) + _with_length(SUMMARY, b"".join(values)))


def _head(seconds: float, step: int) -> bytes:
    return WALL_TIME + _DOUBLE.pack(seconds) + STEP + _varint(step)


def number_bytes(number: float) -> bytes:
    """Return `number` as four bytes.

    In an event file, they follow the bytes that `value_head` returned for the tag of the number.
    """
    try:
        return _NUMBER.pack(number)
    except OverflowError:  # a count or a double out of the range of float32
        return _NUMBER.pack(_LARGEST if number > 0 else -_LARGEST)


def _with_length(field: bytes, content: bytes) -> bytes:
    return field + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(0x80 | number & 0x7F)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def _record(data: bytes) -> bytes:
    length = _LENGTH.pack(len(data))
    return b"".join((length, _SUM.pack(_masked_sum(length)), data, _SUM.pack(_masked_sum(data))))


def _masked_sum(data: bytes) -> int:
    """Return the CRC-32C checksum of `data`, rotated and masked as the format of TensorBoard event files requires."""
    crc = _crc_function()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc_function() -> Callable[[bytes], int]:
    """Return a function that computes CRC-32C.

    It is the function of the package google-crc32c if this package is installed, because that function is 50 times
    faster than `crc32c` in this module.
    """
    try:
        from google_crc32c import value  # noqa: PLC0415 - only where event files are written
    except ImportError:
        return crc32c
    found: Callable[[bytes], int] = value
    return found


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum of `data`. It is computed four bytes at a time."""
    low, high = _pair_tables()
    crc = 0xFFFFFFFF
    for word in memoryview(data[: len(data) & ~3]).cast("I") if sys.byteorder == "little" else ():
        crc ^= word
        crc = high[crc & 0xFFFF] ^ low[crc >> 16]
    table = _table()
    for octet in data[len(data) & ~3 :] if sys.byteorder == "little" else data:
        crc = table[(crc ^ octet) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _pair_tables() -> tuple[array[int], array[int]]:
    """Return two tables of CRC-32C remainders, both indexed by a 16-bit value.

    The first table has the remainder of the value after two bytes, the second table the one after four bytes.
    """
    table = _table()
    two = [table[table[pair & 0xFF] & 0xFF ^ pair >> 8] ^ table[pair & 0xFF] >> 8 for pair in range(1 << 16)]
    four = (two[crc & 0xFFFF] ^ crc >> 16 for crc in two)
    return array("I", two), array("I", four)


@functools.cache
def _table() -> tuple[int, ...]:
    return tuple(
        functools.reduce(lambda crc, _: crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0), range(8), n) for n in range(256)
    )


SCALARS: Final = ""
"""Family name of the scalars. It is empty, because their event file is in the folder of the rank."""

EVENT_VALUES: Final = 2_000
"""Maximum number of values in one record of an event file. Readers skip records of many megabytes."""

Values = Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardOptions:
    """Settings of the sink `tensorboard`."""

    folder: files.Folder | None = None
    """The output folder. The default is the environment variable MONITOR_OUTPUT_DIR, or else ./monitor_output."""
    squash_name: bool = True
    """True removes the prefixes of wrapping modules from the names of tensors and modules.

    The setting of msprobe is squash_name.
    """
    ops: files.Ops = OPS
    """Names of the statistics to write. Statistics that are not published are omitted."""

    def __post_init__(self) -> None:
        validate(self)


class TensorBoard(Sink):
    """The sink `tensorboard`, which writes one event file for the scalars and for each msprobe family of one rank.

    A family is a group of statistics, features or histograms.
    """

    name = "tensorboard"
    options_class = TensorBoardOptions

    def __init__(self, options: TensorBoardOptions, identity: Identity) -> None:
        self._options = options
        self._rank = identity.rank
        self._folder = files.output_folder(options.folder) / f"rank{identity.rank}"
        self._file = f"events.out.tfevents.{int(time.time()):010d}.{identity.incarnation[:8]}"
        self._numbering = files.Numbering()
        self._naming = files.naming(squash=options.squash_name)
        prepare = functools.partial(_Tagged, rank=identity.rank)
        self.tensor_rows = PlannedRows(prepare, self._naming, options.ops)

    def put(self, record: StepRecord) -> None:
        """Write the scalars, statistics, features and histograms of a record to the event files."""
        first = self._numbering.first(record)
        if record.step is None:
            return
        for family, step, values in self._families(record, record.step, first):
            if values and step >= 0:
                self._write(family, record.ts / 1e6, step, values)

    def _families(self, record: StepRecord, ours: int, first: int) -> Iterator[tuple[str, int, Values]]:
        step = their_step(None, ours, first)
        yield SCALARS, step, [_scalar_value(scalar, record.micro_step) for scalar in record.scalars]
        if record.statistics is not None:
            columns = columns_of(record.statistics)
            for tagged in self.tensor_rows.of(record.statistics):
                yield tagged.rows.family, their_step(tagged.rows.kind, ours, first), tagged.values(columns)
        for family, rows in feature_rows(record.features, self._naming).items():
            yield family, step, [value for row in rows for value in _feature_values(family, row, self._rank)]
        histograms: dict[str, list[bytes]] = {}
        for row in record.histograms:
            histograms.setdefault(row["kind"], []).extend(self._histogram_values(row))
        for kind, values in histograms.items():
            yield kind, step, values

    def _histogram_values(self, row: Mapping[str, Any]) -> Values:
        histogram = buckets(row)
        if histogram is None:
            return []
        name, vpp_stage = self._naming(row["tensor"], False), row.get("vpp_stage") or 0
        return [histogram_value(event_tag(name, row["kind"], rank=self._rank, vpp_stage=vpp_stage), histogram)]

    def _write(self, family: str, seconds: float, step: int, values: Values) -> None:
        starts = range(0, len(values), EVENT_VALUES)
        data = b"".join(event(seconds, step, values[start : start + EVENT_VALUES]) for start in starts)
        path = self._folder / family / self._file
        try:
            files.append(path, data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.create(path, beginning(seconds, step) + data)


class _Tagged:
    """The rows of one msprobe family (a group of tensors), with the constant bytes of their TensorBoard tags."""

    def __init__(self, rows: FamilyRows, ops: Sequence[str], *, rank: int) -> None:
        self.rows = rows
        micro_steps = rows.family in MICRO_STEP_FAMILIES or rows.has_micro_steps
        self._heads = {
            op: [
                value_head(_tag(vpp, name, micro if micro_steps else None, rank, f"{rows.family}_{op}"))
                for vpp, name, micro in rows.keys
            ]
            for op in ops
        }

    def values(self, columns: dict[str, Any]) -> Values:
        """Return the bytes of the statistics of the tensors that exist at this step.

        A count without a known value is omitted.
        """
        listed = self.rows.there(columns["numel"]).to_pylist()
        positions = pa.array([self.rows.positions[place] for place in listed], pa.int64())
        return [
            heads[place] + number_bytes(number)
            for op, heads in self._heads.items()
            for place, number in zip(listed, columns[op].take(positions).to_pylist(), strict=True)
            if number is not None
        ]


def _scalar_value(scalar: Scalar, micro_step: int | None) -> bytes:
    tag = scalar_tag(scalar.name, scalar.labels)
    return value_head(tag if micro_step is None else f"{tag}:{micro_step}") + number_bytes(scalar.value)


def _feature_values(family: str, row: FeatureRow, rank: int) -> Iterator[bytes]:
    # The family `other` has one number, which msprobe repeats for every statistic. One of them is written.
    columns = {"norm": row.numbers["norm"]} if family == OTHER and row.numbers else row.numbers
    micro_step = row.micro_step if family in MICRO_STEP_FAMILIES else None
    for column, number in columns.items():
        yield value_head(_tag(row.vpp_stage, row.name, micro_step, rank, f"{family}_{column}")) + number_bytes(number)


def _tag(vpp_stage: int, cell: str, micro_step: int | None, rank: int, task: str) -> str:
    return event_tag(plain(cell), task, rank=rank, vpp_stage=vpp_stage, micro_step=micro_step)
