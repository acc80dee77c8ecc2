"""Interface of an export format, which writes one run of a store in the format of another tool, and the rows of a run.

A format is a module of `formats` that defines `EXPORT_FORMAT`; `rankscope export --format` offers it by name. A format
reads from one version of the store in batches, because a run may be larger than memory. A format never leaves a partly
written file under the requested name. Options accept times in ISO 8601 and the times in msprobe's folder names, such as
`Dec03_21-34-40`, which have no year. A `Selection` has the SQL predicates of the exported rows, and divides them into
ranges that limit the memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import operator
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from rankscope_msprobe.files.csv_layout import (
    DEFAULT_TIME_ZONE,
    FAMILIES,
    FAMILY_OF,
    FEATURE_FAMILIES,
    check_time_zone,
)
from rankscope_storage.base.datasets import DATASETS, DIMENSIONS
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.log.snapshot import divided

_FOLDER_TIME: Final = re.compile(r"([A-Z][a-z]{2})(\d{2})_(\d{2})-(\d{2})-(\d{2})")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def family_names() -> frozenset[str]:
    """Return every value that the option `data_type_list` may contain: msprobe families and kinds of Rankscope."""
    features = {kind for kinds in FEATURE_FAMILIES.values() for kind in kinds}
    return frozenset(FAMILIES) | frozenset(FEATURE_FAMILIES) | frozenset(map(str, FAMILY_OF)) | features


def parse_time(text: str, near: dt.datetime) -> dt.datetime:
    """Return the time in `text`. A time without a zone is in UTC.

    Without a year, the result is the matching time closest to `near`.
    """
    if match := _FOLDER_TIME.fullmatch(text):
        return _closest(text, match, near)
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ExportError(f"{text!r} is not a time: write 2026-03-01T12:00:00+00:00 or Mar01_12-00-00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _closest(text: str, match: re.Match[str], near: dt.datetime) -> dt.datetime:
    moments = []
    for year in range(near.year - 4, near.year + 5):  # the 29th of February needs a leap year
        try:
            day = dt.date(year, _MONTHS.index(match[1]) + 1, int(match[2]))
            clock = dt.time(int(match[3]), int(match[4]), int(match[5]), tzinfo=dt.UTC)
        except ValueError:
            continue
        moments.append(dt.datetime.combine(day, clock))
    if not moments:
        raise ExportError(f"{text!r} is not a time: this date exists in no year")
    return min(moments, key=lambda moment: abs(moment - near))


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder; at the end, move its files below `target` and replace files with the same names.

    Raises ExportError for any error of the file system, even of the code inside the context. After an error, the
    temporary folder is removed.
    """
    with _explained(target):
        staged = _temporary_path(target)
        try:
            staged.mkdir(parents=True)
            yield staged
            for file in files_below(staged):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                (staged / file).replace(target / file)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield the name of a temporary file for the caller to write; at the end, rename this file to `target`.

    Raises ExportError for any error of the file system, even of the code inside the context. After an error, the
    temporary file is removed.
    """
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name a file")
    with _explained(target):
        staged = _temporary_path(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield staged
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)


def files_below(folder: Path) -> list[Path]:
    """Return the paths of all files below `folder`, sorted and relative to `folder`."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _temporary_path(target: Path) -> Path:
    return target.absolute().parent / f".{target.name}.{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write to {target}: {error.strerror or error}") from error


MAX_STEPS_PER_RECORD: Final = 1_000_000

Progress = Callable[[int, int], None]
"""Function that receives the number of written rows and the total number of rows; called several times per export."""


def no_progress(_done: int, _total: int) -> None:
    """Do nothing: a progress function for callers that show no progress."""


