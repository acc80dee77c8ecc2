"""`rankscope diff`: find the first difference of two runs, ranks or attempts, and its growth over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rankscope.access.stores import open_store, resolve_run
from rankscope.output.diff_text import diff_document, diff_lines
from rankscope.output.rows import as_json as json_text
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import Store, step_range
from rankscope_contract.model.collective_format import spans
from rankscope_storage.connection import Connection
from rankscope_storage.diff.diff import SCALAR, TIMING, DiffSelection, DiffSide, Divergence, Tolerance, divergence

DIFFERENT: Final = 1
ERROR: Final = 2

RelativeTolerance = Annotated[
    float, typer.Option(min=0, help="Largest relative difference that counts as equal; 0 requires identical bits.")
]


def diff(
    runs: Annotated[
        list[str], typer.Argument(help="Two runs, or one run with --ranks or --attempts.", show_default=False)
    ],
    store: Store = Path("history"),
    tolerance: RelativeTolerance = 0.0,
    absolute: Annotated[float, typer.Option(min=0, help="Largest absolute difference that counts as equal.")] = 0.0,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only this kind, such as act_out, scalar or timing; may be repeated.", show_default=False),
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.", show_default=False)] = None,
    ranks: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Compare two ranks of one run, or one rank of each run.", show_default=False),
    ] = None,
    attempts: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Compare these attempts. Default: at each step, the latest attempt.", show_default=False),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps: first:last.", show_default=False)] = None,
    top: Annotated[int, typer.Option(min=1, help="Largest number of differences to show.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the complete result as JSON.")] = False,
) -> None:
    """Find the first step and tensor, in causal order, at which two runs differ by more than a tolerance.

    Runs are compared rank by rank at the steps that both contain. Without a tolerance every value is compared,
    including hashes of replicas. Two ranks are compared by values that must be equal on both, unless --kind is given.
    Exit codes are those of diff: 0 for no difference, 1 for differences, 2 for an error.

    [bold]Examples[/bold]

    rankscope diff good-run bad-run --tolerance 1e-5

    rankscope diff my-run --ranks 0 1

    rankscope diff my-run --attempts 0 1 --kind param_after
    """
    try:
        bounds = step_range(steps)
        _check_finite(tolerance=tolerance, absolute=absolute)
        with open_store(store) as connection:
            found = divergence(
                connection,
                *_sides(connection, runs, ranks, attempts),
                Tolerance(relative=tolerance, absolute=absolute),
                DiffSelection(kinds=tuple(kind or ()), ranks=tuple(rank or ()), steps=bounds),
                top=top,
            )
            _check_compared(found, connection, kind or ())
    except CommandError as error:
        raise CommandError(str(error), code=ERROR) from error
    left_out = "scalar" in (kind or ()) and "timing" not in (kind or ())
    note = ["left out: times, and values of hosts and of Rankscope; --kind timing compares them"] if left_out else []
    print(json_text(diff_document(found)) if as_json else "\n".join([*diff_lines(found), *note, ""]), end="")
    if found.first is not None:
        raise typer.Exit(DIFFERENT)


def _sides(
    connection: Connection, runs: list[str], ranks: tuple[int, int] | None, attempts: tuple[int, int] | None
) -> tuple[DiffSide, DiffSide]:
    names = [resolve_run(connection, run) for run in runs]
    if len(names) == 1 and (ranks is not None or attempts is not None):
        names *= 2
    if len(names) != 2:
        raise CommandError("name two runs, or one run with --ranks A B or --attempts A B", code=USAGE)
    connection.restrict(names)  # a damaged file of other runs is not read
    own_ranks, own_attempts = ranks or (None, None), attempts or (None, None)
    first, second = (
        DiffSide(run=name, rank=rank, attempt=attempt)
        for name, rank, attempt in zip(names, own_ranks, own_attempts, strict=True)
    )
    if first == second:
        raise CommandError(
            f"both sides of the comparison are {first}: name two different runs, ranks or attempts", code=USAGE
        )
    return first, second


def _check_finite(**bounds: float) -> None:
    for name, value in bounds.items():
        if not math.isfinite(value):
            raise CommandError(f"--{name} {value} is not a finite number", code=USAGE)


def _check_compared(found: Divergence, connection: Connection, kinds: Sequence[str]) -> None:
    """Raise CommandError if the runs have no values in common, because 'no difference' would then be misleading."""
    if found.rows_compared:
        return
    for side in (found.a, found.b):
        _check_there(side, connection)
    _check_kinds(kinds, (found.a, found.b), connection)
    if found.steps_compared:
        raise CommandError(f"{found.a} and {found.b} contain no common values at their common steps")
    raise CommandError(f"{found.a} and {found.b} have no common step with values to compare")


def _check_kinds(kinds: Sequence[str], sides: Sequence[DiffSide], connection: Connection) -> None:
    """Raise CommandError if a run has none of the requested kinds; the message lists the available kinds."""
    for side in sides:
        has = {SCALAR, TIMING, *_distinct(connection, side.run, "kind", ("tensor_stats", "features", "hashes"))}
        if kinds and not has & set(kinds):
            listed = ", ".join(sorted(has))
            raise CommandError(f"{side.run} has no kind {', '.join(kinds)}; it has {listed}", code=USAGE)


def _check_there(side: DiffSide, connection: Connection) -> None:
    """Raise CommandError if the requested rank or attempt does not exist; the message lists the available ones."""
    for column, wanted in {"attempt": side.attempt, "rank": side.rank}.items():
        there = _distinct(connection, side.run, column, ("scalars", "tensor_stats", "hashes"))
        if wanted is not None and there and wanted not in there:
            raise CommandError(f"{side.run} has no {column} {wanted}, only {spans(there)}", code=USAGE)


def _distinct(connection: Connection, run: str, column: str, tables: Sequence[str]) -> set[Any]:
    """Return the values other than null of a column in the rows of a run in `tables`."""
    queries = [f"SELECT DISTINCT {column} AS value FROM {name} WHERE run = $run" for name in tables]  # noqa: S608 - constants
    rows = [connection.query(query, {"run": run}) for query in queries]
    return {value for one in rows for value in one["value"].to_pylist() if value is not None}
