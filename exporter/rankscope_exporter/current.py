"""The statistics of the step under way, for code in the training process that asks for them; else of the last step.

Asking waits for the device, which nothing else here does: it is the price of a number now rather than one step later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rankscope_contract.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.records import PlanEntry
from rankscope_exporter.publisher import Publisher
from rankscope_exporter.recorder import Recorder
from rankscope_exporter.serving.ring import Ring
from rankscope_exporter.sinks.api import Row, rows_of
from rankscope_exporter.statistics import Finished

CATCH_UP_SECONDS: Final = 1.0
"""How long is waited for the publisher to have read the last step: milliseconds, unless the machine is overloaded."""


def current_rows(recorder: Recorder, publisher: Publisher, ring: Ring, kinds: tuple[str, ...]) -> tuple[Row, ...]:
    """Return the rows of `kinds` (all without any) that the step under way has so far, else those of the last one."""
    under_way = recorder.look()
    rows = () if under_way is None else tuple(_rows(*under_way, kinds))
    if not rows:
        publisher.catch_up(CATCH_UP_SECONDS)
    return rows or _published(ring, kinds)


def _rows(step: int, entries: Sequence[PlanEntry], finished: Finished, kinds: tuple[str, ...]) -> Iterator[Row]:
    values, counts = finished.values.tolist(), finished.counts.tolist()
    for position, present in enumerate(finished.present.tolist()):
        entry = entries[position]
        if present and (not kinds or entry.kind in kinds):
            told = {op: _known(row[position]) for op, row in zip(VALUE_OPS, values, strict=True)}
            yield Row(step, entry, told | {op: row[position] for op, row in zip(COUNT_OPS, counts, strict=True)})


def _published(ring: Ring, kinds: tuple[str, ...]) -> tuple[Row, ...]:
    for record in reversed(ring.after(-1, 1 << 62).records):
        rows = tuple(rows_of(record, kinds))
        if rows:
            return rows
    return ()


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
