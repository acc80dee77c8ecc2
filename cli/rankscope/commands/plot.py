"""`rankscope plot`: write a figure of one run of a store, or of a log or checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankscope.access.stores import OpenRun, RunSelection, open_run, with_selection
from rankscope.output.figure_files import AverageName, AxisName, Dpi, FigureFile, figure_path, write_figure
from rankscope.shell.errors import USAGE, CommandError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope_view.data.grid import Grid


FigureKind = Literal["overview", "speed", "gpu", "tensors", "updates", "ranks", "histograms"]


Kind = Annotated[FigureKind, typer.Option(help="Figure: overview, speed, gpu, tensors, updates, ranks or histograms.")]
Scalar = Annotated[
    str | None, typer.Option(help="Figure of this logged scalar, such as val/accuracy.", show_default=False)
]
TensorKind = Annotated[
    str | None,
    typer.Option(
        help="tensors: kind of tensors, a gradient by default. histograms: adam_update or adam_ratio.",
        show_default=False,
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        help="tensors, updates, histograms: only this rank. Default: all, or the farthest.", show_default=False
    ),
]
Average = Annotated[AverageName, typer.Option(help="Average of the loss; both is a moving average of the EMA.")]
Tensor = Annotated[str | None, typer.Option(help="histograms: tensor. Default: the first one.", show_default=False)]
Absolute = Annotated[
    bool, typer.Option("--absolute", help="tensors: values instead of ratios to the median of each tensor.")
]


@with_selection
def plot(
    selection: RunSelection,
    kind: Kind = "overview",
    scalar: Scalar = None,
    output: FigureFile = None,
    dpi: Dpi = 300,
    axis: Annotated[AxisName, typer.Option(help="Horizontal axis of overview, speed and --scalar.")] = "step",
    smoothing: Average = "average",
    cut: Annotated[bool, typer.Option("--cut", help="Limit the axis of the loss to most values.")] = False,
    tensor_kind: TensorKind = None,
    tensor: Tensor = None,
    op: Annotated[str, typer.Option(help="tensors: statistic.")] = "norm",
    rank: Rank = None,
    absolute: Absolute = False,
) -> None:
    """Write a figure of a run to a file. It needs no display, and the extra `plot`.

    overview has loss, learning rate, gradient norm and the distribution of losses. speed has loss and throughput, with
    rows below P10 marked. gpu has a box plot of the utilisation of each GPU. tensors, updates and ranks are heat maps
    over steps: of a statistic of tensors, of update sizes, and of the step times of ranks. histograms is a heat map of
    bins over steps, of Adam's update or ratio of one tensor.

    [bold]Examples[/bold]

    rankscope plot my-run --store history

    rankscope plot train.log --kind speed --output speed.svg

    rankscope plot my-run --scalar val/accuracy

    rankscope plot --latest --output training.png
    """
    figure_path(output, "figure")  # a wrong suffix is reported before the run is read
    with open_run(selection) as chosen:
        if scalar is not None:
            figure = _metric(chosen, scalar, axis)
        elif kind == "tensors":
            figure = _heat_map(chosen, _tensor_map(chosen, tensor_kind, op, rank, is_relative=not absolute))
        elif kind == "updates":
            figure = _heat_map(chosen, _update_map(chosen, rank))
        elif kind == "ranks":
            figure = _heat_map(chosen, _rank_map(chosen))
        elif kind == "histograms":
            figure = _heat_map(chosen, _histogram_map(chosen, tensor_kind, tensor, rank))
        else:
            figure = _curves(chosen, kind, axis, smoothing, is_cut=cut)
        write_figure(figure, figure_path(output, chosen.run, scalar or kind), dpi)


def _heat_map(chosen: OpenRun, shown: tuple[Grid, str, str]) -> Figure:
    """Return the heat map of a grid, with its title and unit."""
    from rankscope_view.figures.heatmaps import heat_map

    grid, title, unit = shown
    return heat_map(chosen.run, grid, title=title, unit=unit)


def _metric(chosen: OpenRun, name: str, axis: AxisName) -> Figure:
    from rankscope_view.data.curves import Axis
    from rankscope_view.data.metrics import SCALAR_TITLES, close_names, scalar_lines
    from rankscope_view.figures.lines import overlay

    lines = scalar_lines(chosen.connection, chosen.run, name)
    if not lines:
        known = ", ".join(close_names(chosen.connection, chosen.run, name)) or "none"
        raise CommandError(f"{chosen.run} has no scalar {name!r}; similar names: {known}", code=USAGE)
    named = [(words or name, history) for words, history in lines]
    return overlay(name, named, axis=Axis(axis), title=f"{chosen.run}: {SCALAR_TITLES.get(name, name)}")


def _curves(chosen: OpenRun, kind: FigureKind, axis: AxisName, smoothing: AverageName, *, is_cut: bool) -> Figure:
    from rankscope_view.data.curves import Axis, Smoothing
    from rankscope_view.data.detail import read_detail
    from rankscope_view.data.speed import read_speed, read_utilization
    from rankscope_view.figures.boxes import gpu_boxes
    from rankscope_view.figures.lines import loss_and_throughput, overview

    detail = chosen.stored(read_detail(chosen.connection, chosen.run))
    on, average = Axis(axis), Smoothing(smoothing)
    if kind == "overview":
        return overview(detail, axis=on, smoothing=average, is_cut=is_cut)
    speed = read_speed(chosen.connection, chosen.run, detail.histories, detail.facts.config)
    if kind == "speed":
        return loss_and_throughput(detail, speed.throughput, axis=on, smoothing=average, is_cut=is_cut)
    return gpu_boxes(chosen.run, read_utilization(chosen.connection, chosen.run, speed))


def _tensor_map(
    chosen: OpenRun, given: str | None, op: str, rank: int | None, *, is_relative: bool
) -> tuple[Grid, str, str]:
    from rankscope_contract.model.kinds import OPS
    from rankscope_view.data.grid import GridRequest, empty_grid, tensor_grid, tensor_kinds

    kinds = tensor_kinds(chosen.connection, chosen.run)
    kind = given or kinds.default
    if given is not None and given not in kinds.counts:
        listed = ", ".join(kinds.counts) or "no statistics of tensors"
        raise CommandError(f"{chosen.run} has no kind {given!r}; it has {listed}", code=USAGE)
    if op not in OPS:
        raise CommandError(f"--op {op!r} is no statistic; known: {', '.join(OPS)}", code=USAGE)
    if kind is None:
        return empty_grid("no statistics of tensors"), "Tensors", ""
    request = GridRequest(kind=kind, op=op, rank=rank, is_relative=is_relative)
    grid = tensor_grid(chosen.connection, chosen.run, request)
    where = "" if rank is None else f", rank {rank}"
    unit = f"{op} ÷ median of the tensor" if is_relative else op
    return grid, f"{op.capitalize()} of {kind.replace('_', ' ')} by tensor and step{where}", unit


def _update_map(chosen: OpenRun, rank: int | None) -> tuple[Grid, str, str]:
    from rankscope_view.data.grid import UPDATE_RATIO, GridRequest, empty_grid, tensor_grid

    request = GridRequest(kind=UPDATE_RATIO, is_relative=False, rank=rank)
    grid = tensor_grid(chosen.connection, chosen.run, request)
    if not grid.rows:
        grid = empty_grid("no norms of updates: measure the quantity parameters with the option updates")
    return grid, "Update size by tensor and step", "norm of update ÷ norm of weight"


def _rank_map(chosen: OpenRun) -> tuple[Grid, str, str]:
    from rankscope_view.data.ranks import rank_grid, rank_table

    table = rank_table(chosen.connection, chosen.run)
    grid = rank_grid(chosen.connection, chosen.run, table, whole_step=False)
    if not grid.rows:
        grid = rank_grid(chosen.connection, chosen.run, table, whole_step=True)
        return grid, "Step time by rank and step", "÷ median rank"
    return grid, "Time before collectives by rank and step", "÷ median rank"


def _histogram_map(chosen: OpenRun, kind: str | None, tensor: str | None, rank: int | None) -> tuple[Grid, str, str]:
    from rankscope_view.data.grid import histogram_grid, histogram_tensors

    known = histogram_tensors(chosen.connection, chosen.run)
    if not known:
        raise CommandError(f"{chosen.run} has no histograms: measure the quantity adam_updates")
    kind = kind or next(iter(known))
    tensor = tensor or (known.get(kind) or [""])[0]
    if tensor not in known.get(kind, ()):
        listed = ", ".join(known[kind][:8] if kind in known else known)
        raise CommandError(f"{chosen.run} has no histograms of {tensor or kind!r}; it has {listed}", code=USAGE)
    grid = histogram_grid(chosen.connection, chosen.run, kind, tensor, rank)
    where = "" if rank is None else f", rank {rank}"
    return grid, f"{kind.replace('_', ' ').capitalize()} of {tensor} by step{where}", "share of the elements"
