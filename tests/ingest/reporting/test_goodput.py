"""The service asks the store for goodput: when something is new, and for a small share of the time only."""

from __future__ import annotations

import re

import pytest

from rankscope_contract.model.schema import DATASETS
from rankscope_ingest.reporting.goodput import WITHOUT_TIME, GoodputReader
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_storage.sql.goodput import GOODPUT, GOODPUT_ATTEMPTS


class World:
    def __init__(self) -> None:
        self.now, self.commits, self.looks, self.takes = 0.0, 1, 0, 0.0

    def read(self) -> dict[str, float]:
        self.looks += 1
        self.now += self.takes
        return {"r": self.looks / 10}


@pytest.fixture
def world() -> World:
    return World()


def watch(world: World) -> GoodputReader:
    return GoodputReader(world.read, lambda: world.commits, look_seconds=30, clock=lambda: world.now)


def test_it_looks_at_once_and_then_where_something_was_committed(world):
    goodput = watch(world)
    assert goodput.due()
    goodput.look()
    world.now = 100
    assert not goodput.due()
    world.commits = 2

    assert goodput.due()
    assert {"r": 0.1} == goodput.ratios


def test_the_longer_it_watches_the_longer_it_pauses(world):
    goodput = watch(world)
    pauses = []
    for _ in range(17):
        looked_at = world.now
        goodput.look()
        world.commits += 1
        while not goodput.due():
            world.now += 1
        pauses.append(world.now - looked_at)

    assert [30, 60, 90, 120] == pauses[:4]
    assert [420, 450, 450, 450] == pauses[-4:]


def test_a_long_history_is_asked_less_often(world):
    goodput = watch(world)
    world.takes = 6.0
    goodput.look()
    world.commits = 2
    due = []
    for world.now in (31, 299, 301):
        due.append(goodput.due())

    assert [False, False, True] == due  # 6 s are 2 % of 300


def test_what_it_is_counted_from_is_not_among_what_says_nothing_of_time():
    asked = DATASETS.keys() & set(re.findall(r"\w+", GOODPUT + GOODPUT_ATTEMPTS))

    assert {"scalars", "events", "attempts"} == asked
    assert not asked & WITHOUT_TIME


def test_the_page_has_it_for_runs_that_are_known(world):
    metrics = ServiceMetrics()
    metrics.show_goodput({"here": 0.75, "gone": 0.5}, {"here", "new"})
    shown = [line for line in metrics.page().decode().splitlines() if line.startswith("rankscope_run_goodput_ratio")]

    assert ['rankscope_run_goodput_ratio{run="here"} 0.75'] == shown