def count_progress(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that receives a number of new rows and calls `progress` with the sum so far and `total`."""
    done = 0

    def written(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export, with the names that msprobe uses. A format may ignore some of them."""

    time_start: dt.datetime | None = None  # closed interval over `ts`; it includes rows without a time
    time_end: dt.datetime | None = None
    data_type_list: tuple[str, ...] = ()  # msprobe's families (actv, grad_reduced, …) or kinds of Rankscope; empty: all
    ranks: tuple[int, ...] = ()  # empty: all
    steps: tuple[int, int] | None = None  # closed interval of Rankscope's steps
    attempt: int | None = None  # None: all if the format can distinguish them, otherwise the latest of each step
    process_num: int = 1
    step_count_per_record: int = 1  # steps in one CSV file, aligned to 0
    seed_rounding: int | None = None  # decimals, as in msprobe; None: every digit of the value
    append_output: tuple[str, str] | None = None  # folders of this window (Dec03_21-34-40, …) are continued
    step_partition: int = 500  # steps in one SQLite table
    all_points: bool = False  # every point of event files, whose size is otherwise limited
    time_zone: str = DEFAULT_TIME_ZONE  # of the times in the names of CSV folders

    def __post_init__(self) -> None:
        """Raise ExportError if an option is invalid; the message names the option to change."""
        for name in ("time_start", "time_end"):
            moment: dt.datetime | None = getattr(self, name)
            if moment is not None and moment.tzinfo is None:
                raise ExportError(f"{name} {moment} has no time zone: add one, such as +00:00")
        if self.time_start and self.time_end and self.time_start > self.time_end:
            raise ExportError(f"time_start {self.time_start} is after time_end {self.time_end}: exchange them")
        if self.steps and self.steps[0] > self.steps[1]:
            raise ExportError(f"steps {self.steps[0]}:{self.steps[1]} end before they begin: exchange them")
        if not 1 <= self.step_count_per_record <= MAX_STEPS_PER_RECORD:
            raise ExportError(f"step_count_per_record must be 1 to {MAX_STEPS_PER_RECORD:,}")
        for name in ("process_num", "step_partition"):
            if getattr(self, name) < 1:
                raise ExportError(f"{name} must be 1 or more")
        if self.seed_rounding is not None and not 0 <= self.seed_rounding <= 17:
            raise ExportError("seed_rounding must be a number of decimals from 0 to 17")
        try:
            check_time_zone(self.time_zone)
        except ValueError as error:
            raise ExportError(str(error)) from None
        if unknown := [name for name in self.data_type_list if name not in family_names()]:
            raise ExportError(
                f"there is no data type {unknown[0]!r}; data types are {', '.join(sorted(family_names()))}"
            )

    def kinds(self) -> frozenset[str] | None:
        """Return the kinds that the option `data_type_list` selects, or None if it selects all kinds."""
        if not self.data_type_list:
            return None
        kinds: set[str] = set()
        for name in self.data_type_list:
            kinds.update((*FAMILIES.get(name, ()), *FEATURE_FAMILIES.get(name, ())) or (name,))
        return frozenset(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of an export. `omitted` has the numbers of rows that the format cannot contain, by reason."""

    files: tuple[Path, ...]
    rows: Mapping[str, int] = field(default_factory=dict)  # by dataset
    omitted: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Leave out the reasons for which no row was omitted."""
        object.__setattr__(self, "omitted", {reason: count for reason, count in self.omitted.items() if count > 0})


class ExportFormat(Protocol):
    """Interface of an export format: its description, and the method that writes a run."""

    name: str
    """Name of the format in `rankscope export --format`."""

    help: str
    """One line of help that describes the written files and the programs that read them."""

    folder: bool
    """True if the export target is a folder, false if it is one file."""

    suffix: str
    """End of the default file name of the target, such as `.db`."""

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write `run` to `target` and return the report. Any failure raises ExportError, never OSError."""


WINDOW_ROWS: Final = 50_000


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a run that are exported. The SQL predicates refer to named values, which the queries get."""

    connection: Connection
    run: str
    options: ExportOptions

    def where(self, dataset: str) -> str:
        """Return the SQL predicate for the exported rows of `dataset`.

        The option `data_type_list` restricts only datasets with a column `kind`. Dimension tables (versions of the run,
        attempts, tensors) are exported completely, for any steps and ranks.
        """
        if dataset in DIMENSIONS:
            return "run = $run"
        parts = ["run = $run"]
        options = self.options
        if options.time_start is not None:
            parts.append("(ts IS NULL OR ts >= $time_start)")
        if options.time_end is not None:
            parts.append("(ts IS NULL OR ts <= $time_end)")
        if options.steps is not None:
            parts.append("step BETWEEN $first_step AND $last_step")
        if options.attempt is not None:
            parts.append("attempt = $attempt")
        if options.ranks:
            parts.append(f"rank IN ({', '.join(str(int(rank)) for rank in options.ranks)})")
        kinds = options.kinds()
        if kinds is not None and any(column.name == "kind" for column in DATASETS[dataset]):
            parts.append(f"kind IN ({', '.join(map(sql_string, sorted(kinds)))})")
        return " AND ".join(parts)

    def source(self, dataset: str) -> str:
        """Return the FROM and WHERE clauses for the exported rows of `dataset`.

        Files without such rows are not read.
        """
        steps = None if dataset in DIMENSIONS else self.options.steps
        relation = self.connection.relation(dataset, run=self.run, steps=steps)
        return f"{relation} WHERE {self.where(dataset)}"

    def query(self, query: str) -> pa.Table:
        """Return the rows of `query`, which may use the parameters of this selection.

        The query itself must restrict its rows to the run, for example by the predicate that `where` returns.
        """
        return self.connection.query(query, self._named_in(query))

    def stream(self, query: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `query` in batches. The connection must not run another query meanwhile."""
        return self.connection.stream(query, self._named_in(query), batch_rows=batch_rows)

    def count(self, dataset: str, extra: str = "true") -> int:
        """Return the number of exported rows of `dataset` that satisfy the predicate `extra`."""
        rows: int = self.query(f"SELECT count(*) AS rows FROM {self.source(dataset)} AND {extra}")["rows"][0].as_py()
        return rows

    def only(self, *, attempt: int | None, rank: int | None) -> str:
        """Return the SQL predicate for the rows of one rank of one attempt.

        If `attempt` or `rank` is None, the rows in which this column is null are selected.
        """
        return " AND ".join(
            f"{name} IS NULL" if value is None else f"{name} = {int(value)}"
            for name, value in (("attempt", attempt), ("rank", rank))
        )

    def _named_in(self, query: str) -> dict[str, Any]:
        options = self.options
        first_step, last_step = options.steps or (None, None)
        values = {
            "run": self.run,
            "time_start": options.time_start,
            "time_end": options.time_end,
            "first_step": first_step,
            "last_step": last_step,
            "attempt": options.attempt,
        }
        # DuckDB rejects parameters that the statement does not use.
        return {name: value for name, value in values.items() if f"${name}" in query}

    def windows(self, dataset: str, extra: str = "true", *, column: str = "step") -> Iterator[tuple[Any, Any]]:
        """Yield closed ranges of `column` with about WINDOW_ROWS rows each, in ascending order.

        The exported rows of `dataset` that satisfy the SQL predicate `extra` are counted.
        """
        counted = self.query(
            f"SELECT {column}, count(*) AS rows FROM {self.source(dataset)} AND {extra} AND {column} IS NOT NULL "
            f"GROUP BY {column} ORDER BY {column}"
        )
        pairs = zip(counted[column].to_pylist(), counted["rows"].to_pylist(), strict=True)
        for group in divided(pairs, operator.itemgetter(1), WINDOW_ROWS):
            yield group[0][0], group[-1][0]

    def within(self, first: int, last: int) -> Selection:
        """Return a selection of those rows of this selection that are in a closed range of steps.

        Files without these steps are not read.
        """
        lowest, highest = self.options.steps or (first, last)
        steps = (max(first, lowest), min(last, highest))
        return dataclasses.replace(self, options=dataclasses.replace(self.options, steps=steps))


def columns(dataset: str, *names: str) -> str:
    """Return a SELECT list of `names`, or of all columns of `dataset`."""
    return ", ".join(map(sql_identifier, names or [column.name for column in DATASETS[dataset]]))


def require_rows(selection: Selection, counts: Mapping[str, int]) -> None:
    """Raise ExportError if no row is selected, because an empty file looks like a run without problems."""
    if not any(counts.values()):
        raise ExportError(
            f"the options select no rows of {', '.join(counts)} of run {selection.run}: nothing was written"
        )
