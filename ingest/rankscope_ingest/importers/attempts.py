"""Restarts, told from the steps alone: a stream whose step does not increase has been started again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class AttemptCounter:
    """Counts restarts per stream, so that interleaved ranks never look like one.

    `attempts` takes many rows at once, in the order of the log; what it remembers between calls is the last row of each
    stream. A row that repeats the step before it with the very same `signature` was printed twice, not run twice.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float, int]] = {}  # step, signature, attempt

    def attempts(self, streams: Integers, steps: Integers, signatures: npt.NDArray[np.float64]) -> Integers:
        """Return the attempt, from 0, of each row. A NaN signature equals no other."""
        found = np.zeros(len(steps), np.int64)
        for stream in np.unique(streams):
            chosen = np.flatnonzero(streams == stream)
            found[chosen] = self._of_stream(int(stream), steps[chosen], signatures[chosen])
        return found

    def _of_stream(self, stream: int, steps: Integers, signatures: npt.NDArray[np.float64]) -> Integers:
        known = self._last.get(stream)
        before = (steps[0] - 1, np.nan, 0) if known is None else known
        previous = np.concatenate([[before[0]], steps[:-1]])
        same = signatures == np.concatenate([[before[1]], signatures[:-1]])
        again = (steps < previous) | ((steps == previous) & ~same)
        found: Integers = np.cumsum(again) + before[2]
        self._last[stream] = (int(steps[-1]), float(signatures[-1]), int(found[-1]))
        return found
