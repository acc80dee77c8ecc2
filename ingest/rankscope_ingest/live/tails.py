"""Newest scalars of runs with open pages, before they are committed: the pages show them within seconds.

A commit per second would cost many times the CPU time of the service. Instead, the scalars of polled records are kept
here for a few minutes, as the mean and the range over ranks of each step. Of all other runs, only the newest responses
are kept: a page that is opened then shows the rows between the newest commit and its first update.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rankscope_ingest.record_channel.bodies import ValidBody
from rankscope_storage.prometheus.names import HARDWARE_SCALARS, MONITOR_SCALARS

_LEFT_OUT: Final = HARDWARE_SCALARS | MONITOR_SCALARS
"""Scalars that the page of a run reads from the store only: each step has several of them."""

_FIRST: Final = frozenset(
    {"loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second", "samples_per_second"}
    | {"steps_per_second", "step_seconds"}
)
"""Scalars that are always kept, because the head of the page of a run shows them."""

MOST_NAMES: Final = 300
"""Largest number of other scalars of a run that are kept."""

KEPT_STEPS: Final = 600
KEPT_VALUES: Final = 60_000
"""Limit of the number of kept values of a run. With many scalars, fewer steps are kept."""

_MOST_BODIES: Final = 1000
_SUMMED: Final = frozenset({"tokens_per_second", "samples_per_second"})


@dataclass(slots=True)
class _Step:
    """One step of one attempt: its time in UTC seconds, and its scalars by name and labels, and by rank."""

    time: float
    changed: int = 0  # number of the change
    scalars: dict[tuple[str, str], dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def document(self) -> dict[str, Any]:
        """Return the scalars for JSON: by name those of the first labels, and by name and labels all with labels.

        A scalar has the mean, the lowest and the highest value, which are null if the mean is not finite. A throughput
        has the sum over ranks, too, and the loss the number of ranks.
        """
        found: dict[str, Any] = {}
        for name, labels in sorted(self.scalars, reverse=True):
            values = self.scalars[name, labels].values()
            total = sum(values)
            more = [total] if name in _SUMMED else [len(values)] if name == "loss" else []
            row = [total / len(values), min(values), max(values), *more]
            found[name] = found[f"{name}{labels}"] = row if math.isfinite(total) else [None, None, None]
        return found


@dataclass(slots=True)
class _Run:
    viewers: int = 0
    changes: int = 0
    steps: dict[tuple[int, int], _Step] = field(default_factory=dict)
    names: set[tuple[str, str]] = field(default_factory=set)  # with labels
    event: asyncio.Event = field(default_factory=asyncio.Event)
    text: tuple[int, int, str] = (-1, -1, "")  # the newest answer, and the changes between which it is

    def keeps(self, name: str, labels: str) -> bool:
        """Return whether the values of a scalar are kept."""
        if len(self.names) < MOST_NAMES and name not in _LEFT_OUT:
            self.names.add((name, labels))
        return name in _FIRST or (name, labels) in self.names


class LiveTails:
    """The newest scalars of all runs that are viewed. Runs on the event loop. `on_view` receives the name of a run.

    `kept_seconds` must be longer than the time from a poll to the commit of its rows.
    """

    def __init__(self, on_view: Callable[[str], None] = lambda _: None, kept_seconds: float = 15.0) -> None:
        self._on_view = on_view
        self._kept_seconds = kept_seconds
        self._recent: deque[tuple[float, ValidBody]] = deque(maxlen=_MOST_BODIES)
        self._runs: dict[str, _Run] = {}
        self.viewers: Counter[str] = Counter()

    def is_viewed(self, run: str) -> bool:
        """Return whether a page of `run` is open."""
        return run in self._runs

    @contextlib.contextmanager
    def viewing(self, run: str) -> Iterator[None]:
        """Keep the scalars of `run` in the context. At its first viewer, all ranks of the run are polled."""
        known = self._runs.setdefault(run, _Run())
        known.viewers += 1
        if known.viewers == 1:
            self._begin(run, known)
            self._on_view(run)
        try:
            yield
        finally:
            known.viewers -= 1
            if not known.viewers:
                self._runs.pop(run, None)

    def _begin(self, run: str, known: _Run) -> None:
        """Add the newest responses of `run`: each scalar from the first step of all its ranks on."""
        for _, body in self._recent:
            if body.context.run == run:
                _add(known, body)
        firsts: dict[tuple[str, str], dict[int, tuple[int, int]]] = defaultdict(dict)
        for key in sorted(known.steps):
            for scalar, values in known.steps[key].scalars.items():
                firsts[scalar] |= {rank: key for rank in values if rank not in firsts[scalar]}
        for key, step in known.steps.items():
            for scalar in [scalar for scalar in step.scalars if key < max(firsts[scalar].values())]:
                del step.scalars[scalar]

    def add(self, body: ValidBody) -> None:
        """Add the scalars of one poll response."""
        if body.nested.get("scalars") is None:
            return
        now = time.monotonic()
        self._recent.append((now, body))
        while now - self._recent[0][0] > self._kept_seconds:
            self._recent.popleft()
        if (run := self._runs.get(body.context.run)) is not None:
            _add(run, body)

    async def changed(self, run: str, seen: int) -> tuple[int, str]:
        """Return the number of the newest change, and the steps since the change `seen` as JSON; wait for a change.

        All steps from the first one that changed are in the answer, so that its reader can replace the end of a curve.
        """
        known = self._runs[run]
        while known.changes <= seen:
            known.event.clear()
            await known.event.wait()
        if known.text[:2] != (seen, known.changes):
            known.text = (seen, known.changes, _text(known, seen))
        return known.changes, known.text[2]


def _add(run: _Run, body: ValidBody) -> None:
    """Add the shown scalars of one poll response, as one change. A response without such scalars is no change."""
    scalars, change = body.nested["scalars"], run.changes + 1
    rank, attempt = body.context.rank, body.context.attempt
    steps, times = body.columns["step"].to_pylist(), body.columns["ts"].view(pa.int64()).to_pylist()
    columns = (scalars.columns[name].to_pylist() for name in ("name", "labels", "value"))
    for name, labels, value, record in zip(*columns, scalars.records.tolist(), strict=True):
        step = steps[record]
        if value is None or step is None or not run.keeps(name, labels or ""):
            continue
        if (at := run.steps.get((attempt, step))) is None:
            at = run.steps[attempt, step] = _Step(time=times[record] / 1e6)
        at.changed = run.changes = change
        at.scalars[name, labels or ""][rank] = value
    kept = min(KEPT_STEPS, max(1, KEPT_VALUES // max(1, len(run.names))))
    for key in sorted(run.steps)[:-kept]:
        del run.steps[key]
    run.event.set()


def _text(run: _Run, seen: int) -> str:
    first = min((key for key, step in run.steps.items() if step.changed > seen), default=(math.inf, 0))
    chosen = sorted(key for key in run.steps if key >= first)
    return json.dumps([[*key, run.steps[key].time, run.steps[key].document()] for key in chosen], allow_nan=False)
