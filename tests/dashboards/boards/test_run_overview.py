"""Queries of the boards with completed runs, dead ranks, a service that is down, and many ranks."""

from __future__ import annotations

import pytest
from tests.dashboards.boards.promql import AT, given_series, promql_error, promql_errors, query_of, series
from tests.dashboards.generated import BOARDS, PANELS

MAX_LINES = 20
RANKS = 50

overview, incidents, pipeline = (query_of(BOARDS[name]) for name in ("run_overview", "incidents", "pipeline"))
DRAWN = [
    (name, panel["title"], place)
    for name, panel in PANELS
    if panel["type"] == "timeseries"
    for place in range(len(panel["targets"]))
]


def test_ranks_of_completed_runs_are_not_counted_as_missing(judge):
    live = {
        series("rankscope_run_ranks_up"): "2x30",
        series("rankscope_run_ranks_expected"): "4x30",
        series("rankscope_run_state", state="running"): "1x30",
        series("rankscope_run_state", state="completed"): "0x30",
    }
    ended = live | {series("rankscope_run_state", state="completed"): "1x30"}
    up, expected = overview("Ranks up"), overview("Ranks up", 1)

    assert promql_error(judge, live, [(up, "{}", 2), (expected, "{}", 4)]) is None
    assert promql_error(judge, ended, [(up, None, 0), (expected, None, 0)]) is None


def test_first_row_shows_the_last_values_of_an_ended_run(judge):
    given = {
        series("rankscope_run_state", state="completed"): "0x9 1 stale",
        series("rankscope_run_state", state="running"): "1x9 0 stale",
        series("rankscope_run_progress_ratio"): "0+0.125x8 stale",
        series("rankscope_ingest_lost_records_total"): "7x10 stale",
        series("rankscope_run_eta_seconds"): "5x9 stale",
    }
    checks = [(overview("State"), '{run="r"}', 3), (overview("Progress"), '{run="r"}', 1)]
    checks += [(pipeline("Lost data"), "{}", 7), (overview("Time left"), None, 0)]

    assert promql_error(judge, given, checks) is None


def test_first_row_shows_a_run_from_the_store_unless_it_is_live(judge):
    state, progress = "rankscope_run_state", "rankscope_run_progress_ratio"
    stored = {
        f'{state}{{job="rankscope", run="r", state="failed"}}': "_x5 1",
        f'{progress}{{job="rankscope", run="r"}}': "_x5 0.25",
    }
    live = {series(state, state="running"): "1x30", series(progress): "0.5x30"}
    shown = {"stored": (5, 0.25), "live": (1, 0.5)}
    cases = [
        (given, [(overview("State"), '{run="r"}', shown[name][0]), (overview("Progress"), '{run="r"}', shown[name][1])])
        for name, given in (("stored", stored), ("live", stored | live))
    ]

    assert [None, None] == promql_errors(judge, cases)


def test_firings_of_an_ended_rank_are_counted_once(judge):
    own, service = "rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total"
    given = {series(own): "3x10 stale", series(service): "3x30", series(own, rank="1"): "5x30"}
    given |= {series(service, rank="1"): "4x30", series(own, rank="2"): "0x30"}

    assert promql_error(judge, given, [(overview("Anomaly count"), '{run="r"}', 8)]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [("0x29 2", 2), ("0x10 2x20", None), ("_x29 1", 1), ("9x28 1 1", None)],
    ids=["new firings", "old firings", "new counter", "restart"],
)
def test_bars_of_anomalies_are_exact_and_at_their_time(judge, values, expected):
    given = {series("rankscope_anomaly_events_total", rule="AnomalyNan"): values}
    labels = None if expected is None else '{run="r", rule="AnomalyNan"}'

    assert promql_error(judge, given, [(incidents("Anomalies"), labels, expected)]) is None


def test_incidents_are_open_for_five_minutes_after_their_last_firing(judge):
    new, old = (series("rankscope_ingest_incident_age_seconds", rule=rule) for rule in ("New", "Old"))
    others = 'kind="x", op="x", rank="0", severity="x", step="x", tensor="x"'
    checks = [
        (incidents("Open incidents"), f'{{rule="New", {others}}}', AT * 1000),
        (incidents("Closed incidents"), f'{{rule="Old", {others}}}', -1000 * 1000),
    ]

    assert promql_error(judge, {new: "0x30", old: "1000+10x30"}, checks) is None


def test_time_since_last_commit_grows_while_the_service_is_down(judge):
    given = {"rankscope_ingest_last_commit_timestamp_seconds": "10x5 stale"}

    assert promql_error(judge, given, [(pipeline("Since last commit"), "{}", AT - 10)]) is None


@pytest.mark.thorough
def test_panels_have_at_most_20_lines_with_50_ranks(judge):
    cases = [query_of(BOARDS[name])(title, place) for name, title, place in DRAWN]
    pairs = [
        (given_series(one, RANKS), [(f"count({one}) > {MAX_LINES}", None, 0), (f"count({one}) > bool 0", "{}", 1)])
        for one in cases
    ]

    assert {None} == set(promql_errors(judge, pairs))
