"""The description of one metric: name, type, unit, labels, and the column of the store that holds its history."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from rankscope_contract.model.identity import IDENTITY_LABELS

MetricType = Literal["gauge", "counter"]
_UNITS: Final = ("bytes", "seconds", "joules", "watts", "celsius", "hertz", "tokens", "samples")
"""Units, which are the last word of a metric's name, before `_total`."""


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
    stored_as: str | None = None
    page: Literal["rank", "service"] = "rank"

    @property
    def unit(self) -> str | None:
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in _UNITS else None

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
    stored_as: str | None = None,
) -> MetricSpec:
    """Return a metric family. `labels` are separated by blanks."""
    return MetricSpec(name=name, type=type, help=help, labels=tuple(labels.split()), stored_as=stored_as, page=page)


gauge = partial(metric, "gauge", "rank")
counter = partial(metric, "counter", "rank")


def _logged(type: MetricType, name: str, help: str, labels: str = "") -> MetricSpec:  # noqa: A002 - Prometheus' words
    """Return a metric whose history is in the rows of `scalars` with its name, without `rankscope_` and `_ratio`."""
    scalar = name.removeprefix("rankscope_").removesuffix("_ratio")
    return metric(type, "rank", name, help, labels, stored_as=f"scalars:{scalar}")


logged_gauge = partial(_logged, "gauge")
logged_counter = partial(_logged, "counter")
