"""Export as CSV files in msprobe's layout, for msprobe's scripts and for scripts that read msprobe's files.

There is one folder for each rank of each attempt. Its name consists of the start time of the attempt, the rank, the
number of the attempt, and a hash of the run's name. The name is the same in every export, so that a second export of a
run adds rows to the folders of the first. The option `append_output` has two times. With it, the rows of a rank are
instead added to its latest folder with a time between these two in the folder name. The rows of a step then come from
the latest attempt of this step. In the files, a name that a spreadsheet would read as a formula starts with an
apostrophe.

A file covers a range of steps. Rows are added to an existing file, and no row is written twice. A file is written under
a temporary name in the same folder and then renamed, so that a reader never sees a partly written file.
"""

from __future__ import annotations

import csv
import datetime as dt
import functools
import hashlib
import itertools
import operator
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_msprobe.files.csv_layout import (
    CSV_KEYS,
    FEATURES,
    MICRO_STEP,
    MICRO_STEP_FAMILIES,
    SCALAR_COLUMNS,
    SCALARS,
    TENSOR_COLUMNS,
    TENSOR_FAMILIES,
    Window,
    continued,
    file_name,
    folder_name,
    window,
)
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.formats.export import ExportOptions, ExportReport, Progress, Selection, no_progress, require_rows
from rankscope_storage.formats.msprobe_rows import (
    FEATURE_COLUMNS,
    MsprobeCells,
    MsprobeSteps,
    Stream,
    descriptions,
    feature_cells,
    scalar_cells,
    tensor_cells,
)

HELD: Final = ("tensor_stats", "features", "scalars")
"""Datasets whose rows msprobe's layout can contain."""

ALREADY_THERE: Final = "rows that the files already contain"
HIDDEN: Final = "rows replaced by another row of the same step and name (an earlier attempt or call)"

_COUNTED: Final = ("events", "histograms", "hashes", "collectives")


class CsvMsprobe:
    """Export format `csv`: CSV files in the folder layout of msprobe."""

    name = "csv"
    help = "a folder per rank with CSV files per family and step, as the msprobe monitor writes them"
    folder = True
    suffix = ""

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write the rows of `run` below `target`. See `ExportFormat.export`.

        Rows that an earlier export wrote to the same folders are not written again.
        """
        with connection.pinned():
            selection = Selection(connection, run, options)
            require_rows(selection, {name: selection.count(name) for name in HELD})
            files: list[Path] = []
            rows: Counter[str] = Counter()
            repeated: Counter[str] = Counter()
            try:
                listed = streams(selection, target)
                for done, stream in enumerate(listed, 1):
                    for dataset, path, new, old in _write_folder(selection, stream):
                        files += [path] if new else []
                        rows[dataset] += new
                        repeated[dataset] += old
                    progress(done, len(listed))  # streams instead of rows: they have about equally many
            except OSError as error:
                raise ExportError(f"cannot write to {target}: {error.strerror or error}") from error
            omitted = _omitted(selection, rows + repeated)
        omitted[ALREADY_THERE] = repeated.total()
        return ExportReport(files=tuple(files), rows=rows, omitted=omitted)


def _write_folder(selection: Selection, stream: Stream) -> Iterator[tuple[str, Path, int, int]]:
    """Write the folder of one rank; yield for each file its dataset, path and numbers of new and of repeated rows."""
    numbering = MsprobeSteps.of(selection.connection, selection.run)
    described = descriptions(selection.connection, selection.run)
    stream.folder.mkdir(parents=True, exist_ok=True)
    for dataset in HELD:
        only = stream.only(selection, dataset)
        present = _kinds(selection, dataset, only)
        for family, kinds in _families(dataset).items():
            if not present.keys() & kinds:
                continue
            columns: Sequence[str]
            if dataset == SCALARS:
                columns, cells = SCALAR_COLUMNS, scalar_cells(selection, only, numbering)
            elif dataset == "features":
                columns = tuple(FEATURES[family].columns) if family in FEATURES else TENSOR_COLUMNS
                cells = feature_cells(selection, family, only, numbering)
            else:
                columns, cells = TENSOR_COLUMNS, tensor_cells(selection, family, only, numbering, described)
            steps = selection.options.step_count_per_record
            micro_steps = family in MICRO_STEP_FAMILIES or any(present.get(kind) for kind in kinds)
            for file in write_family(stream.folder, family, columns, cells, steps=steps, micro_steps=micro_steps):
                yield dataset, *file


def _kinds(selection: Selection, dataset: str, only: str) -> dict[str, bool]:
    """Return a mapping with each kind that has rows; its value is true if the kind has rows of micro-batches.

    Scalars have no kind and are under the key `scalars`.
    """
    kind = sql_string(SCALARS) if dataset == SCALARS else "kind"
    rows = selection.query(
        f"SELECT {kind} AS kind, bool_or(micro_step IS NOT NULL) AS micro FROM {selection.source(dataset)} "
        f"AND {only} GROUP BY ALL"
    )
    return dict(zip(rows["kind"].to_pylist(), rows["micro"].to_pylist(), strict=True))


def _families(dataset: str) -> dict[str, frozenset[str]]:
    if dataset == SCALARS:
        return {SCALARS: frozenset([SCALARS])}
    if dataset == "tensor_stats":
        return {family: frozenset(map(str, kinds)) for family, kinds in TENSOR_FAMILIES.items()}
    return {family: frozenset(columns.values()) for family, columns in FEATURE_COLUMNS.items()}


def _omitted(selection: Selection, placed: Counter[str]) -> Counter[str]:
    """Return the numbers of rows that msprobe's layout cannot contain, by reason."""
    omitted: Counter[str] = Counter()
    for dataset in _COUNTED:
        omitted[f"{dataset}: not in msprobe's layout"] = selection.count(dataset)
    omitted["rows without a step"] = sum(selection.count(name, "step IS NULL") for name in HELD)
    known = ", ".join(sql_string(kind) for kinds in _families("features").values() for kind in sorted(kinds))
    omitted["features that msprobe does not have"] = selection.count("features", f"kind NOT IN ({known})")
    tensors = ", ".join(sql_string(kind) for kinds in _families("tensor_stats").values() for kind in sorted(kinds))
    unknown = selection.count("tensor_stats", f"step >= 0 AND kind NOT IN ({tensors})")
    omitted["tensors of kinds that msprobe does not have"] = unknown
    omitted["rows before the first step"] = sum(selection.count(name, "step < 0") for name in HELD)
    omitted[HIDDEN] = selection.count("tensor_stats", "step >= 0") - unknown - placed["tensor_stats"]
    return omitted


