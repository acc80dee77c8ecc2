"""Fixtures that evaluate alert rules and queries with promtool, and the generated files of dashboards and rules."""

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.generate import generated_files
from rankscope_storage.base.service_catalogue import CATALOG

Document = Mapping[str, Any]
Judge = Callable[[Sequence[tuple[Document, Document]]], list[str | None]]


@pytest.fixture
def promtool(require_server: Callable[..., str]) -> str:
    return require_server("promtool", "prometheus")


@pytest.fixture
def judge(promtool: str, tmp_path: Path) -> Judge:
    """Return a function that runs `promtool test rules` on pairs of (rule file, test file)."""
    # It returns one item for each pair: promtool's error text, or None if the test passed.

    def run(cases: Sequence[tuple[Document, Document]]) -> list[str | None]:
        names = [f"case{number}.yml" for number in range(len(cases))]
        for name, (rules, tests) in zip(names, cases, strict=True):
            (tmp_path / f"rules-of-{name}").write_text(yaml.safe_dump(rules), encoding="utf-8")
            document = yaml.safe_dump({**tests, "rule_files": [f"rules-of-{name}"]})
            (tmp_path / name).write_text(document, encoding="utf-8")
        command = [promtool, "test", "rules", *names]
        # Merge stdout and stderr: promtool prints file names to one and the errors of the file to the other.
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        text = subprocess.run(command, cwd=tmp_path, text=True, check=False, **both).stdout
        output = dict(re.findall(r"Unit Testing: +(\S+)\n(.*?)(?=\nUnit Testing:|\Z)", text, re.DOTALL))
        assert names == list(output), text
        return [None if output[name].strip() == "SUCCESS" else output[name] for name in names]

    return run


VARIABLES = {
    "$__rate_interval": "1m",
    "$__interval_ms": "30000",
    "$__interval": "30s",
    "$__range": "1h",
    "$smooth": "1m",
    "$run": "r",
    "$rank": ".+",
    "$host": ".+",
    "$kind": "grad_reduced",
    "$tensor": ".+",
    "$lines": ".+",
    "$rows": ".+",
}
AT = 300  # Time in seconds at which expressions are evaluated

OTHER_JOB = {"job": "pods", "instance": "10.0.0.1:9400"}
OTHER_REPLICA = {"replica": "b"}  # Labels of the second series of each pair, if Prometheus scrapes a process twice

Checks = Sequence[tuple[str, str | None, float]]
"""Expressions, the labels of the only sample of each (None: no sample), and the value of this sample."""


def substituted(expression: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """Return the expression with values for the variables of the boards."""
    for variable, value in variables.items():
        expression = expression.replace(variable, value)
    return expression


def query_of(board: Mapping[str, Any]) -> Callable[..., str]:
    """Return a function that returns a query of a panel of `board`, by the title of the panel and its position."""
    panels = {panel["title"]: panel for panel in all_panels(dict(board))}
    return lambda title, position=0: substituted(panels[title]["targets"][position]["expr"])


def series(metric: str, **changes: str) -> str:
    """Return a series of the catalogue in run r, with value x for the labels that `changes` does not contain."""
    labels = dict.fromkeys(CATALOG[metric].all_labels, "x") | {"run": "r", "rank": "0"} | changes
    own = {name: value for name, value in labels.items() if name in CATALOG[metric].all_labels}
    own |= {"job": "rankscope"} if CATALOG[metric].page == "rank" else {}
    return _named(metric, own)


def _named(metric: str, labels: Mapping[str, str]) -> str:
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def given_series(expression: str, ranks: int, values: Callable[[int], str] = lambda rank: "0+1x30") -> dict[str, str]:
    """Return series of some ranks for each selector of the expression, with the label values that it selects."""
    given = {}
    for metric, selector in re.findall(r"(rankscope_\w+)(?:\{([^}]*)\})?", expression):
        selected = re.findall(r'(\w+)=~?"([^"]+)"', selector)
        labels = {name: value.split("|")[0] for name, value in selected if value != ".+"}
        for rank in range(ranks):
            given[series(metric, **labels | {"rank": str(rank)})] = values(rank)
    return given


def scraped_twice(given: Mapping[str, str], **target: str) -> dict[str, str]:
    """Return the series `given`, and each of them once more with the labels `target` of its scrape."""
    copies = {}
    for name, values in given.items():
        metric = name.partition("{")[0]
        copies[_named(metric, dict(re.findall(r'(\w+)="([^"]*)"', name)) | target)] = values
    return {**given, **copies}


def promql_error(judge: Any, given: Mapping[str, str], checks: Checks) -> str | None:
    """Return promtool's error, or None if each expression has the expected result at the end of the series `given`."""
    (error,) = promql_errors(judge, [(given, checks)])
    return error


def promql_errors(judge: Any, cases: Sequence[tuple[Mapping[str, str], Checks]]) -> list[str | None]:
    """Return promtool's error, or None, for each pair of series and checks. All pairs use one process."""
    found: list[str | None] = judge([({"groups": []}, _document(given, checks)) for given, checks in cases])
    return found


def _document(given: Mapping[str, str], checks: Checks) -> dict[str, Any]:
    queries = [
        {
            "expr": expression,
            "eval_time": f"{AT}s",
            "exp_samples": [] if labels is None else [{"labels": labels, "value": value}],
        }
        for expression, labels, value in checks
    ]
    series = [{"series": name, "values": values} for name, values in given.items()]
    return {
        "evaluation_interval": "10s",
        "tests": [{"interval": "10s", "input_series": series, "promql_expr_test": queries}],
    }


FILES = MappingProxyType(generated_files())
"""The text of each file by its path. It is generated once in a process, which takes a second."""

BOARDS = {Path(name).stem: json.loads(text) for name, text in FILES.items() if name.endswith(".json")}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in all_panels(board) if panel["type"] != "row"]
"""The name of its board, and the panel."""
