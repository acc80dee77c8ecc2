"""`rankscope msprobe`: msprobe's converters and its anomaly processor, with the arguments of msprobe's manual."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from rankscope.shell.errors import command_errors
from rankscope.shell.options import named_folder

msprobe = typer.Typer(
    help="""Convert or analyse the output folder of msprobe's monitor, without a store.

The commands have the arguments of msprobe's manual, written as --time-start or as --time_start.
Steps are those of msprobe, from 0.
In Python: from rankscope.msprobe import csv2tensorboard_by_step, csv2db, CSV2DBConfig, analyse_anomalies""",
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)


def _folder(text: str) -> str:
    return str(named_folder(text))


MonitorPath = Annotated[str, typer.Option(help="Output folder of the monitor, with the folders of the ranks.")]
TimeStart = Annotated[str | None, typer.Option(help="Only folders from this time: Dec03_21-34-40.")]
TimeEnd = Annotated[str | None, typer.Option(help="Only folders up to and including this time.")]
ProcessNum = Annotated[int, typer.Option(help="Number of ranks to read at the same time, up to 128.")]
DataTypes = Annotated[str | None, typer.Option(help="Only files of these data types: actv,grad_reduced. Default: all.")]

OutputFolder = Annotated[
    str | None,
    typer.Option(
        parser=_folder, help="Output folder. Default: TIME-csv2… with the name of the command, in --monitor-path."
    ),
]


@msprobe.command("csv2tensorboard")
def csv2tensorboard(
    monitor_path: MonitorPath,
    time_start: TimeStart = None,
    time_end: TimeEnd = None,
    process_num: ProcessNum = 1,
    data_type_list: DataTypes = None,
    output_dirpath: OutputFolder = None,
) -> None:
    """Write the CSV files of msprobe's monitor as TensorBoard event files, one folder per rank and data type.

    The tags are those of msprobe's csv2tensorboard_by_step: vp0:NAME/norm, or vp0:NAME:micro1/norm with micro-batches.

    [bold]Examples[/bold]

    rankscope msprobe csv2tensorboard --monitor-path monitor_output --output-dirpath events

    rankscope msprobe csv2tensorboard --monitor-path monitor_output --time-start Dec03_21-34-40 --process-num 8
    """
    from rankscope.msprobe import csv2tensorboard_by_step

    with _one_line_errors():
        csv2tensorboard_by_step(monitor_path, time_start, time_end, process_num, _names(data_type_list), output_dirpath)


@msprobe.command("csv2db")
def csv2db(
    monitor_path: MonitorPath,
    time_start: TimeStart = None,
    time_end: TimeEnd = None,
    process_num: ProcessNum = 1,
    data_type_list: DataTypes = None,
    output_dirpath: OutputFolder = None,
    step_partition: Annotated[int, typer.Option(help="Number of steps in one table, at least 10.")] = 500,
) -> None:
    """Write the CSV files of msprobe's monitor to the SQLite database monitor_metrics.db, with msprobe's tables.

    Each data type and partition of steps has a table metric_ID_step_FIRST_LAST; monitoring_metrics and
    monitoring_targets contain the names of the ids.

    [bold]Example[/bold]: rankscope msprobe csv2db --monitor-path monitor_output --output-dirpath . --step-partition 500
    """
    from rankscope import msprobe as functions

    with _one_line_errors():
        types = _names(data_type_list)
        paths_and_times = (monitor_path, time_start, time_end)
        functions.csv2db(functions.CSV2DBConfig(*paths_and_times, process_num, types, output_dirpath, step_partition))


@msprobe.command("anomaly")
def anomaly(
    data_path: Annotated[
        str, typer.Option("--data-path", "-d", help="Folder of the anomalies: monitor_output/anomaly_detected.")
    ],
    out_path: Annotated[
        str | None,
        typer.Option("--out-path", "-o", parser=_folder, help="Folder of anomaly_analyse.json. Default: --data-path."),
    ] = None,
    topk: Annotated[int, typer.Option("--topk", "-k", help="Largest number of anomalies.")] = 8,
    step_list: Annotated[
        str,
        typer.Option("--step-list", "--step", "-s", help="Only these steps, as a list or ranges: [1,5] or 1,5,10:20."),
    ] = "[]",
) -> None:
    """Write the first anomalies of all ranks, in msprobe's order of execution, to anomaly_analyse.json and print them.

    The anomalies are sorted by step, micro-batch, stage of the step, pipeline stage and call. Step 0 is the first step.

    [bold]Examples[/bold]

    rankscope msprobe anomaly -d monitor_output/anomaly_detected

    rankscope msprobe anomaly -d monitor_output/anomaly_detected -o . -k 20 -s "[100, 105, 200:300]"
    """
    from rankscope.msprobe import analyse_anomalies

    with _one_line_errors():
        analyse_anomalies(data_path, out_path or "", topk, step_list)


def _names(text: str | None) -> list[str] | None:
    """Return the names in a comma-separated list, which may be written as a list of Python; None without names."""
    return [name for name in re.split(r"[\s,\[\]\"']+", text or "") if name] or None


def _one_line_errors() -> AbstractContextManager[None]:
    from rankscope_ingest.base.errors import IngestError

    return command_errors(OSError, IngestError, usage=(ValueError,))
