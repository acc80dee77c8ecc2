"""What the Run overview shows of runs that ended, ranks that died, a service that is away, and large worlds."""

from __future__ import annotations

import json
import re

import pytest

from rankscope_contract.metrics import CATALOG
from rankscope_dashboards.generate import files

PANELS = {panel["title"]: panel for panel in json.loads(files()["dashboards/run_overview.json"])["panels"]}
VARIABLES = {"$__rate_interval": "1m", "$__interval": "30s", "$run": ".+", "$rank": ".+"}
AT = 300
MOST_LINES = 20
RANKS = 50


def asked(title, position=0):
    expression = PANELS[title]["targets"][position]["expr"]
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def objection(judge, given, checks):
    """Return promtool's objection to each (expression, labels of a sample or None, value) at the end of `given`."""
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


def test_ranks_of_runs_that_are_done_are_not_missing(judge):
    given = {
        'rankscope_run_ranks_up{run="live"}': "2x30",
        'rankscope_run_ranks_expected{run="live"}': "4x30",
        'rankscope_run_state{run="live", state="running"}': "1x30",
        'rankscope_run_state{run="live", state="completed"}': "0x30",
        'rankscope_run_ranks_up{run="done"}': "0x30",
        'rankscope_run_ranks_expected{run="done"}': "8x30",
        'rankscope_run_state{run="done", state="completed"}': "1x30",
    }

    assert objection(judge, given, [(asked("Ranks up"), "{}", 2), (asked("Ranks up", 1), "{}", 4)]) is None


def test_firings_of_a_rank_that_is_gone_are_still_counted_and_none_is_counted_twice(judge):
    own, service = "rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total"
    labels = 'run="r", rule="AnomalyNan", kind="grad_reduced"'
    given = {
        f'{own}{{{labels}, rank="0", job="rankscope", instance="r/0"}}': "3x10 stale",
        f'{service}{{{labels}, rank="0", instance="s"}}': "3x30",
        f'{own}{{{labels}, rank="1", job="rankscope", instance="r/1"}}': "5x30",
        f'{service}{{{labels}, rank="1", instance="s"}}': "4x30",
        f'{own}{{{labels}, rank="2", job="rankscope", instance="r/2"}}': "0x30",
    }
    lines = asked("Anomalies")
    checks = [
        (asked("Anomaly count"), '{run="r"}', 8),
        (f"({lines}) == 3", '{run="r", rule="AnomalyNan", rank="0"}', 3),
        (f"count({lines})", "{}", 2),
    ]

    assert objection(judge, given, checks) is None


def test_age_of_the_last_commit_grows_on_while_the_service_is_away(judge):
    given = {"rankscope_ingest_last_commit_timestamp_seconds": "10x5 stale"}

    assert objection(judge, given, [(asked("Since last commit"), "{}", AT - 10)]) is None


@pytest.mark.parametrize("title", [title for title, panel in PANELS.items() if panel["type"] == "timeseries"])
def test_a_large_world_does_not_bury_the_board_in_lines(judge, title):
    expressions = [asked(title, position) for position in range(len(PANELS[title]["targets"]))]
    given = {}
    for metric in {name for one in expressions for name in re.findall(r"rankscope_\w+", one)}:
        for rank in range(RANKS):
            words = dict.fromkeys(CATALOG[metric].all_labels, "x") | {"run": "r"}
            if "rank" in words:
                words["rank"] = str(rank)
            own = {name: value for name, value in words.items() if name in CATALOG[metric].all_labels}
            own |= {"job": "rankscope"} if CATALOG[metric].page == "rank" else {}
            text = ", ".join(f'{name}="{value}"' for name, value in own.items())
            given[f"{metric}{{{text}}}"] = "0+1x30"
    checks = [(f"count({one}) > {MOST_LINES}", None, 0) for one in expressions]
    checks += [(f"count({one}) > bool 0", "{}", 1) for one in expressions]

    assert objection(judge, given, checks) is None
