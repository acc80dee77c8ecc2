"""Board "Ranks" with slow ranks and GPUs."""

from __future__ import annotations

import yaml
from tests.dashboards.boards.promql import promql_error, query_of
from tests.dashboards.generated import BOARDS, FILES

from rankscope_dashboards.boards.elements.pages import all_panels

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
