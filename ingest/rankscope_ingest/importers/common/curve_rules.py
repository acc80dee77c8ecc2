"""Evaluates the curve rules for all rows of a table together: spikes of the loss, steps that become slow, and others.

The rules and the evaluation of single values, which ranks use, are in `rankscope_contract.rules.curve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType
from rankscope_contract.rules.curve import Curve, CurveRule

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_SERIES: Final = ("rank", "attempt", "name", "labels")
_PAUSES: Final = (EventType.EVALUATION.value, EventType.CHECKPOINT.value)


@dataclass(frozen=True, slots=True)
class CurveFiring:
    """Firings of one rule: row numbers of the table, and the median before each of these rows."""

    rule: CurveRule
    rows: Integers
    medians: Numbers


@dataclass(slots=True)
class _Curve(Curve):
    seq: int = -1

    def firings(self, rule: CurveRule, values: Numbers, seqs: Integers, pauses: Integers) -> tuple[Integers, Numbers]:
        """Return the positions in `values` at which `rule` fires, and the medians before them; then add the values."""
        previous = np.append(self.seq, seqs[:-1])
        single = len(values) if rule.above == "highest" else max(0, rule.rows - len(self.values))
        found = [self.compared(rule, value) for value in values[:single].tolist()]
        medians = np.full(len(values), np.nan)
        medians[: len(found)] = np.array(found, np.float64)  # None becomes NaN
        judged = values[single:]
        if len(judged):
            history = np.concatenate([self.values, judged])
            windows = np.lib.stride_tricks.sliding_window_view(history[:-1], rule.rows)
            # The median is not below the lowest value: few rows need a median.
            for row in np.flatnonzero(judged >= rule.ratio * windows.min(axis=1)).tolist():
                median = rule.compare(float(judged[row]), windows[row].tolist())
                medians[single + row] = np.nan if median is None else median
            self.values, self.count = history[-rule.rows :].tolist(), self.count + len(judged)
        is_above = np.isfinite(medians)
        if rule.skips_pauses:
            is_above &= np.searchsorted(pauses, previous, "right") == np.searchsorted(pauses, seqs, "right")
        runs = _run_lengths(is_above, self.above)
        self.above, self.seq = int(runs[-1]), int(seqs[-1])
        fired = np.flatnonzero(runs == rule.in_a_row)
        return self._hold(rule, values, fired, medians) if rule.holds else (fired, medians[fired])

    def _hold(self, rule: CurveRule, values: Numbers, fired: Integers, medians: Numbers) -> tuple[Integers, Numbers]:
        """Return all positions up to the return of the values after each firing, and the medians before them."""
        held, end = np.full(len(values), np.nan), 0
        for row, median in [(0, self.held), *((row, float(medians[row])) for row in fired.tolist())]:
            if row >= end and values[row] >= rule.ratio * median:
                below = np.flatnonzero(values[row:] < rule.ratio * median)
                end = row + int(below[0]) if len(below) else len(values)
                held[row:end] = median
        self.held = float(held[-1])
        rows = np.flatnonzero(np.isfinite(held))
        return rows, held[rows]


class CurveEvaluator:
    """Applies the curve rules to the scalars of one import. Tables must be evaluated in the order of the log."""

    def __init__(self, rules: tuple[CurveRule, ...]) -> None:
        self._rules = rules
        self._curves: dict[tuple[Any, ...], _Curve] = {}
        self._last_pauses: dict[str, Integers] = {}

    def evaluate(self, tables: Mapping[str, pa.Table]) -> list[CurveFiring]:
        """Return the firings for the rows of the table `scalars`."""
        scalars = tables["scalars"]
        names = scalars.column("name").cast(pa.string())
        pauses, is_finite = self._pauses(tables, names), pc.is_finite(scalars.column("value"))
        present, found = set(names.unique().to_pylist()), []
        for rule in self._rules:
            judged = present.intersection((*rule.names, *rule.rates))
            if not judged:  # most logs lack the scalars of some rules
                continue
            is_judged = pc.is_in(names, pa.array(judged))
            rows = np.flatnonzero(pc.and_(is_judged, pc.fill_null(is_finite, fill_value=False)).to_numpy())
            fired, medians = [np.empty(0, np.int64)], [np.empty(0)]
            for key, positions in _series(scalars.select([*_SERIES]).take(rows)):
                own = rows[positions]
                is_rate = key[_SERIES.index("name")] in rule.rates
                values = scalars.column("value").take(own).to_numpy()
                if is_rate:
                    own, values = own[values > 0], 1 / values[values > 0]
                if not len(own):
                    continue
                curve = self._curves.setdefault((rule.name, *key), _Curve())
                at, middle = curve.firings(rule, values, scalars.column("seq").take(own).to_numpy(), pauses)
                fired.append(own[at])
                medians.append(1 / middle if is_rate else middle)
            found.append(CurveFiring(rule, np.concatenate(fired), np.concatenate(medians)))
        return [firing for firing in found if len(firing.rows)]

    def _pauses(self, tables: Mapping[str, pa.Table], names: pa.ChunkedArray) -> Integers:
        """Return the sorted record numbers of evaluations and checkpoints in `tables` and in the previous tables."""
        scalars = tables["scalars"]
        incarnation = str(scalars.column("incarnation")[0])
        found = [scalars.column("seq").filter(pc.starts_with(names, "eval_")).to_numpy()]
        if "events" in tables:
            events = tables["events"]
            is_pause = pc.is_in(events.column("type").cast(pa.string()), pa.array(_PAUSES))
            found.append(events.column("seq").filter(is_pause).to_numpy())
        before = self._last_pauses.get(incarnation, np.empty(0, np.int64))
        pauses = np.unique(np.concatenate([before, *found]))
        self._last_pauses[incarnation] = pauses[-1:]
        return pauses


def _run_lengths(flags: Flags, before: int) -> Integers:
    """Return, for each flag, the number of consecutive true flags that end with it; `before` of them come first."""
    places = np.arange(1, len(flags) + 1)
    last_false = np.maximum.accumulate(np.where(flags, 0, places))
    return np.where(flags, places - last_false + np.where(last_false == 0, before, 0), 0)


def _series(keys: pa.Table) -> list[tuple[tuple[Any, ...], Integers]]:
    """Return each different row of `keys` with the positions of this row, ascending."""
    if not keys.num_rows:
        return []
    numbered = np.zeros(keys.num_rows, np.int64)
    for column in keys.columns:
        text = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        codes = text.combine_chunks().dictionary_encode(null_encoding="encode")
        if len(codes.dictionary) > 1:
            _, numbered = np.unique(numbered * len(codes.dictionary) + codes.indices.to_numpy(), return_inverse=True)
    _, firsts, inverse = np.unique(numbered, return_index=True, return_inverse=True)
    return [
        (tuple(keys.slice(int(first), 1).to_pylist()[0].values()), np.flatnonzero(inverse == place))
        for place, first in enumerate(firsts)
    ]
