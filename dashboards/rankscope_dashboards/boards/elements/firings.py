"""PromQL for the firings of anomaly rules, counted by the ranks and by the service."""

from __future__ import annotations

from rankscope_contract.metrics import catalogue
from rankscope_dashboards.boards.elements.selectors import RANKS, SERVICE_RANKS, at_end
from rankscope_storage.base import service_catalogue


def firings(window: str = "", *, offset: str = "", of_ranks: str = RANKS, of_service: str = SERVICE_RANKS) -> str:
    """Return PromQL for the number of firings of each rank, rule and kind, at the end of `window` or `offset` earlier.

    A rank and the service each have such a counter. While the rank is alive, its counter is the more recent one; after
    its end, only the counter of the service remains. The maximum of both counters counts each firing once. The two
    selectors choose the ranks.
    """
    past = f" offset {offset}" if offset else ""
    own, service = (
        at_end(catalogue.ANOMALY_EVENTS, of_ranks, window),
        at_end(service_catalogue.ANOMALIES_INGESTED, of_service, window),
    )
    return f"max by (run, rank, rule, kind) ({own}{past} or {service}{past})"


def new_firings() -> str:
    """Return PromQL for the number of firings of each rank, rule and kind within one interval of the panel.

    The number is exact: a difference of two counters. `increase()` would extrapolate, and show 1.07 firings for one. A
    counter that did not exist before has counted from 0.
    """
    now = firings()
    return f"({now} - ({firings(offset='$__interval')} or {now} * 0)) > 0"
