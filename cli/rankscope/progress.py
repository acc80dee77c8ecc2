"""What runs are doing right now, as the service tells it, shown as it moves: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from rankscope_contract.channel import RUNS_PATH
from rankscope_contract.events import RunState
from rankscope_ingest.progress import RunProgress

TIMEOUT_SECONDS: Final = 2.0
LINE_EVERY_SECONDS: Final = 5.0

_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class View(Protocol):
    """Something that shows runs, and lines beside them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, runs: Sequence[RunProgress], now: float) -> None:
        """Bring the display up to `runs`; `now` is in seconds, from any start."""

    def say(self, line: str) -> None:
        """Print one line that stays."""


def view_for(console: Console) -> View:
    """Return the view that fits where `console` writes."""
    return BarView(console) if console.is_terminal else PlainView(console)


def fetch_runs(service_url: str) -> list[RunProgress] | None:
    """Return what the service on this machine says of its runs; None when it does not answer."""
    try:
        with urllib.request.urlopen(service_url + RUNS_PATH, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 - our own service
            document = json.load(answer)
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError):
        return None
    return [RunProgress(**{key: _number(value, key) for key, value in run.items()}) for run in document]


class PlainView:
    """Lines for a file or a pipe: one per run when it moved on and some seconds passed, or when its state changed."""

    def __init__(self, console: Console, *, every_seconds: float = LINE_EVERY_SECONDS) -> None:
        self._console = console
        self._every_seconds = every_seconds
        self._last: dict[str, tuple[float, int | None, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind."""

    def show(self, runs: Sequence[RunProgress], now: float) -> None:
        """Print a line for each run that has something new to say."""
        for run in runs:
            at, step, state = self._last.get(run.run, (-math.inf, None, ""))
            moved = run.step != step and now - at >= self._every_seconds
            if run.step is not None and run.state != RunState.PENDING and (moved or run.state != state):
                self._last[run.run] = (now, run.step, run.state)
                self.say(f"{run.run} {run.state}  {'  '.join(facts(run))}")

    def say(self, line: str) -> None:
        """Print `line` as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class BarView:
    """Progress bars at the foot of a terminal, one per run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the bars as they stood last."""
        self._progress.stop()

    def show(self, runs: Sequence[RunProgress], now: float) -> None:  # noqa: ARG002 - a bar needs no pause between looks
        """Move the bars."""
        for run in runs:
            if run.run not in self._tasks:
                self._tasks[run.run] = self._progress.add_task("", total=None, facts="")
            self._progress.update(
                self._tasks[run.run],
                description=f"{run.run} {run.state}",
                total=run.planned_steps,
                completed=run.step or 0,
                facts="  ".join(facts(run)),
            )

    def say(self, line: str) -> None:
        """Print `line` above the bars."""
        self._progress.console.print(Text(line), soft_wrap=True)


def facts(run: RunProgress) -> Iterator[str]:
    """Yield what is known of a run, in the order in which one asks."""
    if run.step is not None:
        yield f"step {run.step}" + (f"/{run.planned_steps}" if run.planned_steps else "")
    if run.loss is not None:
        yield f"loss {run.loss:.4f}"
    if run.tokens_per_second is not None:
        yield f"{run.tokens_per_second:,.0f} tokens/s"
    yield f"{run.rows_stored:,} rows stored"
    yield f"lag {run.lag_records}"
    yield f"{run.ranks_alive}/{run.world_size} ranks"
    if run.records_lost:
        yield f"{run.records_lost} records LOST"
    if run.eta_seconds is not None and run.ranks_alive:
        yield f"{_duration(run.eta_seconds)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes}:{rest:02}"


def _number(value: Any, key: str) -> Any:
    """Return `value` with the words for what JSON cannot say turned back; a run may well be called NaN."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) and key not in ("run", "state", "reason") else value
