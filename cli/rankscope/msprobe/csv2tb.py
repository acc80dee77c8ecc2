"""Conversion of msprobe's CSV output to TensorBoard event files."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rankscope.msprobe import csv_rows

if TYPE_CHECKING:
    import pyarrow as pa

_OWN_SUFFIX: Final = ".csv2tb"
_EVENT_VALUES: Final = 2_000  # readers skip records of many megabytes


def csv2tensorboard_by_step(
    monitor_path: str,
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: list[str] | None = None,
    output_dirpath: str | None = None,
) -> None:
    """Write msprobe's CSV files as event files `<output>/rank<R>/<data type>/`, with tags `vp0:<name>[:micro<m>]/<op>`.

    Args:
        monitor_path: output folder of the monitor, which contains the folders of the ranks.
        time_start: first folder time, such as `Dec03_21-34-40`; None does not limit the range.
        time_end: last folder time; the range includes it.
        process_num: number of ranks that are read and written at the same time, up to 128.
        data_type_list: data types to convert, as in the names of the files, such as `["actv", "grad_reduced"]`. None
            converts msprobe's eight families of tensors.
        output_dirpath: output folder. The default is `<time>-csv2tensorboard_by_step` in `monitor_path`.

    Event files of an earlier call in the same folder are replaced. The output folder is printed.

    Raises ValueError if an argument is wrong, if no folder is in the range of times, or if the output folder contains
    event files of another program.
    """
    processes = csv_rows.checked_number("process_num", process_num)
    types = csv_rows.checked_types(data_type_list, csv_rows.TENSOR_TYPES)
    ranks = csv_rows.rank_files(monitor_path, time_start, time_end)
    output = csv_rows.output_folder(monitor_path, output_dirpath, "csv2tensorboard_by_step")
    write = functools.partial(_write_rank, output=output, types=types)
    counts = [count for _, count in csv_rows.in_parallel(write, [*ranks.items()], processes)]
    print(f"{sum(counts):,} rows of {len(ranks)} ranks; output has been saved to: {output}")


def _write_rank(rank_and_folders: tuple[int, Sequence[csv_rows.Files]], *, output: Path, types: Sequence[str]) -> int:
    rank, folders = rank_and_folders
    rows = 0
    for family in types:
        table = csv_rows.family_rows(folders, family)
        if table is not None and len(table):
            _write_family(table, output / f"rank{rank}" / family)
            rows += len(table)
    return rows


def _write_family(table: pa.Table, folder: Path) -> None:
    """Write the rows of a family to one event file in `folder`, in the order of their steps."""
    from rankscope_storage.tensorboard.events import FILE_VERSION
    from rankscope_storage.tensorboard.frames import frame
    from rankscope_storage.tensorboard.messages import Event, put_number

    earlier = list(folder.glob("*tfevents*"))
    if foreign := [path.name for path in earlier if not path.name.endswith(_OWN_SUFFIX)]:
        raise ValueError(
            f"{folder} contains {foreign[0]}, an event file of another program: choose another output_dirpath"
        )
    folder.mkdir(parents=True, exist_ok=True)
    statistics = csv_rows.statistics_of(table.column_names)
    now = time.time()
    partial = folder / ".partial"
    with partial.open("wb") as file:
        event = Event(wall_time=now, file_version=FILE_VERSION)
        columns = [table[name].to_pylist() for name in ("step", "vpp_stage", "name", "micro_step", *statistics)]
        step_before = None
        for step, vpp, name, micro, *numbers in zip(*columns, strict=True):
            if step != step_before or len(event.summary.value) >= _EVENT_VALUES:
                file.write(frame(event.SerializeToString()))
                event, step_before = Event(wall_time=now, step=step), step
            series = f"vp{vpp}:{name}" + ("" if micro < 0 else f":micro{micro}")
            for statistic, number in zip(statistics, numbers, strict=True):
                if number is not None:
                    value = event.summary.value.add(tag=f"{series}/{statistic}".encode("utf-8", "replace"))
                    put_number(value, number)
        file.write(frame(event.SerializeToString()))
    for path in earlier:
        path.unlink()
    partial.replace(folder / f"events.out.tfevents.{now:.0f}{_OWN_SUFFIX}")
