"""The recent rows of a log: steps, times and values, and the checkpoints, evaluations and errors between them."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType
from rankscope_ingest.importers.common.decisions import TRAINING_NAMES

KEPT_ROWS: Final = 5_000
"""Number of rows of the latest attempt over which the median of the step time is calculated."""
GAPS: Final = 50
"""Number of times between rows over which the expected time between two rows is calculated."""

_COARSE_SECONDS: Final = 2.0
_MOST_ERRORS: Final = 20

SCALARS: Final = ("incarnation", "seq", "attempt", "rank", "step", "ts", "name", "value")
EVENTS: Final = ("incarnation", "seq", "attempt", "rank", "step", "type", "severity", "op", "message", "details")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One row of training in a log."""

    seq: int
    attempt: int
    rank: int | None
    step: int | None
    written: float | None
    """Time in the row in seconds since 1970, as if it were UTC; None if the row has no time."""
    values: Mapping[str, float]
    gap: float | None = None
    """Seconds since the row of the previous step; None for the first row."""
    is_after_phase: bool = False
    """True if a checkpoint or an evaluation is between the previous row and this one."""

    @property
    def step_seconds(self) -> float | None:
        """Return the duration of one step: the value in the row, or the time since the row of the previous step."""
        return self.values.get("step_seconds", self.gap)


@dataclass(slots=True)
class _Phase:
    """The checkpoints or the evaluations of an attempt."""

    steps: list[int] = field(default_factory=list)
    is_open: bool = False
    """True if the phase began after the last row."""

    def is_due(self, step: int | None) -> bool:
        """Return whether the next phase is due after `step`, according to the steps of the last two phases."""
        if step is None or len(self.steps) < 2:
            return False
        return step >= 2 * self.steps[-1] - self.steps[-2]

    def note(self, step: int | None, *, is_open: bool) -> None:
        self.is_open = is_open
        if step is not None and self.steps[-1:] != [step]:
            self.steps = [*self.steps[-1:], step]


