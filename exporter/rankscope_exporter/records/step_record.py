"""One completed step of one rank on the host: the interface between training and serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import Plan, canonical_labels, plan_hash


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number that the script or the monitor has logged. `value` may be NaN or Inf.

    A scalar that was not logged has no object.
    """

    name: str
    value: float
    unit: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels_text(self) -> str | None:
        """Return the labels of this scalar as the text that the column `labels` of the dataset `scalars` contains."""
        return _labels_text(tuple(self.labels.items()))


@lru_cache(maxsize=1024)
def _labels_text(labels: tuple[tuple[str, str], ...]) -> str | None:
    return canonical_labels(dict(labels))  # a record has about ten labels, and the next record has the same ones


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan, the ordered list of entries to which the numbers of a record refer, with its hash and JSON text.

    Hash and text are computed once per plan and not per step.
    """

    plan: Plan
    hash: str
    json: str

    @classmethod
    def of(cls, plan: Plan) -> NamedPlan:
        """Create an object for `plan`, and compute the hash and the canonical JSON text of the plan."""
        text = plan.to_json()
        return cls(plan, plan_hash(text), text)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one step for the T entries of a plan, of which each describes one measured tensor.

    `values` is a float32 array with len(plan.value_ops) * T elements: first the values of all entries for the first op,
    then for the second, and so on. A null is a missing value. `counts` is an int64 array with len(plan.count_ops) * T
    elements in the same order. An entry whose counts are null was absent at this step.
    """

    plan: NamedPlan
    values: pa.FloatArray
    counts: pa.Int64Array
    ops: Sequence[frozenset[str]] | None = None
    """Names of the statistics that are published, for each entry of the plan; None if all are published.

    The sequence may be longer than the plan; further elements are ignored.
    """
    measured: pa.Int64Array | None = None
    """Counts of all count ops, such as the number of NaN values, including those that are not published.

    None if all statistics are published (`ops` is None). Rules need the number of NaN values, because a norm does not
    show them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """All data of one step of one rank, or of a point in time between steps. The ring assigns the sequence number."""

    ts: int  # UTC microseconds
    step: int | None = None
    micro_step: int | None = None
    statistics: Statistics | None = None
    scalars: tuple[Scalar, ...] = ()
    events: tuple[Event, ...] = ()
    features: tuple[Mapping[str, Any], ...] = ()
    histograms: tuple[Mapping[str, Any], ...] = ()
    hashes: tuple[Mapping[str, Any], ...] = ()
    collectives: tuple[Mapping[str, Any], ...] = ()
    modules: tuple[Mapping[str, Any], ...] = ()
    firing: frozenset[tuple[str, str]] = frozenset()  # (rule, kind) pairs that fire at this step
    monotonic: int | None = None  # microseconds of a clock that is never set, at the time `ts`; None if not read
    clock_offset: int = 0  # microseconds by which the wall clock was set forward since the process began
