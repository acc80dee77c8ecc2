"""Export as TensorBoard event files, one per rank and attempt.

Tensors have msprobe's tags, and the tags of scalars are their names. An event contains all rows of one step and time.
Columns that a tag cannot contain (unit and labels of a scalar, shard of a tensor) are written as JSON into the
description of the tag's first value. TensorBoard shows the description, and Rankscope's importer reads it. The size of
the files is limited, unless the option `all_points` is set.

TensorBoard's event files repeat the tag of a series in every value, so that a value takes about 60 bytes, while the
store needs a few bits. The steps are divided into ranges of equal width. Of each series and range, the rows with the
lowest and the highest value are kept, or a row with a NaN or Inf instead of the highest. The first and the last step
are kept completely. If the ranges would be too wide, fewer statistics of each tensor are kept. Two points of the norm
of each tensor are always kept. Of histograms, every n-th step is kept.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS
from rankscope_msprobe.files.csv_layout import OPS as MSPROBE_OPS
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.escaping import sql_identifier
from rankscope_storage.base.location import Location
from rankscope_storage.connection import Connection, connect
from rankscope_storage.formats.export import (
    ExportOptions,
    ExportReport,
    Progress,
    Selection,
    columns,
    files_below,
    no_progress,
    require_rows,
    staged_folder,
)

if TYPE_CHECKING:
    from rankscope_storage.tensorboard.events import EventFile

SIZE_RATIO: Final = 4
"""Largest size of an export, as a multiple of the size of the exported rows in the store."""
SMALL_BYTES: Final = 1_000_000
"""Size up to which an export is complete in any case."""
MAIN_OPS: Final = ("norm", "nans")

_MARGIN: Final = 0.9  # the sizes of rows are estimated
_MIN_RANGES: Final = 10  # with fewer ranges of steps, a curve is too coarse: statistics are omitted instead
_VALUE_BYTES: Final = 30  # of one value, without the names of its tensor and kind
_SERIES_BYTES: Final = 300  # of the description of a series, in its first value
_HISTOGRAM_BYTES: Final = 700  # of a histogram of 30 bins and its tag
_SERIES: Final = {
    "tensor_stats": ("kind", "tensor", "index", "vpp_stage", "micro_step", "placement", "shard_group", "call_seq"),
    "scalars": ("name", "labels", "unit", "vpp_stage", "micro_step"),
    "features": ("kind", "module", "index", "vpp_stage", "micro_step"),
}
_NAMES: Final = {"tensor_stats": ("kind", "tensor"), "scalars": ("name", "labels"), "features": ("kind", "module")}
_SHARES: Final = {"scalars": 0.5, "features": 0.5, "tensor_stats": 1.0}  # of the bytes that remain, in this order


@dataclass(frozen=True, slots=True)
class Thinning:
    """Selection of the points to export. `widths` has the width of the ranges of steps of each dataset.

    Width 1 keeps all rows. `ops` are the exported statistics of tensors. `ends` has the first and the last step of the
    export. The first range begins at the first step.
    """

    ops: tuple[str, ...]
    widths: Mapping[str, int] = field(default_factory=dict)
    ends: tuple[int, int] = (0, 0)

    def begin(self, step: int) -> int:
        """Return the first step of the range that contains `step`, for the dataset with the widest ranges."""
        width = max(self.widths.values(), default=1)
        return self.ends[0] + (step - self.ends[0]) // width * width

    def sql(self, dataset: str) -> str:
        """Return the SQL clause that follows the predicates of a query and keeps only the selected rows."""
        width = self.widths.get(dataset, 1)
        if width == 1:
            return ""
        if dataset == "histograms":  # the parts of a histogram have no order: every step of this width
            return f" AND (step - {self.ends[0]}) % {width} = 0"
        value = "norm" if dataset == "tensor_stats" else sql_identifier("value")
        broken = "coalesce(nans, 0) + coalesce(infs, 0) > 0 DESC, " if dataset == "tensor_stats" else ""
        first, last = self.ends
        place = f"row_number() OVER (PARTITION BY {_key(dataset)}, (step - {first}) // {width} ORDER BY"
        kept = f" QUALIFY {place} {broken}{value} DESC NULLS FIRST, step) = 1 OR {place} {value} NULLS LAST, step) = 1"
        return kept if width > last - first else f"{kept} OR step IN ({first}, {last})"


def thinning(selection: Selection, counts: Mapping[str, int], ops: tuple[str, ...]) -> Thinning:
    """Return the selection with which an export of `selection` does not exceed its largest size.

    `counts` has the number of exported rows of each dataset. `ops` are all statistics that the format contains.
    """
    left = _MARGIN * max(
        SMALL_BYTES, SIZE_RATIO * _stored_bytes(selection, {name: counts.get(name, 0) for name in _SHARES})
    )
    present = [name for name in (*_SHARES, "histograms") if counts.get(name)]
    steps = " UNION ALL ".join(f"SELECT step FROM {selection.source(name)}" for name in present)
    row = selection.query(f"SELECT min(step) AS low, max(step) AS high FROM ({steps})").to_pylist()[0]
    ends = (row["low"] or 0, row["high"] or 0)
    rows = counts.get("histograms", 0)
    most = max(SMALL_BYTES, SIZE_RATIO * _stored_bytes(selection, {"histograms": rows}))
    every = math.ceil(rows * _HISTOGRAM_BYTES / most)
    kept = Thinning(ops, {"histograms": every} if every > 1 else {}, ends)
    for dataset in [name for name in present if name in _SHARES]:
        limit, span = left * _SHARES[dataset], ends[1] - ends[0] + 1
        coarse = max(1, span // _MIN_RANGES)
        tiers = ((ops, coarse), (MSPROBE_OPS, coarse), (MAIN_OPS, coarse), (("norm",), span))
        for used, widest in tiers if dataset == "tensor_stats" else ((ops, span),):
            width, size = 1, _size(selection, dataset, Thinning(used, {dataset: 1}, ends))
            while size > limit and width < widest:
                width = min(widest, width + 1 + width // 4)
                size = _size(selection, dataset, Thinning(used, {dataset: width}, ends))
            kept = Thinning(used, {**kept.widths, dataset: width}, ends)
            if size <= limit:
                break
        left = max(0.0, left - size)
    return kept


def _size(selection: Selection, dataset: str, kept: Thinning) -> float:
    """Return the estimated size in bytes of the rows of `dataset` that `kept` selects."""
    (first, last), width = kept.ends, kept.widths[dataset]
    series = f"rank, attempt, {_key(dataset)}"
    names = " + ".join(f"coalesce(octet_length(encode({name})), 0)" for name in _NAMES[dataset])
    numbers, described = "1", "1"
    if dataset == "tensor_stats":
        numbers = " + ".join(f"({sql_identifier(op)} IS NOT NULL)::INTEGER" for op in kept.ops)
        described = "(coalesce(placement, '') <> 'full' OR call_seq IS NOT NULL)::INTEGER"
    rows = f"count(*) AS rows, sum(({names} + {_VALUE_BYTES}) * ({numbers})) AS bytes"
    once = f"any_value(({numbers}) * ({_SERIES_BYTES} * {described} + 30)) AS once"
    count = "rows" if width == 1 else "least(rows, 2)"
    ends = 0 if width > last - first else 2  # rows of the first and the last step
    sizes = f"least(sum(bytes), sum(bytes * {count} / rows) + {ends} * sum(bytes) / sum(rows))"
    found = selection.query(
        f"SELECT sum(size) + sum(once) AS size FROM (SELECT {sizes} AS size, max(once) AS once FROM ("
        f"SELECT {series}, {rows}, {once} FROM {selection.source(dataset)} AND step IS NOT NULL "
        f"GROUP BY {series}, (step - {first}) // {width}) GROUP BY {series})"
    )
    return float(found["size"][0].as_py() or 0)


def _key(dataset: str) -> str:
    return ", ".join(map(sql_identifier, _SERIES[dataset]))


def _stored_bytes(selection: Selection, counts: Mapping[str, int]) -> float:
    """Return the size of the exported rows in the files of the store, which may also contain other rows."""
    total = 0.0
    for dataset, count in counts.items():
        files = selection.connection.files_table(dataset, run=selection.run, steps=selection.options.steps)
        rows = sum(files["rows"].to_pylist())
        total += sum(files["size_bytes"].to_pylist()) * min(1.0, count / rows) if rows else 0
    return total


OPS: Final = (*VALUE_OPS, *COUNT_OPS, *BASELINE_OPS)
DATASETS: Final = ("tensor_stats", "scalars", "features", "histograms")
NO_STEP: Final = "rows without a step"
THINNED: Final = "points that would make the event files larger than four times the stored rows: see --all-points"
NO_OP: Final = "tensors without some statistics, for the same reason"


@dataclass(frozen=True, slots=True)
class Stream:
    """One rank of one attempt. Its rows are written to one folder, which TensorBoard shows as a run."""

    attempt: int | None
    rank: int | None

    @property
    def folder(self) -> str:
        """Return the name of the folder of this stream: `rank3`, `rank3-attempt1`, or `run` for rows without a rank."""
        name = "run" if self.rank is None else f"rank{self.rank}"
        return f"{name}-attempt{self.attempt}" if self.attempt else name


class TensorBoard:
    """Export format `tensorboard`: a folder with event files."""

    name = "tensorboard"
    help = "event files in a folder, to be shown by `tensorboard --logdir FOLDER`"
    folder = True
    suffix = ""

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write the event files of `run` below `target`, a folder without event files. See `ExportFormat.export`."""
        _require_libraries()
        if any(target.rglob("*tfevents*")):
            raise ExportError(
                f"{target} already contains event files, and points would appear twice: choose another folder"
            )
        with connection.pinned():
            selection = Selection(connection, run, options)
            totals = {name: selection.count(name, "step IS NOT NULL") for name in DATASETS}
            require_rows(selection, totals)
            omitted = Counter(_omitted(selection))
            kept = Thinning(OPS) if options.all_points else thinning(selection, totals, OPS)
            rows: Counter[str] = Counter()
            with staged_folder(target) as folder:
                for written, extra in _write_all(selection, _streams(selection), kept, folder):
                    rows += written
                    omitted += extra
                    progress(rows.total(), sum(totals.values()))
                files = tuple(target / file for file in files_below(folder))
            omitted += Counter({THINNED: sum(totals.values()) - rows.total()})
            omitted += Counter({NO_OP: rows["tensor_stats"] if kept.ops != OPS else 0})
        return ExportReport(files=files, rows={name: rows[name] for name in totals}, omitted=omitted)


