"""Queries of all boards have the same result if Prometheus reads each process, or one rank, twice."""

from __future__ import annotations

import re

from tests.dashboards.boards import promql
from tests.dashboards.boards.promql import OTHER_JOB, OTHER_REPLICA, scraped_twice
from tests.dashboards.generated import BOARDS, PANELS

MARKS = [one for board in BOARDS.values() for one in board["annotations"]["list"][1:]]
EXPRESSIONS = [
    f"round({promql.substituted(item['expr'])}, 0.000001)"  # a sum of floats depends on their order
    for item in (*(target for _, panel in PANELS for target in panel["targets"]), *MARKS)
]
WITHOUT_RESULT = 8
"""Number of queries that select nothing from the series of this test, such as closed incidents, marks of values that
had not changed, or the spread between ranks, which are at different steps here."""


def results(judge, cases):
    """Return, for each collection of series, the samples of each expression that selects any."""
    errors = promql.promql_errors(judge, [(given, [(one, None, 0) for one in EXPRESSIONS]) for given in cases])
    assert all(errors)
    parts = [re.split(r"^ +expr: ", error, flags=re.MULTILINE)[1:] for error in errors]
    return [{part.partition(", time:")[0]: samples(part) for part in one} for one in parts]


def samples(part):
    """Return the samples, or the error, that promtool prints for an expression, in a fixed order."""
    return sorted(re.findall(r"\{[^}]*\} [-+.\w]+|err.*", part.partition(", time:")[2]))


def test_results_are_the_same_if_targets_are_scraped_twice(judge):
    given = {}
    for expression in EXPRESSIONS:
        given |= promql.given_series(expression, 3, lambda rank: f"{rank}+{rank + 1}x30")
    rank = {name: values for name, values in given.items() if 'rank="1"' in name}
    all_twice = [scraped_twice(given, **labels) for labels in (OTHER_JOB, OTHER_REPLICA)]
    once, *twice = results(judge, [given, *all_twice, given | scraped_twice(rank, **OTHER_REPLICA)])
    different = {text: (once.get(text), one.get(text)) for one in twice for text in one if once.get(text) != one[text]}

    assert {} == different
    assert [WITHOUT_RESULT] * 4 == [len(set(EXPRESSIONS)) - len(one) for one in (once, *twice)]
