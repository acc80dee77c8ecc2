"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.output import Format

Store = Annotated[
    Path,
    typer.Option("--store", "-s", envvar="RANKSCOPE_STORE", help="Folder of the store.", show_default=True),
]
Run = Annotated[str | None, typer.Argument(help="Name of the run; the latest one when left out.", show_default=False)]
OutputFormat = Annotated[Format, typer.Option("--format", help="How to print rows.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)]
