"""Folders and rows of msprobe's CSV output, in the selection that the arguments of its converters describe."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from rankscope_msprobe.files.csv_layout import (
    CSV_KEYS,
    FAMILIES,
    FEATURES,
    MICRO_STEP,
    OTHER,
    TENSOR_FAMILIES,
    FamilyFile,
    parse_time,
    time_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

STATISTICS: Final = ("norm", "min", "max", "zeros", "nans", "mean")
"""Columns of statistics in msprobe's CSV files, in the order of msprobe's converters."""

KEYS: Final = (*CSV_KEYS, MICRO_STEP)
"""Columns that identify a row of a family. `micro_step` is -1 in rows without a micro-batch."""

TENSOR_TYPES: Final = tuple(family for family in FAMILIES if family != OTHER)
"""msprobe's families of tensor statistics."""

_KNOWN_TYPES: Final = (*TENSOR_FAMILIES, *FEATURES, OTHER)
_MAX_PROCESSES: Final = 128  # msprobe's limit
_HALF_YEAR: Final = dt.timedelta(days=183)

Files = Mapping[str, Sequence[tuple[FamilyFile, Path]]]
"""CSV files by family, in the order of their steps."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def checked_types(data_type_list: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return the families to convert: `data_type_list`, or `default` if the list is None or empty.

    Raises ValueError if the list contains an unknown family or is not a list.
    """
    if not data_type_list:
        return list(default)
    if isinstance(data_type_list, str) or not all(isinstance(name, str) for name in data_type_list):
        raise ValueError(f"data_type_list must be a list such as ['actv'], not {data_type_list!r}")
    if unknown := [name for name in data_type_list if name not in _KNOWN_TYPES]:
        raise ValueError(f"data_type_list: unknown data type {unknown[0]!r}: choose from {', '.join(_KNOWN_TYPES)}")
    return list(dict.fromkeys(data_type_list))


def checked_number(name: str, number: int, lowest: int = 1, highest: int = _MAX_PROCESSES) -> int:
    """Return `number`. Raises ValueError if it is not an integer from `lowest` to `highest`."""
    if not isinstance(number, int) or isinstance(number, bool) or not lowest <= number <= highest:
        raise ValueError(f"{name} must be an integer from {lowest} to {highest:,}, not {number!r}")
    return number


def rank_files(monitor_path: str | Path, time_start: str | None, time_end: str | None) -> dict[int, list[Files]]:
    """Return the CSV files of each rank, by rank, for the folders in `monitor_path` that begin in a range of times.

    Each rank has one element per folder, in the order of their times. The range includes `time_start` and `time_end`,
    which have the form `Dec03_21-34-40`. None does not limit the range. Folder names contain no year: a range from
    December to January extends over the end of a year.

    Raises ValueError if the range or the folder is wrong, or if no folder is in the range.
    """
    from rankscope_ingest.importers.msprobe.discovery import find

    start, end = _time("time_start", time_start), _time("time_end", time_end)
    if start and end and dt.timedelta(0) < start - end < _HALF_YEAR:
        raise ValueError(f"time_start {time_start} is after time_end {time_end}")
    path = Path(monitor_path).expanduser()
    if not path.is_dir():
        raise ValueError(f"monitor_path {path} is not a folder")
    found = [folder for launch in find(path).launches for folder in launch if "/" not in folder.source]
    timed = [(folder.named, folder) for folder in found if folder.named and folder.named.time]
    ranks: dict[int, list[Files]] = {}
    for named, folder in timed:
        assert named.time is not None  # selected above
        if _is_inside(named.time, start, end):
            ranks.setdefault(named.rank, []).append(folder.families)
    if not ranks:
        times = sorted({time_text(named.time) for named, _ in timed if named.time})
        there = (
            f"its folders begin at {', '.join(times[:5])}"
            if times
            else "it has no folder such as Dec03_21-34-40-rank0-…"
        )
        raise ValueError(
            f"{path} has no CSV files of msprobe from {time_start or 'any time'} to {time_end or 'any time'}: {there}"
        )
    _report_several(ranks)
    return dict(sorted(ranks.items()))


