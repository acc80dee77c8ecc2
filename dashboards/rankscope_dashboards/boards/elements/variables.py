"""Variables of the boards: menus at the top of a board, in which a reader selects runs, ranks and tensors.

The lists have the runs and ranks of the time range, also those that have ended. Grafana makes most of them from series,
because remote read returns no label values. The list of runs is the result of a query, which has an order.
"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import Kind
from rankscope_dashboards.boards.elements.panels import DATASOURCE
from rankscope_dashboards.boards.elements.selectors import (
    ALL_RANKS,
    NORM,
    OF_KIND,
    OF_TENSORS,
    SERVICE_RUN,
    in_life,
    ranks,
)
from rankscope_storage.base import service_catalogue

_ALL: Final = ".+"
Sort = dashboard.VariableSort


def _query(name: str, label: str, query: str, sort: dashboard.VariableSort) -> builders.QueryVariable:
    made = builders.QueryVariable(name).label(label).query(query).datasource(DATASOURCE).sort(sort)
    return made.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _several(variable: builders.QueryVariable) -> builders.QueryVariable:
    return variable.multi(True).include_all(True).all_value(_ALL)


_ANY_RUN: Final = 'run!=""'


def _run() -> builders.QueryVariable:
    """Return the variable of runs: those that Prometheus scrapes now, then others, each with the latest start first.

    Grafana chooses the first one when it opens a board. Without a service, there are only scraped runs.
    """
    started, scraped = (
        in_life(service_catalogue.RUN_START, _ANY_RUN),
        f"max by (run) ({catalogue.STEP.name}{{{_ANY_RUN}}})",
    )
    ordered = f"{started} + on (run) ({scraped} * 0 + 1e10) or {started} or {scraped}"
    return _query("run", "Run", f"query_result(sort_desc({ordered}))", Sort.DISABLED).regex('/{run="(.*)"}/')


RUN: Final = _run()
"""Selects one run. Its name is therefore not needed in the legends of the panels."""

RUNS: Final = _several(_run())
"""Selects one run, several or all."""

HOST: Final = _several(
    _query("host", "Host", f"label_values({catalogue.RUN_INFO.name}{SERVICE_RUN}, host)", Sort.ALPHABETICAL_ASC)
)
"""Selects the hosts of ranks. Only scraped ranks have a host."""

RANK: Final = _several(
    _query("rank", "Rank", f"label_values({catalogue.STEP.name}{ALL_RANKS}, rank)", Sort.NUMERICAL_ASC)
)
KIND: Final = _query(
    "kind", "Kind", f"label_values({catalogue.KIND_STEP.name}{ALL_RANKS}, kind)", Sort.ALPHABETICAL_ASC
).current(dashboard.VariableOption(selected=True, text=Kind.GRAD_REDUCED.value, value=Kind.GRAD_REDUCED.value))
"""Selects one kind of tensors: gradients at first, or the first entry if the run has no gradients."""

TENSOR: Final = _several(
    _query(
        "tensor",
        "Tensor",
        f"label_values({catalogue.TENSOR_VALUE.name}{ranks(OF_KIND, NORM)}, tensor)",
        Sort.ALPHABETICAL_ASC,
    )
).refresh(dashboard.VariableRefresh.ON_DASHBOARD_LOAD)


def largest_deviations(name: str, tensors: int) -> builders.QueryVariable:
    """Return a hidden variable with the selected tensors whose norm rose most above their baseline in the time range.

    A tensor without a baseline is ranked by its norm. Panels then read the curves of no others.
    """
    chosen = ranks(OF_KIND, OF_TENSORS, NORM)
    norm = f"max_over_time({catalogue.TENSOR_VALUE.name}{chosen}[$__range])"
    baseline = f"last_over_time({catalogue.TENSOR_BASELINE.name}{chosen}[$__range])"
    risen = f"max by (tensor) ({norm} / ({baseline} > 0) or {norm})"
    made = _query(name, name, f"query_result(topk({tensors}, {risen}))", Sort.DISABLED).regex('/{tensor="(.*)"}/')
    every = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
    return made.multi(True).include_all(True).current(every).hide(dashboard.VariableHide.HIDE_VARIABLE)


_WINDOWS: Final = [
    dashboard.VariableOption(text=window, value=window, selected=window == "5m") for window in ("1m", "5m", "15m", "1h")
]
# Without `options` and `current`, Grafana 9.4 leaves the variable empty, and Prometheus rejects the queries.
SMOOTH: Final = (
    builders.CustomVariable("smooth")
    .label("Smoothing")
    .values(",".join(str(one.value) for one in _WINDOWS))
    .options(_WINDOWS)
    .current(_WINDOWS[1])
)
"""Window of the moving averages on a board."""
