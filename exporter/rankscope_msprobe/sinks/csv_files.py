"""Sink that writes CSV files in the layout of msprobe while training runs.

Every step is on disk when `put` returns. A new file becomes visible only when it is complete. If a file covers several
steps, the lines of each step are appended. Nothing is buffered, so an exit or an exception loses no published row.
Lines are built from columns with a few Arrow kernels per step.

Sink that writes firings of rules to `anomaly_detected/rank<r>/anomaly.json`, in the format of msprobe.

The file is one JSON object, which is complete after every step. New entries overwrite the closing bracket of the object
with one write, so the cost of a step does not depend on the number of entries. The first record of a run deletes the
file of an earlier run.

In msprobe, the key of an entry does not contain the statistic, so msprobe's file has only the last of several anomalies
of a tensor. In the file of this sink, each anomaly has a separate key. An entry identifies its tensor by a tag: a text
with stage, tensor name, micro-batch, rank and kind. `rankscope_msprobe.files.csv_layout` describes these tags.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.event_tags import scalar_tag
from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.validation import Checked, between, list_of, validate
from rankscope_exporter.publish.sinks import Sink, files
from rankscope_exporter.records.record import Scalar, StepRecord
from rankscope_msprobe.files import csv_layout as layout
from rankscope_msprobe.sinks import output
from rankscope_msprobe.sinks.families import (
    FEATURE_COLUMNS,
    FamilyRows,
    FeatureRow,
    PlannedRows,
    columns_of,
    feature_rows,
)

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
        tag = layout.anomaly_tag(event.kind, event.tensor, rank, micro_step=event.micro_step, vpp_stage=event.vpp_stage)
        step = max(0, layout.their_step(event.kind, steps.ours, steps.first))
        call = layout.NOT_KNOWN if event.call_id is None else event.call_id
        entry = {
            "rank": rank,
            "step": step,
            "micro_step": event.micro_step or 0,
            "pp_stage": pp_stage if event.pp_stage is None else event.pp_stage,
            "vpp_stage": event.vpp_stage or 0,
            "call_id": call,
            "tag_name": tag,
            "message": layout.anomaly_message(
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
        self._path = (
            files.output_folder(options.folder) / layout.ANOMALY_FOLDER / f"rank{identity.rank}" / layout.ANOMALY_FILE
        )
        self._numbering = output.Numbering()
        self._stage, self._mates = identity.rank, tuple(range(identity.world_size))
        self._begun = False
        self._bytes = 0

    def place(self, pp_stage: int, group_mates: Sequence[int]) -> None:
        """Set the pipeline stage (by default the rank) and the ranks of its group (by default all) for the file."""
        self._stage, self._mates = pp_stage, tuple(group_mates)

    def put(self, record: StepRecord) -> None:
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


MOST_STEPS: Final = 1_000_000
MOST_DIGITS: Final = 20

_COMMA: Final = pa.scalar(",", pa.string())
_EMPTY: Final = pa.scalar("", pa.string())
_NAN: Final = pa.scalar("nan", pa.string())
_BRACKETS: Final = (pa.scalar("[", pa.string()), pa.scalar("]", pa.string()))


_TIMES: Final = list_of(str, "two folder times, such as Dec03_21-34-40")


def _check_times(value: Sequence[str]) -> None:
    try:
        layout.window(value)
    except ValueError as error:
        raise ValueError(str(error).replace("append_output", "append_to")) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvOptions:
    """Settings of the sink `csv`, most of which exist in msprobe under other names."""

    folder: files.Folder | None = None
    """The output folder. The default is the environment variable MONITOR_OUTPUT_DIR, or else ./monitor_output."""
    steps_per_file: Annotated[int, between(1, MOST_STEPS, "a number")] = 1
    """Number of steps in each file; the first file begins with step 0 of msprobe.

    The setting of msprobe is step_count_per_record.
    """
    digits: Annotated[int, between(1, MOST_DIGITS, "a number")] | None = None
    """Maximum number of digits after the decimal point; null writes all digits. The setting of msprobe is ndigits."""
    append_to: Annotated[tuple[str, str], _TIMES, Checked(_check_times)] | None = None
    """Start and end of a time window for an existing output folder of this rank.

    If such a folder was created in this window, the sink adds its files to it instead of to a new folder. The setting
    of msprobe is append_output.
    """
    squash_name: bool = True
    """True removes the prefixes of wrapping modules from the names of tensors and modules.

    The setting of msprobe is squash_name.
    """
    scalars: bool = True
    """True also writes the scalars, such as the loss, to files of the family `scalars`, which msprobe does not have."""
    time_zone: Annotated[str, Checked(layout.check_time_zone)] = layout.DEFAULT_TIME_ZONE
    """Time zone of the time in the name of the output folder: an offset, the name of a zone, or `local`."""
    ops: output.Ops = layout.OPS
    """Names of the statistics that become columns, in order. Statistics that are not published are omitted."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def begun(self) -> layout.Window | None:
        return None if self.append_to is None else layout.window(self.append_to)


