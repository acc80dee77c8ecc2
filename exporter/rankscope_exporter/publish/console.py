"""The lines that a rank prints: a banner at attach, and rate-limited lines when rules are firing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from rankscope_contract.model.events import Event
from rankscope_contract.model.redaction import MAX_LABEL, redacted_text
from rankscope_exporter.process.report_child import command_line, installation
from rankscope_exporter.records.record import StepObserver

MIN_SECONDS_BETWEEN_LINES: Final = 10.0
FREE_LINES: Final = 3
"""The number of messages about firings that a rank prints without a rate limit."""


class Console(StepObserver):
    """Writes whole lines to a stream and flushes each, so that ranks with the same terminal do not mix their lines.

    A record with firings has a line with the first of them in causal order. The first firing of each rule and severity
    has a line of its own. If the rate limit does not allow a line about others, they are counted and not printed.
    """

    def __init__(
        self, rank: int, *, enabled: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._enabled = enabled
        self._stream = stream
        self._clock = clock
        self._lines = 0
        self._suppressed = 0  # steps with firings that were not printed since the last line
        self._held: dict[str | None, int] = {}  # firings of these steps by rule
        self._held_step: int | None = None
        self._seen: set[tuple[str | None, str]] = set()  # rules and severities of all firings so far
        self._last = float("-inf")

    def on_anomalies(self, step: int | None, anomalies: Sequence[Event]) -> None:
        new = [first for key, first in _first_of_each(anomalies).items() if key not in self._seen]
        self._seen |= _first_of_each(anomalies).keys()
        now = self._clock()
        if not new and self._lines >= FREE_LINES and now - self._last < MIN_SECONDS_BETWEEN_LINES:
            self._suppressed += 1
            for event in anomalies:
                self._held[event.rule] = self._held.get(event.rule, 0) + 1
            self._held_step = step
            return
        shown = new or anomalies[:1]
        more = f" (and {len(anomalies) - len(shown)} more at this step)" if len(anomalies) > len(shown) else ""
        plural = "" if self._suppressed == 1 else "s"
        earlier = f" [{self._suppressed} step{plural} with firings not shown]" if self._suppressed else ""
        for event in shown:
            note = f"{more}{earlier}" if event is shown[0] else ""
            self.line(f"step {step}, rank {self._rank}: {event.message}{note}")
        self._lines, self._suppressed, self._last = self._lines + 1, 0, now
        self._held.clear()

    def finish(self) -> None:
        """Print the number of firings of each rule that the rate limit has held back since the last line."""
        if self._suppressed:
            rules = ", ".join(f"{count:,} of {rule}" for rule, count in self._held.items())
            steps = f"{self._suppressed:,} more step{'' if self._suppressed == 1 else 's'}"
            self.line(f"rank {self._rank}: firings at {steps}, the last is step {self._held_step}: {rules}")
            self._suppressed = 0

    def line(self, text: str) -> None:
        """Print `text` with the prefix "rankscope:".

        Print nothing if the console is disabled or its stream is closed.
        """
        if not self._enabled:
            return
        stream = self._stream or sys.stderr
        if stream is None:  # the process was started with standard error closed
            return
        try:
            stream.write(f"rankscope: {redacted_text(text, MAX_LABEL)}\n")
            stream.flush()
        except (OSError, ValueError):  # the user has closed the stream or the pipe: print nothing more
            self._enabled = False


def _first_of_each(events: Sequence[Event]) -> dict[tuple[str | None, str], Event]:
    return {(event.rule, event.severity): event for event in reversed(events)}


def records_note(root: str, records: int) -> list[str]:
    """Return the lines that name the folder `root` of spools, with the `records` uncommitted records of a rank.

    They also name the commands that read the records, and the command that imports them into a store. If this
    environment lacks libraries of these commands, the command that installs them comes first.
    """
    read, store = command_line("summary", "--store", root), command_line("import", root, "--store", "history")
    first = f"first {need}, then " if (need := installation()) else ""
    return [
        f"no service has stored the last {records:,} records of this rank; they are in {root}",
        f"to read them: {first}{read}; to store them: {store}",
    ]
