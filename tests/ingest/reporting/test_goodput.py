"""The service reads goodput after commits, and in a small share of the time."""

from __future__ import annotations

import re

import pytest

from rankscope_contract.model.schema import DATASETS
from rankscope_ingest.reporting.goodput import WITHOUT_TIME, GoodputReader
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_storage.sql.goodput import GOODPUT, GOODPUT_ATTEMPTS


class World:
    def __init__(self) -> None:
        self.now, self.commits, self.reads = 0.0, 1, 0

    def read(self) -> dict[str, float]:
        self.reads += 1
        return {"r": self.reads / 10}


@pytest.fixture
def world() -> World:
    return World()


def make_reader(world: World) -> GoodputReader:
    return GoodputReader(world.read, lambda: world.commits, read_seconds=30, clock=lambda: world.now)


def test_goodput_is_read_at_the_start_and_after_each_commit(world):
    goodput = make_reader(world)
    assert goodput.is_due
    goodput.read()
    world.now = 100
    assert not goodput.is_due
    world.commits = 2

    assert goodput.is_due
    assert {"r": 0.1} == goodput.ratios


def test_pause_between_reads_grows_to_15_intervals(world):
    goodput = make_reader(world)
    pauses = []
    for _ in range(17):
        read_at = world.now
        goodput.read()
        world.commits += 1
        while not goodput.is_due:
            world.now += 1
        pauses.append(world.now - read_at)

    assert [30, 60, 90, 120] == pauses[:4]
    assert [420, 450, 450, 450] == pauses[-4:]


def test_datasets_of_the_goodput_queries_are_not_in_without_time():
    statements = (GOODPUT + GOODPUT_ATTEMPTS).replace("_without_jumps", "")  # views with corrected times
    queried = DATASETS.keys() & set(re.findall(r"\w+", statements))

    assert {"scalars", "events", "attempts"} == queried
    assert not queried & WITHOUT_TIME


def test_page_contains_the_goodput_of_known_runs():
    metrics = ServiceMetrics()
    metrics.show_goodput({"here": 0.75, "gone": 0.5}, {"here", "new"})
    shown = [line for line in metrics.page().decode().splitlines() if line.startswith("rankscope_run_goodput_ratio")]

    assert ['rankscope_run_goodput_ratio{run="here"} 0.75'] == shown
