"""CSV in the layout of the existing tool, written while training runs.

Every step is on disk when the record has been taken: a new file appears whole, and lines are added to one that covers
several steps. Nothing is buffered, so neither an exit nor an exception can lose a row that was published.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.identity import Identity
from rankscope_contract.msprobe.csv_layout import (
    OPS,
    Window,
    continued,
    file_name,
    folder_name,
    neutral,
    their_step,
    window,
)
from rankscope_exporter.records.step_record import Statistics, StepRecord
from rankscope_exporter.sinks import files
from rankscope_exporter.sinks.base import Sink
from rankscope_exporter.sinks.csv_lines import TensorLines, feature_header, feature_lines, quoted, texts
from rankscope_exporter.sinks.families import columns_of, family_rows, feature_rows

STACKS_FILE: Final = "stack_info.csv"
MOST_STEPS: Final = 1_000_000
MOST_DIGITS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvOptions:
    """Settings of the sink, those of the existing tool under our names."""

    folder: str | None = None
    """MONITOR_OUTPUT_DIR, or ./monitor_output, where it is not given."""
    steps_per_file: int = 1
    """Its step_count_per_record: files cover so many steps, counted from 0."""
    digits: int | None = None
    """Its ndigits: so many decimals. Without it every digit is there."""
    append_to: tuple[str, str] | None = None
    """Its append_output: continue this rank's folder that was begun within these two times."""
    squash_name: bool = False
    """Leave away what wraps the model, as its squash_name does."""
    ops: tuple[str, ...] = OPS
    """The columns of statistics, in order, as far as these are published."""

    def __post_init__(self) -> None:
        files.check_folder(self.folder)
        files.check_truth("squash_name", self.squash_name)
        _check_whole("steps_per_file", self.steps_per_file, MOST_STEPS)
        if self.digits is not None:
            _check_whole("digits", self.digits, MOST_DIGITS)
        if self.append_to is not None:
            object.__setattr__(self, "append_to", _pair(self.append_to))
        object.__setattr__(self, "ops", files.chosen_ops(self.ops))

    @property
    def begun(self) -> Window | None:
        """Return the window that `append_to` spans."""
        return None if self.append_to is None else window(self.append_to)


class Csv(Sink):
    """The sink."""

    name = "csv"
    options_class = CsvOptions

    def __init__(self, options: CsvOptions, identity: Identity) -> None:
        self._options = options
        self._identity = identity
        self._began = dt.datetime.now(dt.UTC)
        self._output = files.output_folder(options.folder)
        self._numbering = files.Numbering()
        self._shown = files.naming(squash=options.squash_name)
        self._chosen: Path | None = None
        self._files = _Files(options.steps_per_file)
        self._plan = ""
        self._published: Sequence[frozenset[str]] | None = None
        self._lines: Sequence[TensorLines] = ()
        self._stacks: dict[str, str] = {}

    def put(self, record: StepRecord) -> None:
        """Write the step."""
        first = self._numbering.first(record)
        self._note_stacks(record.modules)
        if record.step is None:
            return
        for family, step, header, lines in self._families(record, record.step, first):
            if lines and step >= 0:
                self._files.add(self._folder(), family, step, header, lines)

    def _families(self, record: StepRecord, ours: int, first: int) -> Iterator[tuple[str, int, str, str]]:
        """Yield each family's name, step, header and lines."""
        if record.statistics is not None:
            columns = columns_of(record.statistics)
            printed = {op: texts(columns[op], self._options.digits) for op in self._options.ops}
            for lines in self._lines_of(record.statistics):
                step = their_step(lines.rows.kind, ours, first)
                yield lines.rows.family, step, lines.header, lines.at(step, columns["numel"], printed)
        for family, rows in feature_rows(record.features, self._shown).items():
            step, ops = their_step(None, ours, first), self._options.ops
            yield (
                family,
                step,
                feature_header(family, ops),
                feature_lines(family, rows, step, ops, self._options.digits),
            )

    def _lines_of(self, statistics: Statistics) -> Sequence[TensorLines]:
        if statistics.plan.hash != self._plan or statistics.ops is not self._published:
            families = family_rows(statistics.plan.plan.entries, self._shown, statistics.ops)
            chosen = [(rows, [op for op in self._options.ops if op in rows.ops]) for rows in families]
            self._lines = [TensorLines(rows, ops) for rows, ops in chosen if ops]
            self._plan, self._published = statistics.plan.hash, statistics.ops
        return self._lines

    def _note_stacks(self, modules: Iterable[Mapping[str, Any]]) -> None:
        """Write where modules were called from, once it is known of more of them."""
        new = {row["module"]: row["stack"] for row in modules if row.get("stack")}
        if not new.keys() <= self._stacks.keys():
            known = {**new, **self._stacks}
            rows = [f"{quoted(neutral(name))},{quoted(_neutral_lines(stack))}" for name, stack in known.items()]
            files.create(self._folder() / STACKS_FILE, _octets("\n".join(("module_name,stack_info", *rows)) + "\n"))
            self._stacks = known

    def _folder(self) -> Path:
        """Return the folder of this rank, which is there; chosen when there is something to write."""
        if self._chosen is None:
            begun = self._options.begun
            name = None if begun is None else self._continued(begun)
            tail = self._identity.incarnation[:8].rjust(8, "0")
            self._chosen = self._output / (name or folder_name(self._began, self._identity.rank, tail))
        self._chosen.mkdir(parents=True, exist_ok=True)
        return self._chosen

    def _continued(self, begun: Window) -> str | None:
        if not self._output.is_dir():
            return None
        return continued([path.name for path in self._output.iterdir() if path.is_dir()], self._identity.rank, begun)


class _Files:
    """The files of one folder, each of a family and some steps; where another header is needed, a further part."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._current: dict[str, tuple[int, str, Path]] = {}  # by family: block, header, file

    def add(self, folder: Path, family: str, step: int, header: str, lines: str) -> None:
        """Add lines of `step` to the file that they belong to."""
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
            path = folder / file_name(family, block, self._steps, part)
            if files.first_line(path) in (None, _octets(header)):
                self._current[family] = block, header, path
                return path
            part += 1


def _neutral_lines(text: str) -> str:
    return "\n".join(map(neutral, text.split("\n")))


def _check_whole(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} is a number from 1 to {most:,}, not {value!r}")


def _pair(value: Any) -> tuple[str, str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"append_to must be two folder times, such as Dec03_21-34-40, not {value!r}")  # noqa: TRY004
    try:
        window(value)
    except ValueError as error:
        raise ValueError(str(error).replace("append_output", "append_to")) from error
    first, last = value
    return first, last


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "replace")
