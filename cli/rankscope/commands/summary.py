"""`rankscope summary`: print the summary of one run of a store, or of a log or checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rankscope.access.stores import RunSelection, open_run, with_selection
from rankscope.output.run_texts import FormatOption, summary_text


@with_selection
def summary(
    selection: RunSelection,
    form: FormatOption = "text",
    peak_tflops: Annotated[
        float | None,
        typer.Option(min=0, help="Peak TFLOP/s of one GPU, to estimate its utilisation.", show_default=False),
    ] = None,
) -> None:
    """Print progress, loss, parameters, times, speed, tuning hints and stored rows of a run.

    A log or checkpoint of another tool is imported into a temporary store: trainer_state.json, JSONL, Megatron logs,
    CSV of msprobe, and all other formats of `rankscope import`.

    [bold]Examples[/bold]

    rankscope summary my-run --store history

    rankscope summary train.log

    rankscope summary --checkpoint outputs/checkpoint-500

    rankscope summary --latest --format json
    """
    from rankscope_view.data.summary import read_summary

    with open_run(selection) as chosen:
        found = chosen.stored(read_summary(chosen.connection, chosen.run, peak_tflops=peak_tflops or None))
    sys.stdout.write(summary_text(found, form))
