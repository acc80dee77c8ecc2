"""The Grafana board "Incidents": incidents with their first cause, firings over time, and the state of the rules."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common, dashboard

from rankscope_contract.metrics import catalogue
from rankscope_dashboards.boards.elements.annotations import RUN_ANNOTATIONS
from rankscope_dashboards.boards.elements.board import Section, make_board, sized
from rankscope_dashboards.boards.elements.firings import new_firings
from rankscope_dashboards.boards.elements.panels import (
    NO_FIRINGS,
    TENSOR_COLUMN,
    Column,
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    history_panel,
    stacked,
    table_panel,
    time_series_panel,
    value_texts,
)
from rankscope_dashboards.boards.elements.selectors import AHEAD, ALL_RANKS, RANKS, SERVICE_RANKS, SERVICE_RUN
from rankscope_storage.base import service_catalogue

OPEN_SECONDS: Final = 300
"""Time in seconds after its latest firing for which the board shows an incident as open."""

MAX_LINES: Final = 20
_LABELS: Final = "rule, severity, kind, tensor, op, rank, step"
_COLUMNS: Final = {
    "tensor": TENSOR_COLUMN,
    "rule": Column(heading="Rule", width=180),
    "severity": Column(heading="Severity", width=90),
    "kind": Column(heading="Kind", width=140),
    "op": Column(heading="Statistic", width=120),
    "rank": Column(heading="Rank", width=100, is_number=True),
    "step": Column(heading="Step", width=90, is_number=True),
    "Value": Column(heading="Latest firing", width=180, unit="dateTimeAsIso"),
}
_FIRING: Final = value_texts({"0": ("quiet", "green"), "1": ("fires", "red")})
_SCORE: Final = f"{catalogue.RULE_SCORE.name}{RANKS}"
_NO_RULE: Final = "No rule, or the rank has ended"


def board() -> builders.Dashboard:
    """Return the board "Incidents" without its uid, which `boards()` sets."""
    sections = (
        Section("Incidents", sized(24, 7, _first_cause(), _open_incidents(), _closed_incidents())),
        Section("Firings over time", sized(12, 9, _anomalies(), _by_rank())),
        Section("Rules", sized(12, 9, _rule_state(), _thresholds()) + sized(24, 9, _scores())),
        Section("Tensors, ranks and events", sized(24, 9, _firing_tensors()) + sized(12, 9, _events(), _failed())),
    )
    description = "Incidents, firings and rules of one run."
    return make_board("Incidents", description, sections, annotations=RUN_ANNOTATIONS)


def _first_cause() -> PanelBuilder:
    text = PanelText(
        title="First cause",
        description="The incident with the lowest step: the first firing of all ranks in causal order. Incidents "
        "after it are often its consequences. Start here: open the tensor on the board Tensors, and read `rankscope "
        "anomalies RUN`.",
        empty="No data of an incident in the time range",
    )
    panel = table_panel(text, (Query(_latest_firings()),), _COLUMNS)
    numbers = {"conversions": [{"targetField": "Step", "destinationType": "number"}], "fields": {}}
    for name, options in (
        ("convertFieldType", numbers),
        ("sortBy", {"fields": {}, "sort": [{"field": "Step", "desc": False}]}),
        ("limit", {"limitField": 1}),
    ):
        panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val=name, options=options))
    return panel


def _open_incidents() -> PanelBuilder:
    text = PanelText(
        title="Open incidents",
        description=f"Incidents with a firing in the last {OPEN_SECONDS // 60} minutes. The columns describe the "
        "first firing of each incident. None is normal. Critical: check whether the run still learns, and stop it if "
        "it does not.",
        empty="No data of an open incident",
    )
    return table_panel(text, (Query(f"(time() - {_age(f'< {OPEN_SECONDS}')}) * 1000"),), _COLUMNS)


def _closed_incidents() -> PanelBuilder:
    text = PanelText(
        title="Closed incidents",
        description="Incidents of the time range without a firing in the last minutes. The columns describe the "
        "first firing of each incident. An incident that returns has a cause that is still there: compare the steps.",
        empty="No data of a closed incident in the time range",
    )
    query = f"{_latest_firings()} unless {_age(f'< {OPEN_SECONDS}')}"
    return table_panel(text, (Query(query),), _COLUMNS)


def _anomalies() -> PanelBuilder:
    text = count_text(
        "Anomalies",
        "Number of new firings of each rule within each interval, counted at every step and over all selected ranks. "
        "No bar is normal. A single bar is one incident; bars at all intervals mean that the model does not recover. "
        "On all ranks at the same time: check the data and the learning rate schedule.",
        empty=NO_FIRINGS,
    )
    return stacked(time_series_panel(text, Query(f"sum by (run, rule) ({new_firings()})", "{{rule}}")), bars=True)


def _by_rank() -> PanelBuilder:
    text = count_text(
        "Anomalies by rank",
        f"Number of new firings within each interval on the {MAX_LINES} ranks with the most. No bar is normal. If "
        "only one rank fires, check its data and its hardware.",
        empty=NO_FIRINGS,
    )
    query = f"topk by (run) ({MAX_LINES}, sum by (run, rank) ({new_firings()}))"
    return stacked(time_series_panel(text, Query(query, "rank {{rank}}"), many=True), bars=True)


def _rule_state() -> PanelBuilder:
    text = PanelText(
        title="Rule state",
        description="State of each rule, by kind of tensor. Red: the rule fired on at least one rank at the step of "
        "a scrape. Firings between two scrapes are not visible here; the panel Anomalies contains "
        "them.",
        mappings=_FIRING,
        empty=_NO_RULE,
    )
    firing = f"{catalogue.RULE_FIRING.name}{RANKS}"
    query = Query(f"max by (run, rule, kind) (max_over_time({firing}{AHEAD}))", "{{rule}} {{kind}}")
    return history_panel(text, query, "rule", firing)


def _thresholds() -> PanelBuilder:
    text = PanelText(
        title="Thresholds of the rules",
        description="Configured threshold of each rule, lowest and highest of the ranks. Both must be equal: a rank "
        "with another threshold judges differently. NaN: the rule has no threshold. For rules with a score, its "
        "largest recent value on all ranks: the rule fires above the threshold. Change thresholds in the "
        "configuration.",
        empty=_NO_RULE,
    )
    series = f"{catalogue.RULE_THRESHOLD.name}{RANKS}"
    columns = {
        "rule": Column(heading="Rule"),
        "Value #A": Column(heading="Lowest", width=120),
        "Value #B": Column(heading="Highest", width=120),
        "Value #C": Column(heading="Largest score", width=120),
    }
    queries = (f"min by (rule) ({series})", f"max by (rule) ({series})", f"max by (rule) ({_SCORE})")
    return table_panel(text, [Query(query) for query in queries], columns)


def _scores() -> PanelBuilder:
    text = PanelText(
        title="Scores of the rules",
        description="Largest score of each rule divided by its threshold, over all selected ranks: the rule fires "
        "above the line at 1. Values below 0.001 are drawn at 0.001; rules with a threshold of 0 or less are not. "
        "A score that often comes close to 1: `rankscope rules replay` shows how often other thresholds fire.",
        minimum=None,
        thresholds=((None, "text"), (1, "red")),
        empty="No rule with a score, or the rank has ended",
    )
    share = f"{_SCORE} / ({catalogue.RULE_THRESHOLD.name}{RANKS} > 0)"
    query = Query(f"max by (run, rule) (clamp_min({share}, 0.001))", "{{rule}}")
    line = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.LINE)
    return time_series_panel(text, query, logarithmic=True).thresholds_style(line)


def _firing_tensors() -> PanelBuilder:
    text = count_text(
        "Tensors that fired",
        "Tensor statistics with the most rule firings, by rank. None is normal. The first tensor that fires is the "
        "cause: `rankscope anomalies RUN` lists the tensors in causal order.",
        empty=NO_FIRINGS,
    )
    columns = {
        **{name: column for name, column in _COLUMNS.items() if name in {"tensor", "rule", "kind", "op", "rank"}},
        "Value": Column(heading="Firings", width=90),
    }
    query = (
        f"topk({MAX_LINES}, max by ({', '.join(list(columns)[:-1])}) ({catalogue.TENSOR_ANOMALY_EVENTS.name}{RANKS}))"
    )
    return table_panel(text, (Query(query),), columns)


def _failed() -> PanelBuilder:
    text = count_text(
        "Failed ranks",
        "The rank that failed first with its exception or signal, and ranks that stopped responding without an exit "
        "event. None is normal. A rank without a reason: check its host for a lack of memory and for hardware errors, "
        "and the stacks of the other ranks.",
        empty="No data of a rank that failed or vanished",
    )
    columns = {
        "rank": Column(heading="Rank", width=100, is_number=True),
        "reason": Column(heading="Reason"),
        "Value": Column(heading="Failed", width=100),
    }
    failed = f"max by (rank, reason) ({service_catalogue.RUN_FAILURE.name}{SERVICE_RUN})"
    vanished = f"max by (rank) ({service_catalogue.RANK_VANISHED.name}{SERVICE_RANKS} == 1)"
    return table_panel(text, (Query(f"{failed} or on (rank) {vanished}"),), columns)


def _events() -> PanelBuilder:
    text = PanelText(
        title="Latest events",
        description="Time of the latest event of each type in the time range. `launch`, `exit` and `phase` are normal. "
        "For `fault`, `hang`, `xid` or `gap`, read the messages: `rankscope events RUN`, or the page of events to "
        "which this panel links.",
        empty="No data of an event in the time range",
    )
    live, stored = (
        f"max_over_time({service_catalogue.EVENT_LAST.name}{selector}[$__range])"
        for selector in (SERVICE_RUN, ALL_RANKS)
    )
    columns = {"type": Column(heading="Type"), "Value": Column(heading="Latest event", width=180, unit="dateTimeAsIso")}
    return table_panel(text, (Query(f"sort_desc(max by (type) ({live} or {stored})) * 1000"),), columns)


def _age(comparison: str) -> str:
    return f"min by ({_LABELS}) ({service_catalogue.INCIDENT_AGE.name}{SERVICE_RUN} {comparison})"


def _latest_firings() -> str:
    """Return PromQL for the time of the latest firing of each incident in the time range, in ms.

    The service exports the time since the latest firing, and only for one hour. The store has a sample with the age 0
    at each change of an incident.
    """
    live, stored = (
        f"max by ({_LABELS}) (max_over_time((timestamp({age}) - {age})[$__range:$__interval])) * 1000"
        for age in (f"{service_catalogue.INCIDENT_AGE.name}{selector}" for selector in (SERVICE_RUN, ALL_RANKS))
    )
    return f"({live} or {stored})"
