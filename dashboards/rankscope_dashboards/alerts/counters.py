"""PromQL that holds for some time after a counter has increased, and while a target cannot be scraped."""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_dashboards.deploy.prometheus import seconds
from rankscope_storage.base import service_catalogue

OUTAGE: Final = "5m"
"""Longest outage of the service during which its last values count. In a longer one, its alerts resolve."""


def held(metric: MetricSpec, matcher: str = "", *, present: str | None = None) -> str:
    """Return PromQL for a gauge of the service about runs, or its last value while the service does not export the run.

    Otherwise each restart of the service would resolve all alerts, and send their messages again. `present` is the
    expression while it does; by default, the gauge.
    """
    series = metric.name + matcher
    state = service_catalogue.RUN_STATE.name
    return f"({present or series} or last_over_time({series}[{OUTAGE}]) unless on (run) {state})"


def present_age(age: MetricSpec, matcher: str = "") -> str:
    """Return PromQL for the value of a gauge of seconds since an event, plus the age of its latest sample.

    After an outage, Prometheus returns the latest sample from before the outage until its next scrape. Such a sample
    alone would show an old event as a new one.
    """
    series = f"{age.name}{matcher}"
    return f"({series} - timestamp({series}) + time())"


def increased(
    counter: MetricSpec,
    age: MetricSpec,
    by: tuple[str, ...],
    window: str,
    *,
    matcher: str = "",
    age_by: tuple[str, ...] | None = None,
) -> str:
    """Return PromQL with one sample for each group `by` whose `counter` increased within `window`.

    `matcher` selects the series of `counter` and of `age`. `increase` alone would miss a counter whose first sample is
    above zero. A second expression therefore covers counters that are new within `window`. To a Prometheus that was
    down for longer than `window`, every counter is new. The gauge `age` is the time since the last increase of the
    counter. It excludes counters that last increased before `window`. A rank of an older release does not export this
    gauge. `age_by` are the labels of `age`, if `counter` has more labels. A value of the result is that of the largest
    counter of the group and not a sum, which would be twice as large if Prometheus scrapes a process twice.
    """
    series, groups = f"{counter.name}{matcher}", f"({', '.join(by)})"
    known = f"last_over_time({series}[{window}])"  # the target can be down since the increase
    ages = f"({', '.join(age_by or by)})"
    on = "" if age_by is None else f" on {ages}"
    return (
        f"max by {groups} (increase({series}[{window}])) > 0\n  or\n"
        f"max by {groups} ({known} unless {series} offset {window}) > 0\n"
        f"  unless{on}\nmin by {ages} {present_age(age, matcher)} > {seconds(window):g}"
    )