_NO_TIME: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


def streams(selection: Selection, target: Path) -> list[Stream]:
    """Return the streams of an export: the rows of each rank and attempt, and their folder below `target`.

    With the option `append_output`, there is one stream per rank.
    """
    found = selection.query(
        f"SELECT DISTINCT coalesce(attempt, 0) AS attempt, coalesce(rank, 0) AS rank FROM "
        f"(SELECT attempt, rank FROM {selection.source('tensor_stats')} "
        f"UNION SELECT attempt, rank FROM {selection.source('features')} "
        f"UNION SELECT attempt, rank FROM {selection.source('scalars')}) ORDER BY ALL"
    ).to_pylist()
    began = _beginnings(selection, {row["attempt"] for row in found})
    own = functools.partial(_own_folder, selection, began)
    if selection.options.append_output is None:
        return [Stream(target / own(**row), **row) for row in found]
    begun = _window(selection.options.append_output)
    latest = {row["rank"]: row["attempt"] for row in found}
    return [
        Stream(
            _continued(target, rank, begun) or target / own(attempt=attempt, rank=rank),
            rank,
            selection.options.attempt,
        )
        for rank, attempt in sorted(latest.items())
    ]


def _own_folder(selection: Selection, began: Mapping[int, dt.datetime], *, attempt: int, rank: int) -> str:
    """Return the folder name of a rank and attempt, which is the same for each export of the run.

    Folder names of one rank sort in the order of its attempts, even if attempts have equal start times.
    """
    digest = hashlib.sha256(selection.run.encode("utf-8", "surrogatepass")).hexdigest()
    return folder_name(began[attempt], rank, f"{attempt & 0xFFFF:04x}{digest[:4]}", selection.options.time_zone)


def _beginnings(selection: Selection, attempts: set[int]) -> dict[int, dt.datetime]:
    """Return the start time of each attempt. A time is never earlier than that of the previous attempt."""
    rows = selection.query(
        "SELECT coalesce(attempt, 0) AS attempt, min(began) AS began FROM ("
        "SELECT attempt, started_at AS began FROM attempts WHERE run = $run UNION ALL "
        f"SELECT attempt, min(ts) FROM {selection.connection.relation('tensor_stats', run=selection.run)} "
        "WHERE run = $run GROUP BY attempt) WHERE began IS NOT NULL GROUP BY ALL"
    ).to_pylist()
    known = {row["attempt"]: row["began"] for row in rows}
    first = min(known.values(), default=_NO_TIME)
    ordered = sorted(attempts)
    moments = itertools.accumulate((known.get(attempt, first) for attempt in ordered), max)
    return dict(zip(ordered, moments, strict=True))


def _window(given: tuple[str, str]) -> Window:
    try:
        return window(given)
    except ValueError as error:
        raise ExportError(str(error)) from error


def _continued(target: Path, rank: int, begun: Window) -> Path | None:
    """Return the latest existing folder of `rank` with a time from the closed range `begun` in its name, or None.

    The export adds rows to this folder.
    """
    names = [path.name for path in target.iterdir() if path.is_dir()] if target.is_dir() else []
    name = continued(names, rank, begun)
    return None if name is None else target / name