def family_rows(folders: Sequence[Files], family: str) -> pa.Table | None:
    """Return the rows of `family` in the folders of a rank, in the order of their steps, or None without files.

    The columns are `KEYS` and one float64 column per statistic. A statistic that a file lacks is null in its rows. Of
    several rows with equal values in the columns `KEYS`, the last one is returned. Unreadable lines are reported on
    standard error.
    """
    import numpy as np
    import pyarrow as pa

    tables = [table for files in folders for _, path in files.get(family, ()) for table in _file_rows(path)]
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="default")
    table = table.append_column("order", pa.array(np.arange(len(table))))
    last = table.group_by(list(KEYS)).aggregate([("order", "max")])["order_max"]
    return table.take(last).sort_by([("step", "ascending"), ("order", "ascending")]).drop_columns("order")


def statistics_of(columns: Iterable[str]) -> list[str]:
    """Return the names in `columns` that are statistics, in msprobe's order."""
    names = dict.fromkeys(name for name in columns if name not in {*KEYS, "shape", "dtype"})
    return sorted(names, key=lambda name: STATISTICS.index(name) if name in STATISTICS else len(STATISTICS))


def file_columns(paths: Iterable[Path]) -> list[str]:
    """Return the column names in the headers of all files in `paths`.

    Files without the columns `vpp_stage`, `name` and `step` are ignored.
    """
    from rankscope_ingest.importers.msprobe.csv_rows import read_header

    headers = [read_header(path) for path in paths]
    return [name for header in headers if set(CSV_KEYS) <= set(header) for name in header]


def output_folder(monitor_path: str | Path, output_dirpath: str | Path | None, function: str) -> Path:
    """Create and return the output folder of a converter: `output_dirpath`, or by default a folder in `monitor_path`.

    The name of the default folder consists of the present time (UTC+8) and `function`, the name of the converter, as in
    msprobe.
    """
    default = f"{time_text(dt.datetime.now(dt.UTC))}-{function}"
    folder = Path(output_dirpath).expanduser() if output_dirpath else Path(monitor_path).expanduser() / default
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def in_parallel(function: Callable[[Job], Result], jobs: Sequence[Job], number: int) -> Iterator[tuple[Job, Result]]:
    """Call `function` with each job; yield each job and the result of the call, in the order of `jobs`.

    `number` calls run at the same time. Threads are used, because a script may call a converter at its top level. A new
    process would run such a script again. Arrow reads CSV files outside of Python's interpreter lock.
    """
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        for start in range(0, len(jobs), number):
            some = jobs[start : start + number]
            yield from zip(some, pool.map(function, some), strict=True)


def _file_rows(path: Path) -> Iterator[pa.Table]:
    import pyarrow as pa

    from rankscope_ingest.importers.common.importer import Faults
    from rankscope_ingest.importers.msprobe.csv_rows import read_rows

    faults = Faults()
    for rows in read_rows(path, faults):
        keys = {"vpp_stage": rows.vpp, "name": rows.spread(rows.names, pa.string()), "step": rows.steps}
        yield pa.table({**keys, MICRO_STEP: rows.micro, **rows.numbers})
    if faults.count:
        first = faults.first[0]
        text = (
            f"{path.parent.name}/{path.name}: {faults.count} lines are not converted; line {first.line}: {first.text}"
        )
        print(text, file=sys.stderr)


def _time(name: str, text: str | None) -> dt.datetime | None:
    if text is None:
        return None
    moment = parse_time(text) if isinstance(text, str) else None
    if moment is None:
        raise ValueError(f"{name} {text!r} is not the time of a folder: write it as in Dec03_21-34-40")
    return moment


def _is_inside(moment: dt.datetime, start: dt.datetime | None, end: dt.datetime | None) -> bool:
    after, before = start is None or start <= moment, end is None or moment <= end
    return (after or before) if start and end and start > end else (after and before)


def _report_several(ranks: Mapping[int, Sequence[Files]]) -> None:
    """Report on standard error that a rank has several folders, whose rows are joined."""
    rank, folders = max(ranks.items(), key=lambda item: len(item[1]))
    if len(folders) > 1:
        print(
            f"rank {rank} has {len(folders)} folders in this range of times: of each step, the rows of the latest "
            "folder are used; time_start and time_end select one launch",
            file=sys.stderr,
        )
