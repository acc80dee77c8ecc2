"""`rankscope sizing`: compute the services, bytes and requests that a load needs, from measured costs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import pyarrow as pa
import pydantic
import typer

from rankscope.output.rows import as_json, print_table
from rankscope.shell.errors import USAGE, CommandError
from rankscope.sizing.costs import Costs, Load, lines, short_number
from rankscope_ingest.base.config import IngestSection

_LOAD = Load()

Tensors = Annotated[int, typer.Option(help="Rows of a sampled step on one rank: monitored tensors times quantities.")]
RawDays = Annotated[float | None, typer.Option(help="raw_days of \\[retention].", show_default="kept forever")]
FlushAfter = Annotated[float, typer.Option(help="flush_after_seconds of \\[ingest].")]
WritePrice = Annotated[float, typer.Option(help="Price of 1,000 PUT or LIST requests, in dollars.")]


def sizing(
    ranks: Annotated[int, typer.Option(help="Ranks of all runs at the same time.")] = _LOAD.ranks,
    tensors: Tensors = _LOAD.tensors,
    every: Annotated[int, typer.Option(help="Every n-th step is sampled, as in the monitor's setting.")] = _LOAD.every,
    step_seconds: Annotated[float, typer.Option(help="Duration of a training step.")] = _LOAD.step_seconds,
    scalars: Annotated[int, typer.Option(help="Scalars of each step: loss, phases, your own.")] = _LOAD.scalars,
    raw_days: RawDays = _LOAD.raw_days,
    days: Annotated[float, typer.Option(help="Age of the store for which its size is computed.")] = _LOAD.days,
    poll_seconds: Annotated[float, typer.Option(help="poll_seconds of \\[ingest].")] = _LOAD.ingest.poll_seconds,
    flush_after_seconds: FlushAfter = _LOAD.ingest.flush_after_seconds,
    flush_rows: Annotated[int, typer.Option(help="flush_rows of \\[ingest].")] = _LOAD.ingest.flush_rows,
    cores: Annotated[float, typer.Option(help="Cores of the machine of a service.")] = _LOAD.cores,
    memory_gb: Annotated[float, typer.Option(help="Memory of the machine of a service.")] = _LOAD.memory_gb,
    write_price: WritePrice = _LOAD.write_price,
    read_price: Annotated[float, typer.Option(help="The same for GET, in dollars.")] = _LOAD.read_price,
    costs: Annotated[bool, typer.Option("--costs", help="Print the measured costs and their sources.")] = False,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute how many services a training needs, and their cores, memory, bytes, commits and requests.

    All figures follow from a few costs of a service that were measured on one machine: --costs prints them with the
    command that measures each. Without options, the result is for an example of 1,000 ranks. A line with the word
    extrapolation is beyond the measurements: 1,000 ranks or 12 million samples per second of a service, or four
    services. A service uses at most 70 % of a limit, so that it can fetch a backlog after a stop. The cores and the
    memory are those of the service that also merges files and rolls up rows for all others.

    The cost is in the rows: sample fewer steps (--every) or fewer tensors first. If your machine is slower
    than the measured one, the cores increase by the same factor.

    [bold]Examples[/bold]

    rankscope sizing

    rankscope sizing --ranks 64 --tensors 12000 --every 10 --raw-days 7 --days 365

    rankscope sizing --ranks 10000 --cores 8 --memory-gb 16 --json
    """
    if costs:
        fields = dataclasses.fields(Costs)
        rows = [{"cost": one.name, "value": one.default, **one.metadata} for one in fields]
    else:
        load = Load(
            ranks=ranks,
            tensors=tensors,
            every=every,
            step_seconds=step_seconds,
            scalars=scalars,
            raw_days=raw_days,
            days=days,
            cores=cores,
            memory_gb=memory_gb,
            write_price=write_price,
            read_price=read_price,
            ingest=_ingest(poll_seconds=poll_seconds, flush_after_seconds=flush_after_seconds, flush_rows=flush_rows),
        )
        rows = [dataclasses.asdict(line) for line in lines(load)]
    if as_json_text:
        print(as_json(rows), end="")
    else:
        print_table(pa.Table.from_pylist([one | {"value": short_number(one["value"])} for one in rows]))


def _ingest(**settings: Any) -> IngestSection:
    try:
        return IngestSection(**settings)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        option = "".join(f"--{name}: ".replace("_", "-") for name in fault["loc"])
        raise CommandError(f"{option}{fault['msg'].removeprefix('Value error, ')}", code=USAGE) from error