class Csv(Sink):
    """The sink `csv`, which writes the records of one rank, and call stacks of new modules, to files in one folder."""

    name = "csv"
    options_class = CsvOptions

    def __init__(self, options: CsvOptions, identity: Identity) -> None:
        self._options = options
        self._identity = identity
        self._began = dt.datetime.now(dt.UTC)
        self._output = files.output_folder(options.folder)
        self._numbering = output.Numbering()
        self._naming = output.naming(squash=options.squash_name)
        self._chosen: Path | None = None
        self._files = _Files(options.steps_per_file)
        self.tensor_rows = PlannedRows(_TensorLines, self._naming, options.ops)
        self._stacks: dict[str, str] = {}

    def put(self, record: StepRecord) -> None:
        first = self._numbering.first(record)
        self._write_stacks(record.modules)
        if record.step is None:
            return
        for family, step, header, lines in self._families(record, record.step, first):
            if lines and step >= 0:
                self._files.add(self._folder(), family, step, header, lines)

    def _families(self, record: StepRecord, ours: int, first: int) -> Iterator[tuple[str, int, str, str]]:
        """Yield name, step, CSV header and CSV lines of each family in a record.

        A family is a group of tensor statistics or features that msprobe writes to the same files, or the scalars.
        """
        ops, digits = self._options.ops, self._options.digits
        if record.statistics is not None:
            columns, families = columns_of(record.statistics), self.tensor_rows.of(record.statistics)
            printed = {op: _texts(columns[op], digits) for op in self.tensor_rows.ops}
            for lines in families:
                step = layout.their_step(lines.rows.kind, ours, first)
                yield lines.rows.family, step, lines.header, lines.at(step, columns["numel"], printed)
        step = layout.their_step(None, ours, first)
        scalars, micro_step = record.scalars if self._options.scalars else (), record.micro_step
        header = _header(layout.SCALAR_COLUMNS, micro_steps=micro_step is not None)
        yield layout.SCALARS, step, header, _scalar_lines(scalars, step, micro_step, digits) if scalars else ""
        for family, rows in feature_rows(record.features, self._naming).items():
            yield family, step, _feature_header(family, ops), _feature_lines(family, rows, step, ops, digits)

    def _write_stacks(self, modules: Iterable[Mapping[str, Any]]) -> None:
        """Write the call stacks of all modules if `modules` contains a new one."""
        new = {row["module"]: row["stack"] for row in modules if row.get("stack")}
        if not new.keys() <= self._stacks.keys():
            known = {**new, **self._stacks}
            rows = []
            for name, stack in known.items():
                lines = "\n".join(map(layout.neutral, stack.split("\n")))
                rows.append(f"{_quoted(layout.neutral(name))},{_quoted(lines)}")
            files.create(
                self._folder() / layout.STACKS_FILE, _octets("\n".join((",".join(layout.STACKS_COLUMNS), *rows)) + "\n")
            )
            self._stacks = known

    def _folder(self) -> Path:
        """Return the output folder of this rank. The folder is selected and created at the first write."""
        if self._chosen is None:
            begun, name = self._options.begun, None
            if begun is not None and self._output.is_dir():
                folders = [path.name for path in self._output.iterdir() if path.is_dir()]
                name = layout.continued(folders, self._identity.rank, begun)
            tail = self._identity.incarnation[:8].rjust(8, "0")
            self._chosen = self._output / (
                name or layout.folder_name(self._began, self._identity.rank, tail, self._options.time_zone)
            )
        self._chosen.mkdir(parents=True, exist_ok=True)
        return self._chosen


