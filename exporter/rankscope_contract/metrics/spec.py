"""The description of one metric: name, type, unit, labels, and the column of the store that holds its history."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from rankscope_contract.model.identity import IDENTITY_LABELS

MetricType = Literal["gauge", "counter"]
_UNITS: Final = ("bytes", "seconds", "joules", "watts", "celsius", "hertz")
"""Units that Prometheus requires as the last word of a metric's name, before `_total`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric family.

    `labels` does not contain the identity labels that every series of a rank has. `stored_as` is the column of the
    store with the history of the metric: `dataset.column`, or `scalars:<name>` for rows of `scalars`. It is None if the
    history is not stored.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    unit: str | None = None
    stored_as: str | None = None
    page: Literal["rank", "service"] = "rank"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Return the names of all labels of a sample. For a metric of a rank, the identity labels come first."""
        return (*IDENTITY_LABELS, *self.labels) if self.page == "rank" else self.labels


def metric(
    type: MetricType,  # noqa: A002 - Prometheus' word
    page: Literal["rank", "service"],
    name: str,
    help: str,  # noqa: A002 - Prometheus' word
    labels: str = "",
    *,
    unit: str | None = None,
    stored_as: str | None = None,
    scalar: str | None = None,
) -> MetricSpec:
    """Return a metric family.

    `labels` are separated by blanks. `scalar` names the rows of `scalars` that contain the history of the metric.
    Without `unit`, the unit is the last word of the name, if this word is one of Prometheus' base units.
    """
    word = name.removesuffix("_total").rpartition("_")[2]
    unit = unit or (word if word in _UNITS else None)
    stored_as = f"scalars:{scalar}" if scalar else stored_as
    return MetricSpec(
        name=name, type=type, help=help, labels=tuple(labels.split()), unit=unit, stored_as=stored_as, page=page
    )


gauge = partial(metric, "gauge", "rank")
counter = partial(metric, "counter", "rank")
service_gauge = partial(metric, "gauge", "service")
service_counter = partial(metric, "counter", "service")
