"""What a run is doing right now, read from the pages of the service and of its ranks, and shown as it moves.

A bar on a terminal, plain lines elsewhere. It reads what any Prometheus would read, so what it shows is what is served.
"""

from __future__ import annotations

import contextlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rankscope_contract import metrics
from rankscope_contract.channel import METRICS_PATH, SERVICE_DISCOVERY_PATH

RANKS_READ: Final = 16
"""Pages read at each look; beyond that many ranks, tokens/s is scaled up from those that were read."""

TIMEOUT_SECONDS: Final = 2.0

_RANK_METRICS: Final = (metrics.STEP, metrics.STEPS_PLANNED, metrics.LOSS, metrics.TOKENS)
_SERVICE_METRICS: Final = (metrics.ROWS_COMMITTED, metrics.LAG_RECORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at one run. `tokens` is the total of all ranks; what is not known is None."""

    at: float
    run: str | None = None
    step: int | None = None
    planned: int | None = None
    loss: float | None = None
    tokens: float | None = None
    rows: int = 0
    lag: int = 0
    ranks: int = 0


class View(Protocol):
    """Something that shows snapshots, and lines beside them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        """Bring the display up to `snapshot`."""

    def say(self, line: str) -> None:
        """Print one line that stays."""


def look(service_url: str, token: str | None, now: float) -> Snapshot | None:
    """Return what the service and the ranks of its latest run say now; None when the service does not answer."""
    try:
        own = _samples(_fetch(service_url + METRICS_PATH, token), _SERVICE_METRICS)
        targets = json.loads(_fetch(service_url + SERVICE_DISCOVERY_PATH, token))
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError):
        return None
    groups = [(group["labels"]["instance"].rpartition("/")[0], group["targets"][0]) for group in targets]
    run = groups[-1][0] if groups else None
    pages = [page for name, address in groups if name == run for page in [address]]
    ranks = [page for address in pages[:RANKS_READ] if (page := _rank_page(address, token))]
    losses = [value for page in ranks for name, value in page if name == metrics.LOSS.name]
    tokens = [value for page in ranks for name, value in page if name == metrics.TOKENS.name]
    return Snapshot(
        at=now,
        run=run,
        step=_highest(ranks, metrics.STEP.name),
        planned=_highest(ranks, metrics.STEPS_PLANNED.name),
        loss=sum(losses) / len(losses) if losses else None,
        tokens=sum(tokens) * len(pages) / len(ranks) if tokens else None,
        rows=int(sum(sample.value for sample in own if sample.name == metrics.ROWS_COMMITTED.name)),
        lag=int(sum(sample.value for sample in own if sample.name == metrics.LAG_RECORDS.name)),
        ranks=len(pages),
    )


class PlainView:
    """Lines for a file or a pipe: one when the step moved on and some seconds passed."""

    def __init__(self, console: Console, *, every_seconds: float = 5.0) -> None:
        self._console = console
        self._every_seconds = every_seconds
        self._speed = Speed()
        self._last = -math.inf
        self._shown: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind."""

    def show(self, snapshot: Snapshot) -> None:
        """Print a line when it says something new."""
        speed = self._speed.of(snapshot)
        due = snapshot.at - self._last >= self._every_seconds or snapshot.step == snapshot.planned
        if snapshot.step is not None and snapshot.step != self._shown and due:
            self._last, self._shown = snapshot.at, snapshot.step
            self.say("  ".join(_facts(snapshot, speed)))

    def say(self, line: str) -> None:
        """Print `line` as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class BarView:
    """A progress bar that stays at the foot of a terminal."""

    def __init__(self, console: Console) -> None:
        self._speed = Speed()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the bar as it stood last."""
        self._progress.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar."""
        facts = "  ".join(_facts(snapshot, self._speed.of(snapshot)))
        if self._task is None:
            self._task = self._progress.add_task("", total=None, facts="")
        self._progress.update(
            self._task,
            description=snapshot.run or "waiting for ranks",
            total=snapshot.planned,
            completed=snapshot.step or 0,
            facts=facts,
        )

    def say(self, line: str) -> None:
        """Print `line` above the bar."""
        self._progress.console.print(Text(line), soft_wrap=True)


class Speed:
    """Tokens per second over the last few looks."""

    WINDOW_SECONDS: Final = 10.0

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []

    def of(self, snapshot: Snapshot) -> float | None:
        """Return the rate up to `snapshot`; None until two looks saw tokens."""
        if snapshot.tokens is None:
            return None
        if self._seen and snapshot.tokens < self._seen[-1][1]:
            self._seen.clear()  # another run, or a new attempt of it
        self._seen.append((snapshot.at, snapshot.tokens))
        self._seen = [point for point in self._seen if snapshot.at - point[0] <= self.WINDOW_SECONDS]
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / (end - start) if end > start else None


def view_for(console: Console) -> View:
    """Return the view that fits where `console` writes."""
    return BarView(console) if console.is_terminal else PlainView(console)


def _facts(snapshot: Snapshot, speed: float | None) -> Iterator[str]:
    if snapshot.step is not None:
        yield f"step {snapshot.step}" + (f"/{snapshot.planned}" if snapshot.planned else "")
    if snapshot.loss is not None:
        yield f"loss {snapshot.loss:.4f}"
    if speed is not None:
        yield f"{speed:,.0f} tokens/s"
    yield f"{snapshot.rows:,} rows stored"
    yield f"lag {snapshot.lag} records"
    yield f"{snapshot.ranks} rank{'' if snapshot.ranks == 1 else 's'}"


def _rank_page(address: str, token: str | None) -> list[tuple[str, float]]:
    """Return (metric, value) of the few metrics we show; nothing when the rank has just gone."""
    with contextlib.suppress(urllib.error.URLError, TimeoutError, ConnectionError, ValueError):
        page = _fetch(f"http://{address}{METRICS_PATH}", token)
        return [(sample.name, sample.value) for sample in _samples(page, _RANK_METRICS)]
    return []


def _highest(pages: Iterable[list[tuple[str, float]]], name: str) -> int | None:
    values = [value for page in pages for metric, value in page if metric == name and math.isfinite(value)]
    return int(max(values)) if values else None


def _samples(page: str, wanted: tuple[metrics.MetricSpec, ...]) -> list[Sample]:
    """Return the samples of `wanted`; the many tensor series of a page are never parsed."""
    names = tuple(spec.name for spec in wanted)
    lines = "\n".join(line for line in page.splitlines() if line.startswith(names)) + "\n"
    return [sample for family in text_string_to_metric_families(lines) for sample in family.samples]


def _fetch(url: str, token: str | None) -> str:
    request = urllib.request.Request(url)  # noqa: S310 - http(s) addresses of our own service and its ranks
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 - as above
        text: str = answer.read().decode()
    return text
