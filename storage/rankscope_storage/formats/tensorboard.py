"""Export as TensorBoard event files, one per rank and attempt.

Tensors have msprobe's tags, and the tags of scalars are their names. An event contains all rows of one step and time.
Columns that a tag cannot contain (unit and labels of a scalar, shard of a tensor) are written as JSON into the
description of the tag's first value. TensorBoard shows the description, and Rankscope's importer reads it. The size of
the files is limited by `common.thinning`, unless the option `all_points` is set.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS
from rankscope_storage.base.errors import ExportError
from rankscope_storage.connection import Connection, connect
from rankscope_storage.formats.common.base import (
    ExportOptions,
    ExportReport,
    Progress,
    files_below,
    no_progress,
    staged_folder,
)
from rankscope_storage.formats.common.selection import Selection, columns, require_rows
from rankscope_storage.formats.common.thinning import Thinning, thinning

if TYPE_CHECKING:
    from rankscope_storage.tensorboard.events import EventFile

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
        return ExportReport(files=files, rows={name: rows[name] for name in totals}, omitted=dict(omitted))


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
    store: tuple[Path, int], run: str, options: ExportOptions, stream: Stream, *, kept: Thinning, folder: Path
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
    cuts = {kept.begin(first) for first, _, _ in ranges[1:]}
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
    counts |= {f"{name}: not in event files": selection.count(name) for name in ("events", "hashes", "collectives")}
    return {reason: count for reason, count in counts.items() if count}


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
