"""Selection of the event log by type, severity and rank."""

from __future__ import annotations

import pytest
from tests.view.training import MAIN

from rankscope_contract.model.events import Severity
from rankscope_view.data.detail import read_detail
from rankscope_view.data.event_query import EventQuery, select_events
from rankscope_view.data.events import NEWEST


@pytest.fixture(scope="module")
def detail(connection):
    return read_detail(connection, MAIN)


def select(detail, **choices):
    return select_events(detail, EventQuery(**{"newest": 1000} | choices)).lines


def test_types_are_groups_or_types_of_events(connection, detail):
    expected = connection.query(f"SELECT count(*) AS n FROM events WHERE run = '{MAIN}' AND type = 'checkpoint'")

    assert {"launch"} == {line.type for line in select(detail, types=["restart"])}
    assert expected["n"].to_pylist() == [len(select(detail, types=["checkpoint"]))]
    assert {"launch", "step"} == {line.type for line in select(detail, types=["launch", "step"])}
    assert 138 == len(select(detail, types=["step"]))


def test_severity_selects_steps_with_nan_and_a_rank_no_steps(detail):
    critical, of_rank = select(detail, severity=Severity.CRITICAL), select(detail, rank=1)

    assert {"step", "anomaly", "incident"} == {line.type for line in critical}
    assert all("loss NaN" in line.text for line in critical if line.type == "step")
    assert {"warning", "critical"} == {line.severity for line in select(detail, severity=Severity.WARNING)}
    assert all(1 in line.ranks and line.type != "step" for line in of_rank)


def test_newest_lines_of_all_types_come_first_and_counts_are_of_all(detail):
    found = select_events(detail, EventQuery())
    times = [line.at for line in select(detail)]

    assert min(NEWEST, len(times)) == len(found.lines)
    assert sorted(times, reverse=True) == times
    assert sum(found.counts.values()) == len(times)
    assert found.counts == select_events(detail, EventQuery(types=["launch"])).counts