class LogRows:
    """The rows of the latest attempt in a log."""

    def __init__(self) -> None:
        self._incarnation: str | None = None
        self._last_seq = -1
        self.attempt = 0
        self.last_steps: dict[int, int] = {}  # by attempt
        self.arrived_at: float | None = None
        """Time at which the last row was in the log at the latest, by the clock of the machine of the log."""
        self._begin()

    def _begin(self) -> None:
        self.rows: deque[LogRow] = deque(maxlen=KEPT_ROWS)
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._phases = {EventType.CHECKPOINT: _Phase(), EventType.EVALUATION: _Phase()}
        self._after_phase = False
        self.errors: dict[str, list[str]] = {}
        """For each class of errors since the last row, the messages, each with the rank that printed it."""

    def last_seq(self, incarnation: str) -> int:
        """Return the number of the last record of `incarnation` that was added; -1 if there is none."""
        return self._last_seq if incarnation == self._incarnation else -1

    @property
    def last(self) -> LogRow | None:
        """Return the last row of the attempt."""
        return self.rows[-1] if self.rows else None

    def add(self, scalars: pa.Table, events: pa.Table, modified: float | None) -> int:
        """Add the records that are behind the last one, and return the number of new rows.

        `modified` is the time of the last change of the log; it is None for records that were stored earlier.
        """
        items: dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
        for place, table in enumerate((scalars, events)):
            for row in table.to_pylist():
                items.setdefault(row["seq"], ([], []))[place].append(row)
                self._incarnation = row["incarnation"]
        before, attempt = None if self.last is None else self.arrived_at, self.attempt
        added = sum(self._record(*items[seq]) for seq in sorted(items))
        self._last_seq = max(items, default=self._last_seq)
        if added and modified is not None:
            if before is not None and attempt == self.attempt and self.rows[-1].gap is None:
                self._gaps.append(max(0.0, modified - before) / added)
            self.arrived_at = modified
        return added

    def _record(self, scalars: list[dict[str, Any]], events: list[dict[str, Any]]) -> int:
        """Add one record; return 1 if it is a row of training, else 0.

        The first row has a quantity of a training. Then a record of a further step is a row, too: its loss may be
        missing. Other records are timers and evaluations.
        """
        first = (scalars or events)[0]
        attempt = first["attempt"] or 0
        if attempt < self.attempt:
            return 0  # of another writer of the log
        if attempt > self.attempt:
            self.attempt = attempt
            self._begin()
        for event in events:
            self._event(event)
        values = {row["name"]: row["value"] for row in scalars}
        is_ahead = self.last is not None and (first["step"] or 0) > (self.last.step or 0)
        if not values.keys() & TRAINING_NAMES and not (
            is_ahead and any(not name.startswith("eval") for name in values)
        ):
            return 0
        self._row(first, values)
        return 1

    def _row(self, first: Mapping[str, Any], values: Mapping[str, float]) -> None:
        last, written = self.last, None if first["ts"] is None else first["ts"].timestamp()
        gap = None
        if last is not None and first["step"] != last.step:
            steps = max(1, (first["step"] or 0) - (last.step or 0))
            # The times of many logs have no fraction of a second.
            known = [values["step_seconds"]] if "step_seconds" in values else []
            if written is not None and last.written is not None:
                known.append((written - last.written) / steps)
            if known:
                gap = max(0.0, *known)
                self._gaps.append(gap * steps)
        self.rows.append(
            LogRow(
                seq=first["seq"],
                attempt=first["attempt"] or 0,
                rank=first["rank"],
                step=first["step"],
                written=written,
                values=values,
                gap=gap,
                is_after_phase=self._after_phase,
            )
        )
        self._after_phase = False
        if first["step"] is not None:
            self.last_steps[self.attempt] = first["step"]
        self.errors.clear()
        for phase in self._phases.values():
            phase.is_open = False

    def _event(self, event: Mapping[str, Any]) -> None:
        if event["type"] == EventType.ERROR:
            listed = self.errors.setdefault(event["op"] or "error", [])
            if len(listed) < _MOST_ERRORS:
                rank = "" if event["rank"] is None else f"rank {event['rank']}: "
                listed.append(f"{rank}{event['message'] or ''}")
        phase = self._phases.get(event["type"])
        if phase is None:
            return
        try:
            action = json.loads(event["details"] or "{}").get("action")
        except (ValueError, AttributeError):
            action = None
        self._after_phase = True
        phase.note(event["step"], is_open=action not in {"saved", "loaded"})

    @property
    def phase(self) -> str | None:
        """Return the phase that the training may be in: first step, checkpoint or evaluation; None for training."""
        if len(self.rows) < 2:
            return "first step"
        step = self.rows[-1].step
        return next((name.value for name, phase in self._phases.items() if phase.is_open or phase.is_due(step)), None)

    @property
    def expected_seconds(self) -> float | None:
        """Return the expected time between two rows: the median of the last times; None if there is none.

        If times of whole seconds are too coarse for a median, the result is their mean.
        """
        median = statistics.median(self._gaps) if self._gaps else None
        times = [row.written for row in list(self.rows)[-GAPS:] if row.written is not None]
        is_coarse = median is not None and median <= _COARSE_SECONDS and all(time.is_integer() for time in times)
        return (times[-1] - times[0]) / (len(times) - 1) if is_coarse and times[-1:] > times[:1] else median

    def step_times(self, warm_up_rows: int) -> list[float]:
        """Return the step times of the attempt without its first rows and without rows after a checkpoint or the like.

        The first rows are known only if the attempt has at most KEPT_ROWS rows.
        """
        rows = list(self.rows)[warm_up_rows if len(self.rows) < KEPT_ROWS else 0 :]
        return [row.step_seconds for row in rows if row.step_seconds is not None and not row.is_after_phase]
