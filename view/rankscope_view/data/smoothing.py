"""Smooth a curve: exponential moving average and moving average.

The moving average equals that of the SQL macro `moving_average`, except that a value that is not finite has none.
The exponential one is corrected for its bias: its weights add up to 1 from the first row on, while the macro `ema`, as
the rules, gives the first value the weight of all values before it. Averages start again with each series, for example
at a restart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Final

import numpy as np

from rankscope_view.data.series import Floats, Integers, restarts

LONGEST_WINDOW: Final = 500
"""Largest number of rows in a window of a moving average. The time of the calculation is proportional to it."""

_SMALLEST_WEIGHT: Final = math.log(1e-24)
"""Natural logarithm of the weight below which `ema_at` leaves values out."""

_TOLERANCE: Final = 1e-15
"""Largest relative error of an average by values that were left out: the last digits of a double."""

_SHARE_READ: Final = 1.5
"""Quotient of all values and those that `ema_at` reads, from which on it takes less time than `ema`."""

_ROWS_AT_ONCE: Final = 256
"""Number of rows whose values are copied together: less than 2 MB with the usual decay, which fits into a cache."""

_LARGEST_EXPONENT: Final = 200.0
"""Natural logarithm of the largest power of the decay in a block: e^200 is within the range of a double."""


def ema(values: Floats, series: Integers, decay: float) -> Floats:
    """Return the exponential moving average of `values`, NaN where a value is not finite.

    `decay` is the weight of the previous average, from 0 to below 1. Rows of a series, which have equal numbers in
    `series`, must be adjacent.
    """
    return _by_series(values, series, lambda finite: _ema(finite, decay))


def ema_at(values: Floats, series: Integers, decay: float, rows: Integers) -> Floats:
    """Return the elements `rows` of `ema`. For few rows, only the values that still have a weight are read."""
    reach = math.ceil(_SMALLEST_WEIGHT / math.log(decay)) if decay > 0 else 1
    is_short = 0 < len(rows) * reach < len(values) / _SHARE_READ and reach < len(values)
    if not is_short or len(restarts(series)) or not np.isfinite(values).all():
        return ema(values, series, decay)[rows]
    found = np.empty(len(rows))
    is_early = rows < reach
    found[is_early] = _ema(values[:reach], decay)[rows[is_early]]
    windows = np.lib.stride_tricks.sliding_window_view(values, reach)
    weights = (1 - decay) * decay ** np.arange(reach - 1, -1, -1)
    late = np.flatnonzero(~is_early)
    for start in range(0, len(late), _ROWS_AT_ONCE):
        own = late[start : start + _ROWS_AT_ONCE]
        found[own] = windows[rows[own] - reach + 1] @ weights
    left_out = max(abs(float(values.min())), abs(float(values.max()))) * decay**reach
    is_exact = bool((left_out <= _TOLERANCE * np.abs(found)).all())  # not so behind a spike of many powers of ten
    return found if is_exact else _ema(values, decay)[rows]


def moving_average(values: Floats, series: Integers, width: int, *, needs_full_window: bool = False) -> Floats:
    """Return the mean of the finite values of each row and the `width` - 1 rows before it, NaN at non-finite values.

    With `needs_full_window`, rows with fewer than `width` finite values have no average. Rows of a series must be
    adjacent, as for `ema`.
    """
    width = min(max(width, 1), LONGEST_WINDOW)
    known = np.isfinite(values)
    sums, counts = np.where(known, values, 0.0), known.astype(np.float64)
    total, count = sums.copy(), counts.copy()
    for back in range(1, min(width, len(values))):  # differences of running sums would lose digits behind a spike
        is_same = series[back:] == series[:-back]
        total[back:] += np.where(is_same, sums[:-back], 0.0)
        count[back:] += np.where(is_same, counts[:-back], 0.0)
    has_average = known & (count == width) if needs_full_window else known
    return np.where(has_average, total / np.maximum(count, 1.0), np.nan)


def _by_series(values: Floats, series: Integers, smooth: Callable[[Floats], Floats]) -> Floats:
    """Return `smooth` of the finite values of each series, at the rows of these values, and NaN in all other rows."""
    known = np.isfinite(values)
    begins = [0, *restarts(series).tolist()]
    if len(begins) == 1 and known.all():
        return smooth(values)
    result = np.full(len(values), np.nan)
    for first, last in itertools.pairwise([*begins, len(values)]):
        finite = first + np.flatnonzero(known[first:last])
        result[finite] = smooth(values[finite])
    return result


def _ema(values: Floats, decay: float) -> Floats:
    """Return the average of finite `values`; in a block, it is a power of `decay` times a sum of y / decay^i.

    It begins at 0, and is divided by the sum of the weights, 1 - decay^n of n values.
    """
    if decay <= 0:
        return values
    block = max(1, int(_LARGEST_EXPONENT / max(-math.log(decay), 1e-13)))
    result = np.empty(len(values))
    previous = 0.0
    powers = decay ** np.arange(1, min(block, len(values)) + 1)
    weights = (1 - decay) / powers
    for start in range(0, len(values), block):  # without arrays of the length of `values`, whose memory costs more
        part = values[start : start + block]
        own = result[start : start + block]
        np.multiply(part, weights[: len(part)], out=own)
        np.cumsum(own, out=own)
        own += previous
        own *= powers[: len(part)]
        previous = own[-1]
        own /= 1.0 - decay**start * powers[: len(part)]
    return result