Written = tuple[Counter[str], Counter[str]]
"""Numbers of written rows by dataset, and numbers of omitted rows by reason."""


def write_stream(selection: Selection, stream: Stream, kept: Thinning, folder: Path) -> Iterator[Written]:
    """Write one event file, and yield the numbers of written rows after each range of steps.

    The numbers of omitted rows follow at the end.
    """
    from rankscope_storage.tensorboard.events import EventFile  # noqa: PLC0415 - needs the extra

    only = selection.only(attempt=stream.attempt, rank=stream.rank)
    path = folder / f"events.out.tfevents.{_first_second(selection, only):010d}.rankscope"
    folder.mkdir(parents=True, exist_ok=True)
    with EventFile(path, rank=stream.rank, attempt=stream.attempt, ops=kept.ops) as file:
        for first, last in _windows(selection, only, kept):
            rows = _rows(selection.within(first, last), only, kept)
            _write_window(file, rows)
            yield Counter({name: len(listed) for name, listed in rows.items()}), Counter()
    yield Counter(), file.omitted


def _write_all(selection: Selection, streams: list[Stream], kept: Thinning, folder: Path) -> Iterator[Written]:
    """Write all event files. Repeatedly yield the numbers of newly written and omitted rows."""
    processes = selection.options.process_num
    if processes == 1 or len(streams) == 1:
        for stream in streams:
            yield from write_stream(selection, stream, kept, folder / stream.folder)
        return
    store = selection.connection.path, selection.connection.version
    # A forked child would lack DuckDB's threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(processes, len(streams)), mp_context=context) as pool:
        jobs = [
            pool.submit(_write_in_process, store, selection.run, selection.options, stream, kept=kept, folder=folder)
            for stream in streams
        ]
        for job in concurrent.futures.as_completed(jobs):
            try:
                yield job.result()
            except BrokenProcessPool as error:
                raise ExportError(
                    "a writer process was killed, possibly because it used too much memory: lower process_num"
                ) from error


