"""One completed step of one rank on the host: the interface between training and serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import Plan, canonical_labels


@dataclass(frozen=True, slots=True)
class Scalar:
    """One logged number. `value` may be NaN or Inf. A scalar that was not logged is absent."""

    name: str
    value: float
    unit: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels_text(self) -> str | None:
        """Return the labels as text of the `labels` column."""
        return canonical_labels(dict(self.labels))


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan with its hash and JSON text, computed once per plan and not per step."""

    plan: Plan
    hash: str
    json: str

    @classmethod
    def of(cls, plan: Plan) -> NamedPlan:
        """Return `plan` with its canonical text and hash."""
        return cls(plan, plan.hash, plan.to_json())


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one step for every entry of a plan with T entries.

    `values` is float32 [len(plan.value_ops) * T], all entries for the first op, then for the second; null: no value.
    `counts` is int64 [len(plan.count_ops) * T]; an entry whose counts are null was absent at this step.
    """

    plan: NamedPlan
    values: pa.FloatArray
    counts: pa.Int64Array
    ops: Sequence[frozenset[str]] | None = None
    """For each entry of the plan (or more), the statistics that are published; None if all are."""
    measured: pa.Int64Array | None = None
    """Counts including those that are not published; None if `ops` is None.

    A norm without its NaN count would look healthy.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """All data of one step, or of a moment between steps, of one rank. The ring assigns its `seq`."""

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
