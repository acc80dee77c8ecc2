"""Sink that writes TensorBoard event files with the tags of msprobe.

The path of a file and the tag of a value have these forms:

    <folder>/rank<R>[/<family>]/events.out.tfevents.<seconds>.<8 hex>
    <stage>:<name>[.<input|output>][:<micro step>]/rank<R>/<family>_<statistic>

Scalars are in the folder of the rank, statistics in a folder for each family. A file contains the number of its first
step, and readers discard this step and all later steps of older files in the same folder. Each family needs its own
folder, because the families differ in their first step. The numbers of steps are those of msprobe, from 0 on. Every
step is on disk when `put` returns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.event_tags import buckets, event_tag, scalar_tag
from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.validation import validate
from rankscope_exporter.publish.sinks import Sink, files
from rankscope_exporter.publish.sinks.event_file import beginning, event, histogram_value, number_bytes, value_head
from rankscope_exporter.records.record import Scalar, StepRecord
from rankscope_msprobe.files.csv_layout import MICRO_STEP_FAMILIES, OPS, OTHER, plain, their_step
from rankscope_msprobe.sinks import output
from rankscope_msprobe.sinks.families import FamilyRows, FeatureRow, PlannedRows, columns_of, feature_rows

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
    ops: output.Ops = OPS
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
        self._numbering = output.Numbering()
        self._naming = output.naming(squash=options.squash_name)
        prepare = functools.partial(_Tagged, rank=identity.rank)
        self.tensor_rows = PlannedRows(prepare, self._naming, options.ops)

    def put(self, record: StepRecord) -> None:
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
