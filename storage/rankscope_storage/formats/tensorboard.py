"""Export as TensorBoard event files, one per rank and attempt.

Tensors have msprobe's tags, and the tags of scalars are their names. An event contains all rows of one step and time.
Columns that a tag cannot contain (unit and labels of a scalar, shard of a tensor) are written as JSON into the
description of the tag's first value. TensorBoard shows the description, and Rankscope's importer reads it.
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

if TYPE_CHECKING:
    from rankscope_storage.tensorboard.events import EventFile

DATASETS: Final = ("tensor_stats", "scalars", "features")
NO_STEP: Final = "rows without a step"


@dataclass(frozen=True, slots=True)
class Stream:
    """One rank of one attempt. Its rows are written to one folder, which TensorBoard shows as a run."""

    attempt: int | None
    rank: int | None

    @property
    def folder(self) -> str:
        """Return the name of the folder: `rank3`, `rank3-attempt1`, or `run` for rows without a rank."""
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
            streams = _streams(selection)
            with staged_folder(target) as folder:
                for done, extra in _write_all(selection, streams, folder, options.process_num):
                    omitted += Counter(extra)
                    progress(done, sum(totals.values()))
                files = tuple(target / file for file in files_below(folder))
        return ExportReport(files=files, rows=totals, omitted=dict(omitted))


def write_stream(selection: Selection, stream: Stream, folder: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Write one event file.

    After each range of steps, yield the number of its rows and an empty mapping. At the end, yield 0 and the number of
    omitted rows by reason.
    """
    from rankscope_storage.tensorboard.events import EventFile  # noqa: PLC0415 - needs the extra

    only = selection.only(attempt=stream.attempt, rank=stream.rank)
    path = folder / f"events.out.tfevents.{_first_second(selection, only):010d}.rankscope"
    folder.mkdir(parents=True, exist_ok=True)
    with EventFile(path, rank=stream.rank, attempt=stream.attempt) as file:
        for first, last, _ in _windows(selection, only):
            rows = _rows(selection.within(first, last), only)
            _write_window(file, rows)
            yield sum(map(len, rows.values())), {}
    yield 0, dict(file.omitted)


def _write_all(
    selection: Selection, streams: list[Stream], folder: Path, processes: int
) -> Iterator[tuple[int, dict[str, int]]]:
    """Write all event files. Repeatedly yield the number of rows written so far, and newly omitted rows by reason."""
    done = 0
    if processes == 1 or len(streams) == 1:
        for stream in streams:
            for rows, omitted in write_stream(selection, stream, folder / stream.folder):
                done += rows
                yield done, omitted
        return
    store = selection.connection.path, selection.connection.version
    # A forked child would lack DuckDB's threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(processes, len(streams)), mp_context=context) as pool:
        jobs = [
            pool.submit(_write_in_process, store, selection.run, selection.options, stream, folder)
            for stream in streams
        ]
        for job in concurrent.futures.as_completed(jobs):
            try:
                rows, omitted = job.result()
            except BrokenProcessPool as error:
                raise ExportError(
                    "a writer process was killed, possibly because it used too much memory: lower process_num"
                ) from error
            done += rows
            yield done, omitted


def _write_in_process(
    store: tuple[Path, int], run: str, options: ExportOptions, stream: Stream, folder: Path
) -> tuple[int, dict[str, int]]:
    omitted: Counter[str] = Counter()
    rows = 0
    path, version = store
    with connect(path, version=version) as connection:
        for portion, extra in write_stream(Selection(connection, run, options), stream, folder / stream.folder):
            rows += portion
            omitted += Counter(extra)
    return rows, dict(omitted)


def _windows(selection: Selection, only: str) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of steps that have about equal numbers of rows in the largest dataset.

    The ranges together cover the steps of all datasets.
    """
    counts = {name: selection.count(name, f"{only} AND step IS NOT NULL") for name in DATASETS}
    ranges = list(selection.windows(max(DATASETS, key=counts.__getitem__), only))
    if not ranges:
        return
    lowest, highest = -(1 << 63), (1 << 63) - 1
    starts = [lowest, *(first for first, _, _ in ranges[1:])]
    ends = [*(start - 1 for start in starts[1:]), highest]
    yield from zip(starts, ends, (rows for _, _, rows in ranges), strict=True)


def _rows(selection: Selection, only: str) -> dict[str, list[dict[str, Any]]]:
    return {
        name: selection.query(
            f"SELECT {columns(name)} FROM {selection.source(name)} AND {only} AND step IS NOT NULL "
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
    counts |= {
        f"{name}: not in event files": selection.count(name)
        for name in ("events", "histograms", "hashes", "collectives")
    }
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