class _Files:
    """The CSV files of one folder. msprobe divides statistics and features into families, such as activations.

    Each file has the lines of one family for a number of steps. If the columns of a family change, its lines are
    written to a new file.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._current: dict[str, tuple[int, str, Path]] = {}  # by family: block, header, file

    def add(self, folder: Path, family: str, step: int, header: str, lines: str) -> None:
        """Append the lines of `step` to the file of this step, or create the file with `header`."""
        path = self._path(folder, family, step // self._steps, header)
        try:
            files.append(path, _octets(lines), lines=True)
        except FileNotFoundError:
            files.create(path, _octets(header + lines))

    def _path(self, folder: Path, family: str, block: int, header: str) -> Path:
        known = self._current.get(family)
        if known is not None and known[:2] == (block, header):
            return known[2]
        part = 0
        while True:
            path = folder / layout.file_name(family, block, self._steps, part)
            if files.first_line(path) in (None, _octets(header)):
                self._current[family] = block, header, path
                return path
            part += 1


def _header(columns: Sequence[str], *, micro_steps: bool) -> str:
    return ",".join((*layout.CSV_KEYS, *((layout.MICRO_STEP,) if micro_steps else ()), *columns)) + "\n"


class _TensorLines:
    """Formats the CSV lines of one msprobe family (a group of tensors with common files) of a plan.

    The parts of a line that are equal at every step are computed once.
    """

    def __init__(self, rows: FamilyRows, ops: Sequence[str]) -> None:
        self.rows = rows
        micro_steps = rows.family in layout.MICRO_STEP_FAMILIES or rows.has_micro_steps
        self.header = _header((*ops, *layout.TENSOR_COLUMNS[len(layout.OPS) :]), micro_steps=micro_steps)
        self._ops = ops
        self._positions = pa.array(rows.positions, pa.int64())
        self._first = pa.array([f"{vpp},{_quoted(name)}" for vpp, name, _ in rows.keys], pa.string())
        self._micro = pa.array([str(micro) for _, _, micro in rows.keys], pa.string()) if micro_steps else None
        self._numel = pa.array([elements for elements, _, _ in rows.described], pa.int64())
        self._shape = pa.array([_quoted(shape) for _, shape, _ in rows.described], pa.string())
        self._dtype = pa.array([_quoted(dtype) for _, _, dtype in rows.described], pa.string())

    def at(self, step: int, numel: pa.Int64Array, printed: Mapping[str, pa.StringArray]) -> str:
        """Return the CSV lines of a step; empty if no tensor exists. `step` is the number of the step in msprobe.

        `numel` and the columns in `printed` have one element per entry of the plan.
        """
        places = self.rows.there(numel)
        if not len(places):
            return ""
        whole = len(places) == len(self._first)
        first, micro, dtype = (
            part if whole or part is None else part.take(places) for part in (self._first, self._micro, self._dtype)
        )
        positions = self._positions if whole else self._positions.take(places)
        parts = [first, pa.scalar(str(step), pa.string()), *(() if micro is None else (micro,))]
        parts += [printed[op].take(positions) for op in self._ops]
        return _joined([*parts, self._shapes(places, numel.take(positions)), dtype])

    def _shapes(self, places: pa.Int64Array, numel: pa.Int64Array) -> pa.StringArray:
        """Return the shapes of tensors as text, for example "[2, 3]".

        If a tensor has another number of elements than its shape in the plan, for example in the last batch, the text
        contains only this number.
        """
        shape, fits = self._shape.take(places), pc.equal(self._numel.take(places), numel)
        if pc.all(fits).as_py():
            return shape
        opened, closed = _BRACKETS
        flat = pc.binary_join_element_wise(opened, numel.cast(pa.string()), closed, _EMPTY)
        return pc.if_else(fits, shape, flat)


def _scalar_lines(scalars: Sequence[Scalar], step: int, micro_step: int | None, digits: int | None) -> str:
    """Return the CSV lines of the scalars of a step. `step` is the number of the step in msprobe."""
    names = [layout.neutral(scalar_tag(scalar.name, scalar.labels)) for scalar in scalars]
    texts = (
        names,
        [layout.neutral(scalar.unit or "") for scalar in scalars],
        [scalar.labels_text or "" for scalar in scalars],
    )
    name, unit, labels = (pa.array(map(_quoted, column), pa.string()) for column in texts)
    micro = () if micro_step is None else (pa.scalar(str(micro_step), pa.string()),)
    value = _texts(pa.array([scalar.value for scalar in scalars], pa.float64()), digits)
    return _joined([pa.scalar("0", pa.string()), name, pa.scalar(str(step), pa.string()), *micro, value, unit, labels])


def _feature_header(family: str, ops: Sequence[str]) -> str:
    """Return the header line of the CSV files of `family`: features, which are not tensor statistics."""
    columns = (
        (*ops, *layout.TENSOR_COLUMNS[len(layout.OPS) :]) if family == layout.OTHER else tuple(FEATURE_COLUMNS[family])
    )
    return _header(columns, micro_steps=family in layout.MICRO_STEP_FAMILIES)


def _feature_lines(family: str, rows: Sequence[FeatureRow], step: int, ops: Sequence[str], digits: int | None) -> str:
    """Return the CSV lines of `family`, a group of features in msprobe's layout, for one step.

    `step` is the number of this step in msprobe. A feature is a number that is not a tensor statistic, such as the
    entropy of attention.
    """
    parts = [
        pa.array([str(row.vpp_stage) for row in rows], pa.string()),
        pa.array([_quoted(row.name) for row in rows], pa.string()),
        pa.scalar(str(step), pa.string()),
    ]
    if family in layout.MICRO_STEP_FAMILIES:
        parts.append(pa.array([str(row.micro_step) for row in rows], pa.string()))
    numbers = {
        column: pa.array([row.numbers.get(column, float("nan")) for row in rows], pa.float32())
        for column in FEATURE_COLUMNS[family]
    }
    if family == layout.OTHER:
        return _joined([*parts, *_as_statistics(numbers["norm"], ops, digits)])
    return _joined([*parts, *(_texts(column, digits) for column in numbers.values())])


def _as_statistics(value: pa.FloatArray, ops: Sequence[str], digits: int | None) -> list[pa.Array]:
    """Return the columns that msprobe writes for a feature that is a single number.

    msprobe treats the number as a tensor and computes every statistic of it.
    """
    text = _texts(value, digits)
    none, all_, zero = (pa.scalar(text, pa.string()) for text in ("0.0", "1.0", "0"))
    constant = {"nans": zero, "zeros": pc.if_else(pc.equal(value, pa.scalar(0.0, pa.float32())), all_, none)}
    described = (pa.scalar(text, pa.string()) for text in ("[]", "torch.float32"))
    return [*(constant.get(op, text) for op in ops), *described]


def _texts(numbers: pa.Array, digits: int | None) -> pa.StringArray:
    """Return numbers as text with at most `digits` decimals.

    With None, the text has as many digits as the exact value needs.
    """
    if pa.types.is_integer(numbers.type):
        return pc.fill_null(numbers.cast(pa.string()), _NAN)
    if digits is not None:
        numbers = pc.round(numbers.cast(pa.float64()), digits)
    return pc.replace_substring_regex(numbers.cast(pa.string()), r"^(-?\d+)$", r"\1.0")


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(sign in cell for sign in ',"\n') else cell


def _joined(parts: Sequence[pa.Array | pa.Scalar]) -> str:
    lines = pc.binary_join_element_wise(*parts, _COMMA)
    return "\n".join(lines.to_pylist()) + "\n"


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "replace")
