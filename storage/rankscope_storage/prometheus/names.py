"""Mapping between stored rows and Prometheus series.

The names are those of a rank's `/metrics` page, so that stored and live data have the same series. Columns that
`/metrics` does not show (unit, shard of a tensor, virtual stage) become labels only if they differ from their usual
value. Most series are therefore equal to the live ones. If such a label is absent, the column is null or has its usual
value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rankscope_contract.metrics import catalogue, hardware
from rankscope_contract.metrics.catalogue import SCALARS_WITH_OWN_METRIC, MetricSpec
from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS
from rankscope_contract.model.schema import canonical_labels

JOB: Final = "rankscope"
ATTEMPT: Final = "rankscope_attempt"
"""Metric whose value is the attempt of the run at each time. Only exports have it; live data has rankscope_run_info."""

EXPORT: Final = "rankscope_export"
EXPORT_INFO: Final = f"{EXPORT}_info"
"""Metric that marks exported data: its samples are all rows of the store, not only those that Prometheus scraped."""

NULL: Final = "none"
"""Value of a label for a null in the store.

It is used for labels whose absence means that the column has its usual value."""

VALUE_OPS_SHOWN: Final = (*VALUE_OPS, *COUNT_OPS)
BASELINE_SUFFIX: Final = "_baseline"
BASELINES_SHOWN: Final = tuple(op.removesuffix(BASELINE_SUFFIX) for op in BASELINE_OPS)
PLACEMENT: Final = "full"

# Labels with the names of their columns, in output order. All except `placement` are absent for null.
TENSOR_EXTRAS: Final = ("index", "vpp_stage", "micro_step", "call_seq", "placement", "shard_group")
STAGE_EXTRAS: Final = ("vpp_stage", "micro_step")
_IDENTITY: Final = frozenset({"run", "rank", "job", "instance"})
_OWN_METRIC: Final = {spec.name: (name, spec) for name, spec in SCALARS_WITH_OWN_METRIC.items()}


HARDWARE_SCALARS: Final = frozenset(
    name for name, spec in SCALARS_WITH_OWN_METRIC.items() if spec in vars(hardware).values()
)
"""Names of the scalars that describe device, process and host."""

MONITOR_SCALARS: Final = frozenset(SCALARS_WITH_OWN_METRIC).difference(
    HARDWARE_SCALARS, ("loss", "learning_rate", "grad_norm")
)
"""Names of the other scalars that the monitor adds to those of the training script."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """The columns of `scalars` that identify a scalar: name, unit and labels."""

    name: str
    unit: str | None = None
    labels: str | None = None


def own_metric(scalar: Scalar) -> MetricSpec | None:
    """Return the metric that contains only this scalar, or None if the scalar is a sample of rankscope_scalar."""
    spec = SCALARS_WITH_OWN_METRIC.get(scalar.name)
    if spec is None:
        return None
    labels = text_labels(scalar.labels)
    fits = labels is not None and set(labels) <= _labels_of(spec) and all(labels.values())
    return spec if fits and canonical_labels(labels) == scalar.labels else None


def _labels_of(spec: MetricSpec) -> set[str]:
    """Return the labels of stored series. A page has the largest score of a rule, the store also names its tensor."""
    return {*spec.labels, "tensor"} if spec is catalogue.RULE_SCORE else {*spec.labels}


def scalar_labels(scalar: Scalar, spec: MetricSpec | None) -> dict[str, str]:
    """Return the labels of a scalar's series, without the identity labels such as `run` and `rank`.

    `spec` is the metric of the scalar; None is rankscope_scalar.
    """
    if spec is not None:
        labels = dict(text_labels(scalar.labels) or {})
        usual = spec.unit
    else:
        shown = scalar.name + (scalar.labels or "")
        labels = {"name": shown}
        if _split(shown) != (scalar.name, scalar.labels):
            labels |= {"scalar": scalar.name, **({"labels": scalar.labels} if scalar.labels is not None else {})}
        usual = None
    if scalar.unit != usual:
        labels["unit"] = NULL if scalar.unit is None else scalar.unit
    return labels


def read_scalar(metric: str, labels: Mapping[str, str]) -> Scalar | None:
    """Return the scalar of the series `metric` with `labels`, or None if it is not a series of Rankscope."""
    rest = {name: value for name, value in labels.items() if name not in _IDENTITY and name not in STAGE_EXTRAS}
    unit = rest.pop("unit", None)
    if metric == catalogue.SCALAR.name:
        name, text = _split(rest.pop("name", ""))
        if "scalar" in rest:
            name, text = rest.pop("scalar"), rest.pop("labels", None)
        return None if rest else Scalar(name, unit, text)
    if metric not in _OWN_METRIC:
        return None
    name, spec = _OWN_METRIC[metric]
    if not set(rest) <= _labels_of(spec):
        return None
    unit = spec.unit if unit is None else None if unit == NULL else unit
    return Scalar(name, unit, canonical_labels({key: value for key, value in rest.items() if value}))


def _split(shown: str) -> tuple[str, str | None]:
    """Return the name and the labels, as JSON text, of a scalar in the form `loss{"split":"test"}`."""
    start = shown.find("{")
    text = shown[start:] if start >= 0 else ""
    return (shown[:start], text) if text_labels(text or None) else (shown, None)


def text_labels(text: str | None) -> dict[str, str] | None:
    """Return the labels in a text of the column `labels`; None if the text is not a JSON object of strings."""
    if text is None:
        return {}
    try:
        labels = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        return None
    return labels
