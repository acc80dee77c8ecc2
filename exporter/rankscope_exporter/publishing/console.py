"""What a rank prints: a banner at attach, and one rate-limited line when a rule fires."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from rankscope_contract.model.events import Event, causal_key

MIN_SECONDS_BETWEEN_LINES: Final = 10.0
FREE_LINES: Final = 3
"""The first firings of a run are each worth a line."""


class Console:
    """Lines on a stream, whole and flushed, so that ranks sharing a terminal do not cut into each other."""

    def __init__(
        self,
        rank: int,
        *,
        enabled: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._enabled = enabled
        self._stream = stream
        self._clock = clock
        self._lines = 0
        self._suppressed = 0
        self._last = float("-inf")

    def firing(self, step: int | None, anomalies: Sequence[Event]) -> None:
        """Say that rules fired at `step`, naming the first cause; counts what the rate limit swallowed."""
        now = self._clock()
        if self._lines >= FREE_LINES and now - self._last < MIN_SECONDS_BETWEEN_LINES:
            self._suppressed += 1
            return
        first = min(anomalies, key=lambda event: _order(step, event))
        more = f" (and {len(anomalies) - 1} more at this step)" if len(anomalies) > 1 else ""
        earlier = f" [{self._suppressed} steps with firings not shown]" if self._suppressed else ""
        self.line(f"step {step}, rank {self._rank}: {first.message}{more}{earlier}")
        self._lines, self._suppressed, self._last = self._lines + 1, 0, now

    def line(self, text: str) -> None:
        """Print `text` behind our name, unless the console is off or its stream is gone."""
        if not self._enabled:
            return
        stream = self._stream or sys.stderr
        try:
            stream.write(f"rankscope: {text}\n")
            stream.flush()
        except (OSError, ValueError):  # a closed or broken pipe is the user's, and silence is the answer
            self._enabled = False


def _order(step: int | None, event: Event) -> tuple[float, ...]:
    return causal_key(
        step=step,
        micro_step=event.micro_step,
        kind=event.kind,
        vpp_stage=event.vpp_stage,
        pp_stage=event.pp_stage,
        call_id=event.call_id,
    )


def banner(
    *,
    run: str,
    world_size: int,
    what: str,
    tensors: int,
    elements: int,
    series: int,
    bytes_per_step: int,
    every: int,
    backend: str,
    address: str,
    service: str | None,
) -> list[str]:
    """Return the lines that tell at attach what is monitored, what it costs, where it listens and who reads it."""
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    reader = f"service {service}" if service else "nobody yet: set RANKSCOPE_INGEST_URL, or let Prometheus scrape it"
    cadence = "every step" if every == 1 else f"every {every} steps"
    return [
        f"run {run!r} on {ranks}; {what} of {tensors} tensors ({elements:,} elements) {cadence}, {backend} kernel",
        f"{series:,} series, about {bytes_per_step / 1000:,.0f} kB a step; {address}/metrics, read by {reader}",
    ]
