"""The simulation of services and ranks: what must hold for each load, and the measured figures next to it."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
from benchmarks.simulation.fleet import GROUP_RANKS, Scenario, simulate

from rankscope.sizing.costs import Costs, Load, Service
from rankscope_storage.maintenance.compaction import SMALL_FILES

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks/sizing.json").read_text())
LARGE = {"ranks": 10_000, "tensors": 2_500, "step_seconds": 50.0, "seconds": 120.0}
USUAL = {"ranks": 1_000, "tensors": 2_500, "step_seconds": 5.0}
RESTART = USUAL | {"seconds": 250.0, "stop_at": 100.0, "stop_seconds": 60.0}
OVERLOAD = {"ranks": 2_000, "tensors": 20_000, "step_seconds": 5.0}


@functools.cache
def outcome(**scenario):
    return simulate(Scenario(**scenario))


@pytest.mark.parametrize(
    "scenario", [LARGE | {"services": 8}, RESTART, RESTART | {"spool_records": 6}, OVERLOAD | {"seconds": 200.0}]
)
def test_no_record_is_lost_or_doubled_unless_a_spool_is_full(scenario):
    found = outcome(**scenario)

    assert found.published == found.committed + found.waiting + found.lost
    assert found.committed > 0
    assert ("spool_records" in scenario) == (found.lost > 0)


def test_an_equal_seed_gives_an_equal_outcome():
    assert simulate(Scenario(**USUAL, seconds=60.0), seed=7) == simulate(Scenario(**USUAL, seconds=60.0), seed=7)


def test_lag_of_a_saturated_service_grows_by_the_difference_of_the_rates():
    early, late = (outcome(**OVERLOAD, seconds=seconds) for seconds in (200.0, 1_000.0))
    stored = (late.committed - early.committed) / (late.published - early.published)

    assert stored < 0.8
    assert (1 - stored) * 800 == pytest.approx(late.lag_end - early.lag_end, rel=0.15)


def test_back_pressure_bounds_the_rows_in_memory():
    scenario = Scenario(**RESTART)
    found = outcome(**RESTART)

    assert found.refused_polls > 0
    assert found.pending_rows <= scenario.ingest.max_pending_rows + GROUP_RANKS * scenario.rows


@pytest.mark.parametrize("more", [{"ranks": 2_000}, {"tensors": 5_000}, {"step_seconds": 2.5}])
def test_more_records_take_more_cpu_time_and_memory(more):
    small = USUAL | {"seconds": 100.0}
    less, larger = outcome(**small), outcome(**(small | more))

    assert less.cpu_seconds < larger.cpu_seconds
    assert less.memory(Scenario(**small)) <= larger.memory(Scenario(**(small | more)))


def test_several_services_hold_a_load_that_one_cannot_hold():
    one, eight = (outcome(**LARGE, services=services) for services in (1, 8))

    assert one.lag_end > 5 * eight.lag_median
    assert eight.lag_p99 <= 2 * Scenario(**LARGE).ingest.flush_after_seconds


def test_all_ranks_register_again_within_one_lease_after_a_restart():
    assert outcome(**RESTART).registered_after <= 30.0


def test_too_many_registrations_in_the_same_seconds_time_out():
    costs = dataclasses.replace(Costs(), registration=0.02)
    found = outcome(**RESTART, costs=costs)

    assert found.timed_out_registrations > 0
    assert found.registered_after > 20.0


def test_compaction_bounds_the_files():
    found = outcome(ranks=100, tensors=250, step_seconds=5.0, seconds=2_000.0)

    assert found.merges > 0
    assert found.files < SMALL_FILES * 3 + 100 < found.files_written


@pytest.mark.parametrize(("bad_steps", "messages"), [({3, 4, 5}, 1), ({3, 40}, 2), (set(), 0)])
def test_firings_of_all_ranks_are_one_message_per_incident(bad_steps, messages):
    found = outcome(ranks=1_000, tensors=25, step_seconds=5.0, seconds=300.0, bad_steps=frozenset(bad_steps))

    assert messages == found.messages


@pytest.mark.parametrize(
    ("ranks", "tensors", "step_seconds"), [(64, 2_500, 5.0), (1_000, 2_500, 5.0), (1_000, 25, 0.5)]
)
def test_the_formulas_of_sizing_agree_with_the_simulation(ranks, tensors, step_seconds):
    costs = dataclasses.replace(Costs(), merge=0.0)  # merges are minutes apart
    load = Load(ranks=ranks, tensors=tensors, every=1, step_seconds=step_seconds, scalars=3)
    service = Service(load=load, costs=costs)
    scenario = {"ranks": ranks, "tensors": tensors, "step_seconds": step_seconds, "costs": costs}
    early, late = (outcome(**scenario, seconds=seconds) for seconds in (50.0, 350.0))

    assert (late.cpu_seconds - early.cpu_seconds) / 300 == pytest.approx(service.cores, rel=0.15)
    assert (late.loop_seconds - early.loop_seconds) / 300 == pytest.approx(service.loop, rel=0.15)
    assert (late.commits - early.commits) / 300 == pytest.approx(service.commits, rel=0.25)  # few ranks: rare polls


def test_the_table_of_costs_is_that_of_the_calibration():
    assert RESULTS["costs"] == dataclasses.asdict(Costs())


@pytest.mark.parametrize("tensors", [250, 2_500])
def test_recorded_predictions_agree_with_simulation_and_measurements(tensors):
    scenario = Scenario(**(USUAL | {"tensors": tensors}), seconds=85.0)
    start, found = simulate(dataclasses.replace(scenario, seconds=10.0)), simulate(scenario)
    again = {
        "lag_median": found.lag_median,
        "lag_p99": found.lag_p99,
        "cores": (found.cpu_seconds - start.cpu_seconds) / 75.0,
        "commits_per_second": (found.commits - start.commits) / 75.0,
        "memory": found.memory(scenario),
    }
    predicted = RESULTS["predictions"][[250, 2_500].index(tensors)]

    assert predicted == pytest.approx(again)

    for run in RESULTS["measurements"]:
        if run["tensors"] == tensors:
            cores = run["cores"] * RESULTS["calibration"][0]["reference"] / run["reference"]
            measured = {name: run[name] for name in predicted} | {"cores": cores}

            assert predicted == pytest.approx(measured, rel=0.25)
