"""Board "Run overview" with completed runs, dead ranks, a service that is down, and many ranks."""

from __future__ import annotations

import json
import re

import pytest

from rankscope_contract.metrics.catalogue import CATALOG
from rankscope_dashboards.generate import generated_files

BOARD = json.loads(generated_files()["dashboards/rankscope/run_overview.json"])
PANELS = {panel["title"]: panel for panel in BOARD["panels"]}
VARIABLES = {"$__rate_interval": "1m", "$__interval": "30s", "$run": ".+", "$rank": ".+"}
AT = 300
MAX_LINES = 20
RANKS = 50


def query(title, position=0):
    expression = PANELS[title]["targets"][position]["expr"]
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def promql_error(judge, given, checks):
    """Return promtool's error, or None if each expression has the expected result at the end of the series `given`.

    `checks`: tuples of (expression, labels of the only sample or None for no sample, its value).
    """
    queries = [
        {
            "expr": expression,
            "eval_time": f"{AT}s",
            "exp_samples": [] if labels is None else [{"labels": labels, "value": value}],
        }
        for expression, labels, value in checks
    ]
    series = [{"series": name, "values": values} for name, values in given.items()]
    test = {"interval": "10s", "input_series": series, "promql_expr_test": queries}
    return judge([({"groups": []}, {"evaluation_interval": "10s", "tests": [test]})])[0]


def test_ranks_of_completed_runs_are_not_counted_as_missing(judge):
    given = {
        'rankscope_run_ranks_up{run="live"}': "2x30",
        'rankscope_run_ranks_expected{run="live"}': "4x30",
        'rankscope_run_state{run="live", state="running"}': "1x30",
        'rankscope_run_state{run="live", state="completed"}': "0x30",
        'rankscope_run_ranks_up{run="done"}': "0x30",
        'rankscope_run_ranks_expected{run="done"}': "8x30",
        'rankscope_run_state{run="done", state="completed"}': "1x30",
    }

    assert promql_error(judge, given, [(query("Ranks up"), "{}", 2), (query("Ranks up", 1), "{}", 4)]) is None


def test_firings_of_an_ended_rank_are_counted_once(judge):
    own, service = "rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total"
    labels = 'run="r", rule="AnomalyNan", kind="grad_reduced"'
    given = {
        f'{own}{{{labels}, rank="0", job="rankscope", instance="r/0"}}': "3x10 stale",
        f'{service}{{{labels}, rank="0", instance="s"}}': "3x30",
        f'{own}{{{labels}, rank="1", job="rankscope", instance="r/1"}}': "5x30",
        f'{service}{{{labels}, rank="1", instance="s"}}': "4x30",
        f'{own}{{{labels}, rank="2", job="rankscope", instance="r/2"}}': "0x30",
    }
    lines = query("Anomalies")
    checks = [
        (query("Anomaly count"), '{run="r"}', 8),
        (f"({lines}) == 3", '{run="r", rule="AnomalyNan", rank="0"}', 3),
        (f"count({lines})", "{}", 2),
    ]

    assert promql_error(judge, given, checks) is None


def test_time_since_last_commit_grows_while_the_service_is_down(judge):
    given = {"rankscope_ingest_last_commit_timestamp_seconds": "10x5 stale"}

    assert promql_error(judge, given, [(query("Since last commit"), "{}", AT - 10)]) is None


@pytest.mark.parametrize("title", [title for title, panel in PANELS.items() if panel["type"] == "timeseries"])
def test_panels_have_at_most_20_lines_with_50_ranks(judge, title):
    expressions = [query(title, position) for position in range(len(PANELS[title]["targets"]))]
    given = {}
    for metric in {name for one in expressions for name in re.findall(r"rankscope_\w+", one)}:
        for rank in range(RANKS):
            labels = dict.fromkeys(CATALOG[metric].all_labels, "x") | {"run": "r"}
            if "rank" in labels:
                labels["rank"] = str(rank)
            own = {name: value for name, value in labels.items() if name in CATALOG[metric].all_labels}
            own |= {"job": "rankscope"} if CATALOG[metric].page == "rank" else {}
            text = ", ".join(f'{name}="{value}"' for name, value in own.items())
            given[f"{metric}{{{text}}}"] = "0+1x30"
    checks = [(f"count({one}) > {MAX_LINES}", None, 0) for one in expressions]
    checks += [(f"count({one}) > bool 0", "{}", 1) for one in expressions]

    assert promql_error(judge, given, checks) is None
