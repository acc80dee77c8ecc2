"""Board "Speed and devices"."""

from __future__ import annotations

import json

import yaml
from tests.dashboards.boards.test_run_overview import VARIABLES, promql_error

from rankscope_dashboards.generate import generated_files

FILES = generated_files()
BOARD = json.loads(FILES["dashboards/rankscope/devices.json"])
PANELS = {panel["title"]: panel for panel in BOARD["panels"]}
GPU = 'job="rankscope", run="r", gpu="GPU-{rank}", rank="{rank}"'


def query(title, position=0):
    expression = PANELS[title]["targets"][position]["expr"]
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def test_slow_rank_is_visible_next_to_the_mean(judge):
    given = {}
    for rank, mfu, clock in ((0, "0.4", 1980), (1, "0.2", 990)):
        gpu = GPU.format(rank=rank)
        given[f'rankscope_mfu_ratio{{job="rankscope", run="r", rank="{rank}", method="formula"}}'] = f"{mfu}x30"
        given[f'rankscope_gpu_clock_hertz{{{gpu}, clock="sm"}}'] = f"{clock}000000x30"
        given[f'rankscope_gpu_clock_limit_hertz{{{gpu}, clock="sm"}}'] = "1980000000x30"
        given[f'rankscope_gpu_throttled{{{gpu}, reason="hw_thermal"}}'] = f"{rank}x30"
        given[f'rankscope_gpu_throttled{{{gpu}, reason="idle"}}'] = "0x30"
    checks = [
        (f"round({query('MFU')}, 0.001)", '{run="r", method="formula"}', 0.3),
        (query("MFU", 1), '{run="r", method="formula"}', 0.2),
        (query("SM clock"), '{run="r"}', 0.75),
        (query("SM clock", 1), '{run="r"}', 0.5),
        (query("Throttled GPUs"), '{run="r", reason="hw_thermal"}', 1),
    ]

    assert promql_error(judge, given, checks) is None


def test_gpu_alerts_link_to_the_devices_board():
    groups = yaml.safe_load(FILES["alerting/rules.yaml"])["groups"]
    (rules,) = [group["rules"] for group in groups if group["name"] == "rankscope-hardware"]

    titles = {panel["id"]: panel["title"] for panel in BOARD["panels"]}
    assert {BOARD["uid"]} == {rule["dashboardUid"] for rule in rules}
    assert ["GPU errors", "GPU errors", "Throttled GPUs"] == [titles[rule["panelId"]] for rule in rules]
