"""Queries of the boards: ended runs, dead and slow ranks, a service that is down, and processes that are read twice."""

import re

import pytest
import yaml
from tests.dashboards.conftest import (
    AT,
    BOARDS,
    FILES,
    OTHER_JOB,
    OTHER_REPLICA,
    PANELS,
    given_series,
    promql_error,
    promql_errors,
    query_of,
    scraped_twice,
    series,
    substituted,
)

from rankscope_dashboards.boards.elements.pages import all_panels

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


BOARD = BOARDS["ranks"]
query = query_of(BOARD)
GPU = 'job="rankscope", run="r", gpu="GPU-{rank}", rank="{rank}"'


def test_slow_rank_is_visible_next_to_the_mean(judge):
    given = {}
    for rank, clock in ((0, 1980), (1, 990)):
        gpu = GPU.format(rank=rank)
        given[f'rankscope_gpu_clock_hertz{{{gpu}, clock="sm"}}'] = f"{clock}000000x30"
        given[f'rankscope_gpu_clock_limit_hertz{{{gpu}, clock="sm"}}'] = "1980000000x30"
        given[f'rankscope_gpu_throttled{{{gpu}, reason="hw_thermal"}}'] = f"{rank}x30"
        given[f'rankscope_gpu_throttled{{{gpu}, reason="idle"}}'] = "0x30"
        given[f'rankscope_step_seconds{{job="rankscope", run="r", rank="{rank}"}}'] = "1x30"
    checks = [
        (query("SM clock"), '{run="r"}', 0.75),
        (query("SM clock", 1), '{run="r"}', 0.5),
        (query("Throttled GPUs"), '{run="r", reason="hw_thermal"}', 1),
    ]

    assert promql_error(judge, given, checks) is None


def test_rank_with_slow_data_is_named(judge):
    """In each second, rank 1 waits 0.8 s for data, and both compute 0.2 s. The median of 1.0 and 0.2 is 0.6."""
    given = {}
    for rank, waited in ((0, "0x30"), (1, "0+8x30")):
        labels = f'job="rankscope", run="r", rank="{rank}"'
        given[f"rankscope_pre_collective_seconds_total{{{labels}}}"] = "0+2x30"
        given[f'rankscope_phase_seconds_total{{{labels}, phase="data_wait"}}'] = waited
        given[f'rankscope_phase_seconds_total{{{labels}, phase="forward"}}'] = "0+2x30"
        given[f"rankscope_step{{{labels}}}"] = "0+10x30"
        given[f"rankscope_step_seconds{{{labels}}}"] = "1x30"
    slow, waits = (f"round({query(title)}, 0.001) > 0.5" for title in ("Slow ranks", "Wait for data"))

    named, with_host = '{run="r", rank="1"}', '{run="r", rank="1", host="n2"}'
    known = given | {f'rankscope_run_info{{run="r", rank="{rank}", host="n{rank + 1}"}}': "1x30" for rank in range(2)}
    one_host = waits.replace('host!~".+"', 'host!~"n2"')
    assert promql_error(judge, given, [(slow, named, 1.667), (waits, named, 0.8)]) is None
    assert promql_error(judge, known, [(slow, with_host, 1.667), (one_host, with_host, 0.8)]) is None
    assert promql_error(judge, known, [(waits.replace('host!~".+"', 'host!~"n1"'), None, 0)]) is None


def test_rank_that_stops_is_shown_with_its_steps_behind(judge):
    given = {
        'rankscope_step{job="rankscope", run="r", rank="0"}': "0+1x30",
        'rankscope_step{job="rankscope", run="r", rank="1"}': "0+1x10 10x20",
        'rankscope_step_seconds{job="rankscope", run="r", rank="1"}': "1x30",
    }

    assert promql_error(judge, given, [(f"({query('Steps behind')}) > 0", '{run="r", rank="1"}', 20)]) is None
    assert '(rankscope_run_info{run="r"}[1h] @ end())' in query("Steps behind"), "one host of a rank in the legend"


def test_spread_between_ranks_compares_equal_steps(judge):
    """Two ranks are scraped at different times. A step that is not in the store has no `rankscope_kind_step`."""
    labels = 'job="rankscope", run="r", kind="grad_reduced"'
    spread = query_of(BOARDS["tensors"])("Spread between ranks")
    norms = {
        f'rankscope_tensor_value{{{labels}, tensor="w", op="norm", rank="{rank}"}}': f"{1 + rank}x30"
        for rank in range(2)
    }
    shown = '{run="r", kind="grad_reduced", tensor="w"}'

    for steps, labels_shown in (((7, 7), shown), ((7, 8), None), ((), shown)):
        made = {f'rankscope_kind_step{{{labels}, rank="{rank}"}}': f"{step}x30" for rank, step in enumerate(steps)}
        assert promql_error(judge, norms | made, [(spread, labels_shown, 0.5)]) is None, steps


def test_gpu_alerts_link_to_the_board_of_ranks():
    groups = yaml.safe_load(FILES["alerting/rules.yaml"])["groups"]
    (rules,) = [group["rules"] for group in groups if group["name"] == "rankscope-hardware"]

    titles = {panel["id"]: panel["title"] for panel in all_panels(BOARD)}
    assert {BOARD["uid"]} == {rule["dashboardUid"] for rule in rules}
    assert ["GPU errors", "GPU errors", "Throttled GPUs"] == [titles[rule["panelId"]] for rule in rules]


MARKS = [one for board in BOARDS.values() for one in board["annotations"]["list"][1:]]
EXPRESSIONS = [
    f"round({substituted(item['expr'])}, 0.000001)"  # a sum of floats depends on their order
    for item in (*(target for _, panel in PANELS for target in panel["targets"]), *MARKS)
]
WITHOUT_RESULT = 8  # queries that select nothing here: closed incidents, marks without a change, spread of ranks


def results(judge, cases):
    """Return, for each collection of series, the samples of each expression that selects any."""
    errors = promql_errors(judge, [(given, [(one, None, 0) for one in EXPRESSIONS]) for given in cases])
    assert all(errors)
    parts = [re.split(r"^ +expr: ", error, flags=re.MULTILINE)[1:] for error in errors]
    return [{part.partition(", time:")[0]: samples(part) for part in one} for one in parts]


def samples(part):
    """Return the samples, or the error, that promtool prints for an expression, in a fixed order."""
    return sorted(re.findall(r"\{[^}]*\} [-+.\w]+|err.*", part.partition(", time:")[2]))


def test_results_are_the_same_if_targets_are_scraped_twice(judge):
    given = {}
    for expression in EXPRESSIONS:
        given |= given_series(expression, 3, lambda rank: f"{rank}+{rank + 1}x30")
    rank = {name: values for name, values in given.items() if 'rank="1"' in name}
    all_twice = [scraped_twice(given, **labels) for labels in (OTHER_JOB, OTHER_REPLICA)]
    once, *twice = results(judge, [given, *all_twice, given | scraped_twice(rank, **OTHER_REPLICA)])
    different = {text: (once.get(text), one.get(text)) for one in twice for text in one if once.get(text) != one[text]}

    assert {} == different
    assert [WITHOUT_RESULT] * 4 == [len(set(EXPRESSIONS)) - len(one) for one in (once, *twice)]
