"""A rule is one value of a configuration: event, message, metric, alert, SQL, board and docs follow from it."""

import importlib.util
import json
import re
from pathlib import Path

import yaml
from tests.cli.test_sql_board import panel_rows
from tests.dashboards.conftest import BOARDS, query_of
from tests.end_to_end.test_offline import TRAINING, command, rows
from tests.programs import run_program

from rankscope_contract.rules import rule_from_config
from rankscope_dashboards.generate import PROVISIONING
from rankscope_storage.connection import connect
from rankscope_view.data.metrics import read_metrics, scalar_lines

ROOT = Path(__file__).parents[2]
RULE = {"rule_name": "ScoreRule", "args": {"name": "TooHigh", "score": 'scalar("loss") / 2', "above": 4.0}}
RULE["args"] |= {"summary": "the loss is too high", "latch": 100}
SPIKE = {"rule_name": "GradSpike", "args": {"above": 1e9}}  # a default rule with another limit

PAGE = """
    import time, urllib.request
    for _ in range(600):  # until the page has the last step
        page = urllib.request.urlopen(monitor.address + "/metrics", timeout=9).read().decode()
        if 'rule="TooHigh",run="alone"} 6.0' in page:
            break
        time.sleep(0.05)
    open("page", "w").write(page)
"""


def test_rule_of_a_configuration_needs_no_other_file(tmp_path, judge):
    (tmp_path / "monitor.json").write_text(json.dumps({"run": "alone", "rules": ["default", RULE, SPIKE]}))
    text = TRAINING.replace("SETTINGS", '"monitor.json"').replace("    AFTER", PAGE)
    done = run_program(text, folder=tmp_path, RANKSCOPE_SPOOL_DIR="", RANKSCOPE_INGEST_URL="")
    assert 0 == done.returncode, done.stderr
    store, page = tmp_path / "store", (tmp_path / "page").read_text()
    command("import", tmp_path / "rankscope-records", "--store", store)
    command("export", "alone", "--store", store, "--format", "parquet", "-o", tmp_path / "parquet" / "alone")

    # Message, event, and the scores of every step
    message = "TooHigh: the loss is too high (score 4.5, limit 4)"
    assert f"step 9, rank 0: {message}" in done.stderr
    anomalies = "SELECT step, op, value, threshold, message FROM events WHERE type = 'anomaly' AND rule = 'TooHigh'"
    event = {"step": 9, "op": "loss", "value": 4.5, "threshold": 4.0, "message": message}
    assert [event] == rows(store, anomalies)
    scores = "SELECT value FROM scalars WHERE name = 'rule_score' AND labels->>'rule' = 'TooHigh' ORDER BY step"
    assert [step / 2 for step in range(1, 13)] == [row["value"] for row in rows(store, scores)]

    # Page of the rank, the committed alerts, and the boards
    series = dict(re.findall(r"^(rankscope_rule_(?:score|threshold)\{.*?\}) (\S+)$", page, re.MULTILINE))
    assert {"TooHigh": "4.0", "GradSpike": "1e+09"}.items() <= {
        re.search('rule="(.+?)"', name)[1]: value for name, value in series.items() if "threshold" in name
    }.items()
    given = [
        {"series": name.replace("}", ',job="rankscope"}'), "values": " ".join([value] * 9)}
        for name, value in series.items()
    ]
    labels = 'alertname="ScoreAboveLimit", alertstate="firing", notification="none", severity="warning"'
    share = query_of(BOARDS["incidents"])("Scores of the rules").replace('run="r"', 'run="alone"')
    wanted = {
        'ALERTS{alertname="ScoreAboveLimit"}': (f'ALERTS{{{labels}, run="alone", rank="0", rule="TooHigh"}}', 1),
        f'({share}) and on (rule) (rankscope_rule_score{{rule="TooHigh"}})': ('{run="alone", rule="TooHigh"}', 1.5),
    }
    checks = [
        {"expr": query, "eval_time": "60s", "exp_samples": [{"labels": labels, "value": value}]}
        for query, (labels, value) in wanted.items()
    ]
    tests = [{"interval": "10s", "input_series": given, "promql_expr_test": checks}]
    committed = yaml.safe_load((PROVISIONING / "prometheus" / "rankscope.rules.yml").read_text())
    assert [None] == judge([(committed, {"evaluation_interval": "10s", "tests": tests})])

    # SQL board, pages, and the row of the docs
    title, times = "Largest scores of the rules", {"start": "2000-01-01", "end": "2999-01-01"}
    row = panel_rows(title, tmp_path / "parquet", run="alone", **times)[0]  # those that fired are the first ones
    assert ("TooHigh", 6.0, 4.0, 1, 12, 0, None) == tuple(row.values())
    with connect(store) as connection:
        assert "rule_score" not in read_metrics(connection, "alone").found
        assert [] == scalar_lines(connection, "alone", "rule_score")
    specification = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    specification.loader.exec_module(generate := importlib.util.module_from_spec(specification))
    assert "| `TooHigh` | The loss is too high. | 4 | warning | step |  |" in generate.score_rule_table(
        [rule_from_config(RULE)]
    )
