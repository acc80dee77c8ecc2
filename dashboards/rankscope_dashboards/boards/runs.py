"""The Grafana board "Runs": all runs of the time range with state, progress and links, and their curves compared."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue
from rankscope_dashboards.boards.elements.board import Section, make_board, sized
from rankscope_dashboards.boards.elements.firings import firings
from rankscope_dashboards.boards.elements.panels import (
    NO_SERVICE,
    Column,
    PanelBuilder,
    PanelText,
    Query,
    fraction_text,
    history_panel,
    table_panel,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import (
    AHEAD,
    RANKS_OF_RUNS,
    SERVICE_RUNS,
    SEVERAL_RUNS,
    at_end,
    in_life,
    mean_loss,
    rate_of_runs,
)
from rankscope_dashboards.boards.elements.states import STATE_TEXTS, state_number
from rankscope_dashboards.boards.elements.variables import RUNS
from rankscope_storage.base import service_catalogue

MAX_LINES: Final = 20
"""Largest number of runs that a panel compares."""

_RUN_BOARD: Final = "/d/rankscope-run-overview?var-datasource=${datasource}&var-run=${__data.fields.Run:percentencode}"
_LINKS: Final = {
    "The run in this time range": _RUN_BOARD + "&${__url_time_range}",
    "The whole run": _RUN_BOARD + "&from=${__data.fields.Started.numeric}&to=${__data.fields.Latest.numeric}",
}
"""Links of a run: a live run in the chosen time range, or an ended run from its first to its last step."""


def board() -> builders.Dashboard:
    """Return the board "Runs" without its uid, which `boards()` sets."""
    sections = (
        Section("Runs", sized(24, 9, _table()) + sized(24, 7, _history())),
        Section("Convergence", sized(12, 9, _loss(), _grad_norm())),
        Section("Speed", sized(12, 9, _tokens_per_second(), _step_time()) + sized(24, 8, _goodput())),
    )
    return make_board("Runs", "All runs of a time range, compared.", sections, variables=(RUNS,))


def _table() -> PanelBuilder:
    text = PanelText(
        title="Runs",
        description="Last values of each run within the time range: state, progress, time left, step, loss, tokens per "
        "second, anomalies, ranks, start of the latest attempt and time of the latest step. Ended runs remain in the "
        "list; they have no speed. "
        "Click a run to open it, in this time range or from its start to its latest step. Failed or stalled: open "
        "the run, and read `rankscope summary RUN`.",
        empty="The service exports no run in the time range",
    )
    loss = f"avg by (run) {mean_loss(SEVERAL_RUNS, RANKS_OF_RUNS, '[$__range]')}"
    latest = f"max by (run) ({at_end(service_catalogue.RUN_LAST_STEP, SERVICE_RUNS)})"
    queries = [
        Query(state_number(SEVERAL_RUNS, "[$__range]")),
        Query(f"max by (run) ({service_catalogue.RUN_ETA.name}{SERVICE_RUNS})"),
        *(
            Query(in_life(metric, SEVERAL_RUNS))
            for metric in (service_catalogue.RUN_PROGRESS, service_catalogue.RUN_STEP)
        ),
        Query(loss),
        Query(f"sum by (run) {rate_of_runs(catalogue.TOKENS)}"),
        Query(f"sum by (run) ({firings(of_ranks=RANKS_OF_RUNS, of_service=SERVICE_RUNS)})"),
        Query(f"max by (run) ({service_catalogue.RANKS_UP.name}{SERVICE_RUNS})"),
        Query(f"{in_life(service_catalogue.RUN_START, SEVERAL_RUNS)} * 1000"),
        Query(f"({latest} or {in_life(service_catalogue.RUN_END, SEVERAL_RUNS)}) * 1000"),
    ]
    columns = {
        "run": Column(heading="Run", links=_LINKS),
        "Value #A": Column(heading="State", width=100, mappings=STATE_TEXTS),
        "Value #C": Column(heading="Progress", width=95, unit="percentunit", decimals=1),
        "Value #B": Column(heading="Time left", width=120, unit="dtdurations", decimals=0),
        "Value #D": Column(heading="Step", width=90, decimals=0),
        "Value #E": Column(heading="Loss", width=90),
        "Value #F": Column(heading="Tokens/s", width=100, decimals=0),
        "Value #G": Column(heading="Anomalies", width=115, decimals=0),
        "Value #H": Column(heading="Ranks up", width=95, decimals=0),
        "Value #I": Column(heading="Started", width=165, unit="dateTimeAsIso"),
        "Value #J": Column(heading="Latest", width=165, unit="dateTimeAsIso"),
    }
    return table_panel(text, queries, columns)


def _history() -> PanelBuilder:
    text = PanelText(
        title="State over time",
        description="State of each run over time. Green: running. Blue: completed. A run that changes between red "
        "and green was restarted after failures. Orange: stalled; read the stacks on its page.",
        mappings=STATE_TEXTS,
        empty=NO_SERVICE,
    )
    query = Query(f"topk({MAX_LINES}, {state_number(SEVERAL_RUNS, AHEAD)})", "{{run}}")
    states = (f"{service_catalogue.RUN_STATE.name}{selector}" for selector in (SERVICE_RUNS, RANKS_OF_RUNS))
    return history_panel(text, query, "run", *states)


def _loss() -> PanelBuilder:
    text = PanelText(
        title="Loss of the runs",
        description=f"Loss of up to {MAX_LINES} runs, mean of the ranks. Compare runs with the same data and the same "
        "loss. A run above the others, or one that rises, needs a look at its gradient norm.",
        minimum=None,
        empty="No run logs a loss in the time range",
    )
    query = f"topk({MAX_LINES}, {mean_loss(SEVERAL_RUNS, RANKS_OF_RUNS)})"
    return time_series_panel(text, Query(query, "{{run}} {{loss}}"), many=True)


def _grad_norm() -> PanelBuilder:
    text = PanelText(
        title="Gradient norm of the runs",
        description=f"Gradient norm of up to {MAX_LINES} runs, highest rank. The scale is logarithmic. A run whose "
        "norm is a decade above that of similar runs will probably diverge: check its data and its learning rate.",
        empty="No run logs a gradient norm in the time range",
    )
    query = f"topk({MAX_LINES}, max by (run) ({catalogue.GRAD_NORM.name}{RANKS_OF_RUNS}))"
    return time_series_panel(text, Query(query, "{{run}}"), logarithmic=True, many=True)


def _tokens_per_second() -> PanelBuilder:
    text = PanelText(
        title="Tokens per second of the runs",
        description=f"Tokens per second over all ranks, of up to {MAX_LINES} runs. The level of a run should not "
        "change. Compare only runs with the same model and number of ranks.",
        unit="suffix: tok/s",
        empty="No run logs tokens in the time range",
    )
    query = f"topk({MAX_LINES}, sum by (run) {rate_of_runs(catalogue.TOKENS)})"
    return time_series_panel(text, Query(query, "{{run}}"), many=True)


def _step_time() -> PanelBuilder:
    text = PanelText(
        title="Step time of the runs",
        description=f"Duration of the step at the latest scrape, slowest rank, of up to {MAX_LINES} runs. The level "
        "of a run should not change. If it rises, open the run and its board Ranks.",
        unit="s",
    )
    query = f"topk({MAX_LINES}, max by (run) ({catalogue.STEP_SECONDS.name}{RANKS_OF_RUNS}))"
    return time_series_panel(text, Query(query, "{{run}}"), many=True)


def _goodput() -> PanelBuilder:
    text = fraction_text(
        "Goodput",
        "Time in steps that count, as a fraction of the time since the first start of the run. Repeated steps, first "
        "steps, checkpoints, evaluations, hangs and the time between launches do not count; `FROM goodput` shows the "
        "time in each. Above 90 % is good for a long run. Updated at each commit.",
        empty=NO_SERVICE,
    )
    query = f"topk({MAX_LINES}, max by (run) ({service_catalogue.RUN_GOODPUT.name}{SERVICE_RUNS}))"
    return time_series_panel(text, Query(query, "{{run}}"), many=True)