_SEPARATOR: Final = "\x1f"  # cells contain no control characters
_MAX_CELL: Final = 1 << 20


def write_family(
    folder: Path,
    family: str,
    columns: Sequence[str],
    batches: Iterable[MsprobeCells],
    *,
    steps: int,
    micro_steps: bool,
) -> Iterator[tuple[Path, int, int]]:
    """Write the files of one family of statistics, and yield for each its path and numbers of new and of repeated rows.

    The rows must be in the order of their steps. A row that the file in the folder contains already is not written, and
    a file without new rows is not changed.
    """
    keys = (*CSV_KEYS, MICRO_STEP) if micro_steps else CSV_KEYS
    for block, pieces in itertools.groupby(_pieces(batches, steps), key=operator.itemgetter(0)):
        path = folder / file_name(family, block, steps)
        yield path, *_write_file(path, [*keys, *columns], keys, (cells for _, cells in pieces))


def _pieces(batches: Iterable[MsprobeCells], steps: int) -> Iterator[tuple[int, MsprobeCells]]:
    """Yield the rows of each file, which covers `steps` steps, with the number of the file."""
    for cells in batches:
        blocks = np.asarray(cells.step) // steps
        starts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
        for start, end in itertools.pairwise(starts):
            if end > start:
                yield int(blocks[start]), cells.slice(start, end - start)


def _write_file(path: Path, header: list[str], keys: Sequence[str], pieces: Iterable[MsprobeCells]) -> tuple[int, int]:
    """Write a file, or continue an existing one; return the numbers of new and of repeated rows."""
    present: set[int] = set()
    if path.exists():
        header, present = _read(path)
        _check_header(path, header, keys)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    new = repeated = 0
    try:
        with _opened(path, partial, header) as file:
            for cells in pieces:
                lines = _lines(cells, header, present)
                file.write("".join([f"{line}\n" for line in lines.to_pylist()]).encode())
                new += len(lines)
                repeated += len(cells) - len(lines)
        if new:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return new, repeated


def _opened(path: Path, partial: Path, header: Sequence[str]) -> BinaryIO:
    """Return the file `partial`, opened at its end: with the header, or with the content of the file at `path`."""
    if not path.exists():
        new = partial.open("wb")
        new.write((",".join(header) + "\n").encode())
        return new
    shutil.copyfile(path, partial)
    file = partial.open("r+b")
    file.seek(-1, os.SEEK_END)
    # An incomplete last line of a killed writer remains as a separate line.
    if file.read() != b"\n":
        file.write(b"\n")
    return file


def _lines(cells: MsprobeCells, header: Sequence[str], present: set[int]) -> pa.StringArray:
    """Return the lines of those rows of `cells` whose keys are not in `present`."""
    texts = {
        **cells.columns,
        "vpp_stage": cells.vpp_stage,
        "name": cells.name,
        "step": pc.cast(cells.step, pa.string()),
        MICRO_STEP: cells.micro_step,
    }
    missing = pa.array(["nan"] * len(cells), pa.string())
    lines = pc.binary_join_element_wise(*(_quoted(texts.get(name, missing)) for name in header), ",")
    if not present:
        return lines
    keys = [texts[name] for name in (*CSV_KEYS, MICRO_STEP) if name in header]
    joined = pc.binary_join_element_wise(*keys, _SEPARATOR).to_pylist()
    return lines.filter(pa.array([hash(key) not in present for key in joined], pa.bool_()))


def _read(path: Path) -> tuple[list[str], set[int]]:
    """Return the column names of an existing CSV file, and a hash of the key columns of each of its rows.

    The key columns (virtual stage, name, step and, if present, micro-step) identify a row.
    """
    limit = csv.field_size_limit(_MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            places = [header.index(name) for name in (*CSV_KEYS, MICRO_STEP) if name in header]
            return header, {
                hash(_SEPARATOR.join(row[place] for place in places)) for row in reader if len(row) == len(header)
            }
    except csv.Error as error:
        raise ExportError(f"{path} cannot be continued: {error}: choose another folder") from error
    finally:
        csv.field_size_limit(limit)


def _check_header(path: Path, header: Sequence[str], keys: Sequence[str]) -> None:
    if any(name not in header for name in keys):
        raise ExportError(
            f"{path} has the columns {','.join(header)[:200]}, but {', '.join(keys)} are needed to continue it: "
            "choose another folder"
        )


def _quoted(column: pa.StringArray) -> pa.StringArray:
    """Return the texts as cells of a CSV file; texts with a comma or a quote are enclosed in quotes."""
    needs = pc.match_substring_regex(column, '[,"]')
    if not pc.any(needs).as_py():
        return column
    quoted = pc.binary_join_element_wise(pa.scalar('"'), pc.replace_substring(column, '"', '""'), pa.scalar('"'), "")
    return pc.if_else(needs, quoted, column)


EXPORT_FORMAT = CsvMsprobe()
