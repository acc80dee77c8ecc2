"""`rankscope compare`: a figure with the loss of several runs or logs, and a table of the values that differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.access.stores import OpenRun, open_runs
from rankscope.output.figure_files import AxisName, Dpi, FigureFile, figure_path, write_figure
from rankscope.output.run_texts import FormatOption, compare_text
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from rankscope_storage.diff.diff import Divergence


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Runs of the store, or logs, checkpoints and stores.", metavar="RUN|PATH...", show_default=False
        ),
    ],
    store: Store = Path("history"),
    scalar: Annotated[str, typer.Option(help="Scalar of the figure, such as grad_norm or val/accuracy.")] = "loss",
    axis: Annotated[AxisName, typer.Option(help="Horizontal axis of the figure.")] = "step",
    output: FigureFile = None,
    dpi: Dpi = 300,
    no_figure: Annotated[bool, typer.Option("--no-figure", help="Only print the table.")] = False,
    form: FormatOption = "text",
) -> None:
    """Compare runs at a glance: write a figure with one line per run, and print the values and settings that differ.

    The figure is a png in the working directory by default, and needs the extra `plot`. Of two runs of one store, the
    first step and tensor that differ by more than rounding are printed too. `rankscope diff` lists all of them,
    compares ranks and attempts, and has exit codes for scripts.

    [bold]Examples[/bold]

    rankscope compare baseline candidate --store history

    rankscope compare outputs/checkpoint-500 outputs/checkpoint-1000 --output losses.svg

    rankscope compare a.jsonl b.jsonl --no-figure --format markdown
    """
    from rankscope_view.data.summary import read_summary

    if len(sources) != len(set(sources)) or len(sources) < 2:
        raise CommandError("name two or more different runs or logs", code=USAGE)
    path = None if no_figure else figure_path(output, "compare", *sources)
    with open_runs(sources, store) as opened:
        if not opened:
            raise CommandError("none of the runs can be read")
        found = [read_summary(one.connection, one.run) for one in opened]
        runs = [one for one in found if one is not None]
        text = compare_text(runs, _first_difference(opened), form)
        if path is not None:
            write_figure(_figure(opened, scalar, axis), path, dpi)
    sys.stdout.write(text)


def _first_difference(opened: Sequence[OpenRun]) -> Divergence | None:
    """Return where two runs of one store differ first; None for all other runs."""
    from rankscope_view.data.comparison import first_difference

    if len(opened) != 2 or opened[0].connection is not opened[1].connection:
        return None
    a, b = opened
    return first_difference(a.connection, a.run, b.run)


def _figure(opened: Sequence[OpenRun], scalar: str, axis: AxisName) -> Figure:
    from rankscope_view.data.curves import Axis
    from rankscope_view.data.detail import nothing
    from rankscope_view.data.metrics import scalar_lines
    from rankscope_view.figures.lines import overlay

    absent = [("", nothing(scalar))]
    found = [(one.run, *line) for one in opened for line in scalar_lines(one.connection, one.run, scalar) or absent]
    named = [(", ".join(filter(None, (run, words))), rows) for run, words, rows in found]
    title = f"{scalar} of {len(opened)} runs" if len(named) > len(opened) else None
    return overlay(scalar, named, axis=Axis(axis), title=title)
