"""What a metric is: its name, type, unit, labels, and its place in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankscope_contract.model.identity import IDENTITY_LABELS

MetricType = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric family. `stored_as` is dataset.column, or scalars:<name> for a row of `scalars`; None: live only."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()  # beyond the page's own identity labels
    unit: str | None = None
    stored_as: str | None = None
    page: Literal["rank", "node", "service"] = "rank"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Return the labels of a sample: identity first on a rank's page."""
        return (*IDENTITY_LABELS, *self.labels) if self.page == "rank" else self.labels


def gauge(name: str, help: str, *labels: str, unit: str | None = None, stored_as: str | None = None) -> MetricSpec:  # noqa: A002 - Prometheus' word
    """Return a gauge of a rank's page."""
    return MetricSpec(name=name, type="gauge", help=help, labels=labels, unit=unit, stored_as=stored_as)


def counter(name: str, help: str, *labels: str, unit: str | None = None, stored_as: str | None = None) -> MetricSpec:  # noqa: A002 - Prometheus' word
    """Return a counter of a rank's page."""
    return MetricSpec(name=name, type="counter", help=help, labels=labels, unit=unit, stored_as=stored_as)
