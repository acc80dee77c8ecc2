"""One step of one rank, finished and on the host: what the training side hands to the serving side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import Plan, canonical_labels


@dataclass(frozen=True, slots=True)
class Scalar:
    """One logged number. `value` may be NaN or Inf; a scalar that was not logged is absent."""

    name: str
    value: float
    unit: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels_text(self) -> str | None:
        """Return the labels as they stand in the `labels` column."""
        return canonical_labels(dict(self.labels))


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan with its hash, computed once when the plan is made rather than at every step."""

    plan: Plan
    hash: str
    json: str

    @classmethod
    def of(cls, plan: Plan) -> NamedPlan:
        """Return `plan` with its canonical text and hash."""
        return cls(plan, plan.hash, plan.to_json())


@dataclass(frozen=True, slots=True)
class Statistics:
    """The numbers of one step for every entry of a plan.

    `values` is float32 of length len(WIRE_VALUE_OPS) * T, statistic-major, null where a statistic does not exist.
    `counts` is int64 of length len(WIRE_COUNT_OPS) * T; an entry whose counts are null was absent at this step.
    """

    plan: NamedPlan
    values: pa.FloatArray
    counts: pa.Int64Array
    ops: Sequence[frozenset[str]] | None = None
    """By entry, the statistics that leave the rank, at least as many as the plan has; None where all do."""
    measured: pa.Int64Array | None = None
    """The counts with those that do not leave the rank, beside `ops`: a norm without its NaN would look sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Everything one rank says about one step (or about a moment between steps). The ring gives it its `seq`."""

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
