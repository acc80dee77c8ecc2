"""Event files for TensorBoard, laid out as the existing tool's own conversion of its CSV does it.

    <folder>/rank<R>/<family>/events.out.tfevents.<seconds>.<8 hex>      tag vp<stage>:<name>[:micro<m>]/<statistic>

Steps are those of the existing tool, from 0 on. Every step is on disk when the record has been taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.identity import Identity
from rankscope_contract.msprobe.layout import MICRO_STEP_FAMILIES, OPS, OTHER, plain, their_step
from rankscope_exporter.record import Statistics, StepRecord
from rankscope_exporter.sinks import output, writing
from rankscope_exporter.sinks.base import Sink
from rankscope_exporter.sinks.event_files import beginning, event, value_head
from rankscope_exporter.sinks.families import FamilyRows, FeatureRow, columns_of, family_rows, feature_rows

EVENT_VALUES: Final = 2_000
"""Numbers in one record: readers skip records of many megabytes."""

Numbers = Sequence[tuple[bytes, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardOptions:
    """Settings of the sink."""

    folder: str | None = None
    """MONITOR_OUTPUT_DIR, or ./monitor_output, where it is not given."""
    squash_name: bool = False
    """Leave away what wraps the model, as the existing tool's squash_name does."""
    ops: tuple[str, ...] = OPS
    """The statistics that are written, as far as they are published."""

    def __post_init__(self) -> None:
        output.check_folder(self.folder)
        output.check_truth("squash_name", self.squash_name)
        object.__setattr__(self, "ops", output.chosen_ops(self.ops))


class TensorBoard(Sink):
    """The sink."""

    name = "tensorboard"
    options_class = TensorBoardOptions

    def __init__(self, options: TensorBoardOptions, identity: Identity) -> None:
        self._options = options
        self._folder = output.output_folder(options.folder) / f"rank{identity.rank}"
        self._file = f"events.out.tfevents.{int(time.time()):010d}.{identity.incarnation[:8]}"
        self._numbering = output.Numbering()
        self._shown = output.naming(squash=options.squash_name)
        self._plan = ""
        self._published: Sequence[frozenset[str]] | None = None
        self._tagged: Sequence[_Tagged] = ()

    def put(self, record: StepRecord) -> None:
        """Write the step."""
        first = self._numbering.first(record)
        if record.step is None:
            return
        for family, step, numbers in self._families(record, record.step, first):
            if numbers and step >= 0:
                self._write(family, record.ts / 1e6, step, numbers)

    def _families(self, record: StepRecord, ours: int, first: int) -> Iterator[tuple[str, int, Numbers]]:
        if record.statistics is not None:
            columns = columns_of(record.statistics)
            for tagged in self._tagged_of(record.statistics):
                yield tagged.rows.family, their_step(tagged.rows.kind, ours, first), tagged.numbers(columns)
        for family, rows in feature_rows(record.features, self._shown).items():
            numbers = [pair for row in rows for pair in _feature_numbers(family, row)]
            yield family, their_step(None, ours, first), numbers

    def _tagged_of(self, statistics: Statistics) -> Sequence[_Tagged]:
        if statistics.plan.hash != self._plan or statistics.ops is not self._published:
            families = family_rows(statistics.plan.plan.entries, self._shown, statistics.ops)
            chosen = [(rows, [op for op in self._options.ops if op in rows.ops]) for rows in families]
            self._tagged = [_Tagged(rows, ops) for rows, ops in chosen if ops]
            self._plan, self._published = statistics.plan.hash, statistics.ops
        return self._tagged

    def _write(self, family: str, seconds: float, step: int, numbers: Numbers) -> None:
        starts = range(0, len(numbers), EVENT_VALUES)
        data = b"".join(event(seconds, step, numbers[start : start + EVENT_VALUES]) for start in starts)
        path = self._folder / family / self._file
        try:
            writing.append(path, data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            writing.create(path, beginning(seconds, step) + data)


class _Tagged:
    """The rows of one family with the bytes of their tags."""

    def __init__(self, rows: FamilyRows, ops: Sequence[str]) -> None:
        self.rows = rows
        micro_steps = rows.family in MICRO_STEP_FAMILIES or rows.has_micro_steps
        names = [_named(vpp, name, micro if micro_steps else None) for vpp, name, micro in rows.keys]
        self._heads = {op: [value_head(f"{name}/{op}") for name in names] for op in ops}

    def numbers(self, columns: dict[str, Any]) -> Numbers:
        """Return the numbers of the rows that are there, with their tags; a count that is not known has none."""
        listed = self.rows.there(columns["numel"]).to_pylist()
        positions = pa.array([self.rows.positions[place] for place in listed], pa.int64())
        return [
            (heads[place], number)
            for op, heads in self._heads.items()
            for place, number in zip(listed, columns[op].take(positions).to_pylist(), strict=True)
            if number is not None
        ]


def _feature_numbers(family: str, row: FeatureRow) -> Numbers:
    name = _named(row.vpp_stage, row.name, row.micro_step if family in MICRO_STEP_FAMILIES else None)
    # The one number of `other` is the same under every statistic; here one of them is enough.
    columns = {"norm": row.numbers["norm"]} if family == OTHER and row.numbers else row.numbers
    return [(value_head(f"{name}/{column}"), number) for column, number in columns.items()]


def _named(vpp_stage: int, cell: str, micro_step: int | None) -> str:
    """Return a tag without its statistic; a colon or percent sign of the name is encoded, as our exports do it."""
    name = plain(cell).replace("%", "%25").replace(":", "%3A")
    return f"vp{vpp_stage}:{name}" + ("" if micro_step is None else f":micro{micro_step}")
