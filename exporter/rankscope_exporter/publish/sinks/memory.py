"""Sink that stores the rows of the last measured steps in memory, for code in the training process.

The rows have the same values as those that the service receives for its store. They are available after the step is
published: while training is at step n, the newest rows are usually those of step n - 1.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from rankscope_contract.model.identity import Identity
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.process.validation import between, validate
from rankscope_exporter.publish.sinks import Sink
from rankscope_exporter.records.record import Statistics, StepRecord

T = TypeVar("T")

MOST_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """Settings of the sink `api`."""

    steps: Annotated[int, between(1, MOST_STEPS, "a number")] = 8
    """Number of measured steps that the sink stores. Each step takes 56 bytes per tensor."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class Row:
    """The statistics of one tensor at one step.

    `numbers` contains the statistics by name; an unknown statistic is None.
    """

    step: int
    entry: PlanEntry
    numbers: Mapping[str, float | int | None]


class Api(Sink):
    """The sink `api`, which stores the latest records of one rank. Thread-safe.

    A feature is a number that is not a tensor statistic, such as the entropy of attention.
    """

    name = "api"
    options_class = ApiOptions

    def __init__(self, options: ApiOptions, identity: Identity) -> None:  # noqa: ARG002 - each rank has its own rows
        self._records: collections.deque[StepRecord] = collections.deque(maxlen=options.steps)
        # No lock: `append` and `copy` of a deque are atomic.

    def put(self, record: StepRecord) -> None:
        if record.step is not None and (record.statistics is not None or record.features):
            self._records.append(record)

    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the stored steps, oldest first."""
        return tuple(record.step for record in self._records.copy() if record.step is not None)

    def rows(self, *kinds: str, step: int | None = None) -> tuple[Row, ...]:
        """Return the statistics of `kinds` (default: all) at `step` (default: the last step with such statistics)."""
        return self._latest(step, lambda record: rows_of(record, kinds))

    def features(self, *kinds: str, step: int | None = None) -> tuple[Mapping[str, Any], ...]:
        """Return features, selected as by `rows`, each with its `kind`, `module`, `index` and `value`."""
        return self._latest(
            step, lambda record: (dict(row) for row in record.features if not kinds or row["kind"] in kinds)
        )

    def _latest(self, step: int | None, select: Callable[[StepRecord], Iterable[T]]) -> tuple[T, ...]:
        for record in reversed(self._records.copy()):
            if (step is None or record.step == step) and (found := tuple(select(record))):
                return found
        return ()


def rows_of(record: StepRecord, kinds: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yield the statistics of the given kinds in a record, one row per tensor. By default all kinds are returned."""
    statistics = record.statistics
    if statistics is None or record.step is None:
        return
    for position, entry in enumerate(statistics.plan.plan.entries):
        if not kinds or entry.kind in kinds:
            numbers = _numbers(statistics, position)
            if numbers is not None:
                yield Row(record.step, entry, numbers)


def _numbers(statistics: Statistics, position: int) -> dict[str, float | int | None] | None:
    """Return the statistics of the plan entry at `position`, by name; None if its tensor did not exist at this step."""
    plan = statistics.plan.plan
    size = len(plan.entries)
    counts = {op: statistics.counts[place * size + position].as_py() for place, op in enumerate(plan.count_ops)}
    if counts["numel"] is None:
        return None
    values = {op: statistics.values[place * size + position].as_py() for place, op in enumerate(plan.value_ops)}
    return {**values, **counts}
