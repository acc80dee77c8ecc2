"""Which series a panel asks for: of ranks' own pages, which the store has too, or of the service's page. Text alone.

A Prometheus as `rankscope up` configures it asks the store only where the job of the ranks is named
(`required_matchers`). So selectors of ranks name it, and boards show steps from before that Prometheus began.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract import metrics
from rankscope_contract.metric_spec import MetricSpec
from rankscope_dashboards.prometheus_config import RANKS_JOB

RATE_WINDOW: Final = "[$__rate_interval]"

_JOB: Final = f'job="{RANKS_JOB}"'
_RUN: Final = 'run=~"$run"'
_RANK: Final = 'rank=~"$rank"'


def _selector(*matchers: str) -> str:
    return "{" + ", ".join(matchers) + "}"


RUN: Final = _selector(_RUN)
SERVICE_RANKS: Final = _selector(_RUN, _RANK)
"""For the service's own page, and what it says there of ranks; the store has nothing of that."""

RANKS: Final = _selector(_JOB, _RUN, _RANK)
ALL_RANKS: Final = _selector(_JOB, _RUN)
ALL_RUNS: Final = _selector(_JOB)
"""For ranks' own pages, live and in the store: of the ranks chosen, of all ranks of the runs chosen, of all runs."""


def ranks(*more: str) -> str:
    """Return `RANKS` with `more` matchers."""
    return _selector(_JOB, _RUN, _RANK, *more)


def rate(metric: MetricSpec, *more: str) -> str:
    """Return how fast a counter of ranks' pages rises."""
    return _of_counter("rate", metric, more)


def increase(metric: MetricSpec, *more: str) -> str:
    """Return by how much a counter of ranks' pages rises within each interval."""
    return _of_counter("increase", metric, more)


def _of_counter(function: str, metric: MetricSpec, more: tuple[str, ...]) -> str:
    """Return `function` of what was scraped, and of what is stored for ranks that were not scraped in that window.

    Never of both together, as a Prometheus of a few hours merges them: a page shows a step some milliseconds after the
    time at which it is stored, so the counter would seem to fall and begin anew, which adds all of it to the rate.
    """
    scraped, stored = _selector(_RUN, _RANK, *more), ranks(*more)
    was_scraped = f"present_over_time({metrics.STEP.name}{SERVICE_RANKS}{RATE_WINDOW})"
    return (
        f"({function}({metric.name}{scraped}{RATE_WINDOW}) or "
        f"{function}({metric.name}{stored}{RATE_WINDOW}) unless on (run, rank) {was_scraped})"
    )