def _write_in_process(
    store: tuple[Location, int], run: str, options: ExportOptions, stream: Stream, *, kept: Thinning, folder: Path
) -> Written:
    omitted: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    path, version = store
    with connect(path, version=version) as connection:
        for portion, extra in write_stream(Selection(connection, run, options), stream, kept, folder / stream.folder):
            rows += portion
            omitted += extra
    return rows, omitted


def _windows(selection: Selection, only: str, kept: Thinning) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps that have about equal numbers of rows in the largest dataset.

    The ranges together cover the steps of all datasets, and do not divide any of the ranges from which `kept` selects
    points.
    """
    counts = {name: selection.count(name, f"{only} AND step IS NOT NULL") for name in DATASETS}
    ranges = list(selection.windows(max(DATASETS, key=counts.__getitem__), only))
    if not ranges:
        return
    lowest, highest = -(1 << 63), (1 << 63) - 1
    cuts = {kept.begin(first) for first, _ in ranges[1:]}
    starts = [lowest, *sorted(cut for cut in cuts if cut > ranges[0][0])]
    ends = [*(start - 1 for start in starts[1:]), highest]
    yield from zip(starts, ends, strict=True)


def _rows(selection: Selection, only: str, kept: Thinning) -> dict[str, list[dict[str, Any]]]:
    return {
        name: selection.query(
            f"SELECT {columns(name)} FROM {selection.source(name)} AND {only} AND step IS NOT NULL{kept.sql(name)} "
            "ORDER BY step, ts NULLS FIRST, incarnation, seq, ordinal"
        ).to_pylist()
        for name in DATASETS
    }


def _write_window(file: EventFile, rows: Mapping[str, list[dict[str, Any]]]) -> None:
    moments: dict[tuple[int, Any], dict[str, list[dict[str, Any]]]] = {}
    for dataset, listed in rows.items():
        for row in listed:
            moments.setdefault((row["step"], row["ts"]), {}).setdefault(dataset, []).append(row)
    for step, ts in sorted(moments, key=lambda moment: (moment[0], moment[1] is not None, moment[1] or 0)):
        file.write(step, ts, moments[step, ts])


def _streams(selection: Selection) -> list[Stream]:
    union = " UNION ".join(
        f"SELECT attempt, rank FROM {selection.source(name)} AND step IS NOT NULL" for name in DATASETS
    )
    rows = selection.query(f"SELECT DISTINCT attempt, rank FROM ({union}) ORDER BY ALL NULLS FIRST").to_pylist()
    return [Stream(row["attempt"], row["rank"]) for row in rows]


def _omitted(selection: Selection) -> dict[str, int]:
    counts = {NO_STEP: sum(selection.count(name, "step IS NULL") for name in DATASETS)}
    return counts | {
        f"{name}: not in event files": selection.count(name) for name in ("events", "hashes", "collectives")
    }


def _first_second(selection: Selection, only: str) -> int:
    union = " UNION ALL ".join(f"SELECT min(ts) AS ts FROM {selection.source(name)} AND {only}" for name in DATASETS)
    first: int | None = selection.query(f"SELECT epoch(min(ts))::BIGINT AS first FROM ({union})")["first"][0].as_py()
    return max(first or 0, 0)


def _require_libraries() -> None:
    try:
        import rankscope_storage.tensorboard.events  # noqa: F401, PLC0415 - tests whether the import works
    except ImportError as error:
        raise ExportError(
            f"event files need the Python module {error.name}: run `pip install protobuf google-crc32c`"
        ) from error


EXPORT_FORMAT = TensorBoard()
