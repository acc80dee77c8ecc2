"""Write figures to files, for the commands that draw: default names, and formats by suffix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import STANDARD_OUTPUT, output_file
from rankscope_contract.wire.escaping import file_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FigureFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="File of the figure; the suffix is png, svg or pdf. - is standard output, as png. "
        "Default: a png in the working directory.",
        show_default=False,
    ),
]
AxisName = Literal["step", "cumulative", "attempt", "arrival", "time"]
"""Values of `rankscope_view.data.curves.Axis`, of which the import takes half a second."""

AverageName = Literal["none", "ema", "average", "both"]
"""Values of `rankscope_view.data.curves.Smoothing`."""

Dpi = Annotated[int, typer.Option(min=20, max=1200, help="Pixels per inch of a png.")]


def figure_path(output: Path | None, *names: str) -> Path:
    """Return the file of a figure: `output`, or a png in the working directory that `names` name.

    Raises CommandError if the suffix is no format of figures.
    """
    from rankscope_view.figures.style import FORMATS

    path = output or Path(f"{file_name(*names)}.png")
    if path != STANDARD_OUTPUT and path.suffix[1:].lower() not in FORMATS:
        raise CommandError(f"--output {path}: name a file with the suffix {', '.join(FORMATS)}", code=USAGE)
    return path


def write_figure(figure: Figure, path: Path, dpi: int) -> None:
    """Write `figure` to `path`, or to standard output as png if it is `-`. Print the path on standard error.

    Raises CommandError if no panel has data.
    """
    from rankscope_view.figures.style import notices, save

    if empty := notices(figure):
        raise CommandError(f"there is no data for this figure, and no file is written: {', '.join(empty)}")
    with output_file(path, ".png") as file:
        save(figure, file, dpi=dpi)
    print(f"wrote {'the figure to standard output' if path == STANDARD_OUTPUT else path}", file=sys.stderr)
