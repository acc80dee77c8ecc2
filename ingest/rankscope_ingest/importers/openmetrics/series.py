"""What a series is in the store: a sample of another exporter, or a column of ours. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract import metrics
from rankscope_contract.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.records import canonical_labels
from rankscope_ingest.importers.openmetrics.lines import Series
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.names import NULL, PLACEMENT

SCALAR: Final = "scalar"
TENSOR: Final = "tensor"
STEP: Final = "step"
KIND_STEP: Final = "kind_step"
ATTEMPT: Final = "attempt"
OWN: Final = "own"
SAMPLE: Final = "sample"

_TENSOR_LABELS: Final = frozenset({"kind", "tensor", "op", "run", "rank", "job", "instance", *names.TENSOR_EXTRAS})
_INT32: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Where the values of a series go. The fields are columns of the datasets; `role` says of which."""

    role: str
    run: str | None = None
    rank: int | None = None
    metric: str = ""
    target: str = ""
    labels: str | None = None
    name: str | None = None
    unit: str | None = None
    kind: str | None = None
    tensor: str | None = None
    op: str | None = None
    index: int | None = None
    vpp_stage: int | None = None
    micro_step: int | None = None
    call_seq: int | None = None
    placement: str | None = None
    shard_group: str | None = None


def meaning(series: Series) -> Meaning:
    """Return what `series` is; one of ours that is not as we write it stays a sample."""
    if series.metric.startswith("rankscope_") and "run" in series.labels:
        try:
            found = _ours(series)
        except ValueError:
            found = None
        if found is not None:
            return found
    return sample(series)


def sample(series: Series) -> Meaning:
    """Return `series` as what any exporter may have said."""
    rest = {name: value for name, value in series.labels.items() if name != "instance"}
    return Meaning(
        role=SAMPLE,
        metric=series.metric,
        target=series.labels.get("instance", ""),
        labels=canonical_labels(rest),
        run=series.labels.get("run") if series.metric.startswith("rankscope_") else None,
    )


def _ours(series: Series) -> Meaning | None:
    labels = series.labels
    who: dict[str, Any] = {"run": labels["run"], "rank": _whole(labels, "rank", lowest=0)}
    roles = {metrics.STEP.name: STEP, names.ATTEMPT: ATTEMPT, names.EXPORT_INFO: OWN}
    if series.metric in roles:
        return Meaning(role=roles[series.metric], **who)
    if series.metric == metrics.KIND_STEP.name:
        return Meaning(role=KIND_STEP, kind=labels.get("kind"), **who)
    if series.metric in {metrics.TENSOR_VALUE.name, metrics.TENSOR_BASELINE.name}:
        return _tensor(series, who)
    scalar = names.read_scalar(series.metric, labels)
    if scalar is None:
        return None
    stages: dict[str, Any] = {name: _whole(labels, name) for name in names.STAGE_EXTRAS}
    return Meaning(role=SCALAR, name=scalar.name, unit=scalar.unit, labels=scalar.labels, **who, **stages)


def _tensor(series: Series, who: dict[str, Any]) -> Meaning | None:
    labels = series.labels
    baseline = series.metric == metrics.TENSOR_BASELINE.name
    op = labels.get("op", "") + (names.BASELINE_SUFFIX if baseline else "")
    known = {op + names.BASELINE_SUFFIX for op in names.BASELINES_SHOWN} if baseline else {*VALUE_OPS, *COUNT_OPS}
    if op not in known or not {"kind", "tensor"} <= set(labels) or not set(labels) <= _TENSOR_LABELS:
        return None
    placement = labels.get("placement", PLACEMENT)
    numbers: dict[str, Any] = {name: _whole(labels, name) for name in ("index", "vpp_stage", "micro_step")}
    return Meaning(
        role=TENSOR,
        kind=labels["kind"],
        tensor=labels["tensor"],
        op=op,
        placement=None if placement == NULL else placement,
        shard_group=labels.get("shard_group"),
        call_seq=_whole(labels, "call_seq", bound=1 << 63),
        **numbers,
        **who,
    )


def _whole(labels: dict[str, str], name: str, *, lowest: int = -_INT32, bound: int = _INT32) -> int | None:
    """Return a label that is a whole number; raises ValueError for one that is none."""
    text = labels.get(name)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20 else bound
    if not lowest <= number < bound or str(number) != text:
        raise ValueError(f"{name}={text!r}")
    return number
