"""PromQL selectors for panels. They decide whether a query reads live data only or also the history in the store.

With the configuration that `rankscope up` writes, Prometheus queries the store only for selectors that contain the job
of the ranks (`required_matchers`). Selectors on metrics of ranks therefore contain it, so that boards also show steps
from before this Prometheus started. Metrics of the service are not in the store.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_dashboards.deploy.prometheus import RANKS_JOB

RATE_WINDOW: Final = "[$__rate_interval]"

_JOB: Final = f'job="{RANKS_JOB}"'
_RUN: Final = 'run=~"$run"'
_RANK: Final = 'rank=~"$rank"'


def _selector(*matchers: str) -> str:
    return "{" + ", ".join(matchers) + "}"


SERVICE_RUNS: Final = _selector(_RUN)
SERVICE_RANKS: Final = _selector(_RUN, _RANK)
"""For metrics of the service: of the selected runs, of the selected ranks. The store does not contain these metrics."""

RANKS: Final = _selector(_JOB, _RUN, _RANK)
ALL_RANKS: Final = _selector(_JOB, _RUN)
ALL_RUNS: Final = _selector(_JOB)
"""For metrics of ranks, live and stored: of the selected ranks, of all ranks of the selected runs, of all runs."""


def ranks(*matchers: str) -> str:
    """Return `RANKS` with additional matchers."""
    return _selector(_JOB, _RUN, _RANK, *matchers)


def rate(metric: MetricSpec, *matchers: str) -> str:
    """Return PromQL for the increase per second of a counter of the selected ranks."""
    return _of_counter("rate", metric, matchers)


def increase(metric: MetricSpec, *matchers: str) -> str:
    """Return PromQL for the increase of a counter of the selected ranks within each interval."""
    return _of_counter("increase", metric, matchers)


def _of_counter(function: str, metric: MetricSpec, matchers: tuple[str, ...]) -> str:
    """Return PromQL: `function` of the scraped samples, or of the stored samples for ranks not scraped in the window.

    Both kinds of samples must not be merged, as a Prometheus started a few hours ago would do. `/metrics` shows a step
    a few milliseconds after its timestamp in the store, so the merged counter seems to decrease. PromQL treats a
    decrease as a counter reset and adds the full counter value to the rate.
    """
    scraped, stored = _selector(_RUN, _RANK, *matchers), ranks(*matchers)
    was_scraped = f"present_over_time({catalogue.STEP.name}{SERVICE_RANKS}{RATE_WINDOW})"
    return (
        f"({function}({metric.name}{scraped}{RATE_WINDOW}) or "
        f"{function}({metric.name}{stored}{RATE_WINDOW}) unless on (run, rank) {was_scraped})"
    )
