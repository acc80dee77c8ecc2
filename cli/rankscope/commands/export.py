"""`rankscope export`: write one run of a store in the format of another tool."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import Annotated

import typer

from rankscope.access.stores import open_store, resolve_run
from rankscope.shell.errors import USAGE, CommandError, command_errors, suggestion
from rankscope.shell.options import STANDARD_OUTPUT, Run, Store, output_file, step_range
from rankscope.shell.streams import progress_bar
from rankscope_contract.model.collective_format import ranks_in
from rankscope_contract.wire.escaping import file_name
from rankscope_storage.base.errors import ExportError
from rankscope_storage.connection import Connection
from rankscope_storage.formats import ExportFormat, ExportOptions, ExportReport, export_formats
from rankscope_storage.formats.export import parse_time

Target = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="File or folder to write; - is standard output, if the format is one file. "
        "Default: a name made of the run and the format.",
    ),
]
TimeStart = Annotated[
    str | None, typer.Option(help="Only rows from this time: 2026-03-01T12:00:00, or Mar01_12-00-00 (UTC).")
]
DataTypes = Annotated[
    str | None, typer.Option(help="Only tensors of these families or kinds: actv,grad_reduced,exp_avg.")
]
Decimals = Annotated[
    int | None, typer.Option(min=0, help="csv: round values to this number of decimals, as msprobe does.")
]
AppendOutput = Annotated[
    tuple[str, str] | None,
    typer.Option(help="csv: continue in the folders that were started between these two times.", metavar="FROM TO"),
]

TimeZone = Annotated[
    str, typer.Option(help="csv: time zone of the folder names: UTC+8, as in msprobe, Europe/Berlin or local.")
]
AllPoints = Annotated[bool, typer.Option("--all-points", help="tensorboard: write every point, in files of any size.")]
Form = Annotated[str, typer.Option("--format", "-f", help="csv, tensorboard, sqlite, openmetrics or parquet.")]


def export(
    run: Run = None,
    store: Store = Path("history"),
    form: Form = "csv",
    output: Target = None,
    time_start: TimeStart = None,
    time_end: Annotated[str | None, typer.Option(help="Only rows up to this time.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only rows of these steps: first:last.")] = None,
    ranks: Annotated[str | None, typer.Option(help="Only rows of these ranks: 0,8-15.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only rows of this attempt.")] = None,
    data_type_list: DataTypes = None,
    process_num: Annotated[int, typer.Option(min=1, help="tensorboard: parallel writer processes.")] = 1,
    step_count_per_record: Annotated[int, typer.Option(min=1, help="csv: steps per file.")] = 1,
    seed_rounding: Decimals = None,
    append_output: AppendOutput = None,
    step_partition: Annotated[int, typer.Option(min=1, help="sqlite: steps per table.")] = 500,
    time_zone: TimeZone = "UTC+8",
    all_points: AllPoints = False,
) -> None:
    """Write one run of a store in another format. Rows that the format cannot represent are counted and reported.

    csv is the file layout of the msprobe monitor. tensorboard writes event files, sqlite one database, and openmetrics
    the text for a Prometheus backfill. parquet writes one file per dataset, with every column.

    [bold]Examples[/bold]

    rankscope export my-run --format tensorboard -o events && tensorboard --logdir events

    rankscope export my-run --format openmetrics -o run.txt && promtool tsdb create-blocks-from openmetrics run.txt data

    rankscope export my-run --format csv --data-type-list grad_reduced --step-count-per-record 100

    rankscope export my-run --format parquet --steps 1000:2000 --ranks 0-7
    """
    exporter = _exporter(form, output)
    with open_store(store) as connection:
        name = resolve_run(connection, run)
        with command_errors(usage=(ExportError,)):
            options = ExportOptions(
                time_start=_time(connection, name, time_start),
                time_end=_time(connection, name, time_end),
                steps=step_range(steps),
                ranks=_ranks(ranks),
                attempt=attempt,
                data_type_list=tuple(filter(None, (data_type_list or "").replace(" ", "").split(","))),
                process_num=process_num,
                step_count_per_record=step_count_per_record,
                seed_rounding=seed_rounding,
                append_output=append_output,
                step_partition=step_partition,
                time_zone=time_zone,
                all_points=all_points,
            )
        target = output or Path(f"{file_name(name, form)}{exporter.suffix}")
        with output_file(target, exporter.suffix) as file, progress_bar("rows", name) as progress:
            report = exporter.export(connection, name, file, options, progress)
    _print_report(name, form, target, report)


def _exporter(name: str, output: Path | None) -> ExportFormat:
    known = export_formats()
    if name not in known:
        formats = "".join(f"\n  {exporter.name:12} {exporter.help}" for exporter in known.values())
        raise CommandError(f"unknown format {name!r}.{suggestion(name, known)} Formats:{formats}", code=USAGE)
    if output == STANDARD_OUTPUT and not known[name].suffix:
        raise CommandError(f"{name} writes a folder: name one with --output", code=USAGE)
    return known[name]


def _time(connection: Connection, run: str, text: str | None) -> dt.datetime | None:
    """Return the time that `text` is; a time without a year is in the year in which the run began."""
    if text is None:
        return None
    rows = connection.query("SELECT coalesce(started_at, ts) AS began FROM runs WHERE run = $run", {"run": run})
    began: dt.datetime | None = rows["began"][0].as_py() if rows.num_rows else None
    return parse_time(text, began or dt.datetime.now(dt.UTC))


def _ranks(text: str | None) -> tuple[int, ...]:
    try:
        return ranks_in(",".join(part for part in (text or "").split(",") if part.strip()))
    except (ValueError, OverflowError) as error:
        raise CommandError(f"--ranks {text!r}: write numbers and ranges, such as 0,8-15", code=USAGE) from error


def _print_report(name: str, form: str, target: Path, report: ExportReport) -> None:
    counts = ", ".join(f"{count:,} {dataset}" for dataset, count in report.rows.items() if count)
    files = f"{len(report.files):,} files below {target}" if len(report.files) > 1 else str(target)
    out = sys.stderr if target == STANDARD_OUTPUT else sys.stdout
    print(f"{name}: {form}, rows: {counts or 'no new rows'}; in {files}", file=out)
    for reason, count in report.omitted.items():
        print(f"omitted {count:,}: {reason}", file=sys.stderr)
