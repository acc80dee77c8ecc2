"""State, progress, end and incidents of runs as Prometheus requests them from the store."""

from __future__ import annotations

import math

import pytest
from tests.storage.prometheus.conftest import JULY, MARCH, History, row, stored
from tests.storage.rows import table

from rankscope_contract.model.events import RunState

MINUTE = 60_000
SECOND_ATTEMPT = MARCH + 5 * MINUTE


def version(run, attempt, ms, state, step, ended_ms=None):
    numbers = {"planned_steps": 10, "last_step": step, "world_size": 2, "source_kind": "live"}
    started = {0: MARCH, 1: SECOND_ATTEMPT}[attempt]
    times = {"started_at": started * 1000, "ended_at": None if ended_ms is None else ended_ms * 1000}
    return {**row(run, None, None, ms), "attempt": attempt, "state": state, **numbers, **times}


def incident(run, ms, state):
    labels = {"rule": "AnomalyNan", "severity": "critical", "kind": "grad_reduced", "tensor": "head", "op": "norm"}
    return row(run, 1, 7, ms, type="incident", message="", details=f'{{"state":"{state}"}}', **labels)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    versions = [
        version("spring", 0, MARCH, "running", 1),
        version("spring", 0, MARCH + MINUTE, "failed", 4, MARCH + MINUTE),
        version("spring", 1, SECOND_ATTEMPT, "running", 5),
        version("spring", 0, SECOND_ATTEMPT + 1, "failed", 4, MARCH + MINUTE),
        version("spring", 1, SECOND_ATTEMPT + MINUTE, "completed", 10, SECOND_ATTEMPT + MINUTE),
        version("other", 0, MARCH, "running", 2),
    ]
    events = [incident("spring", MARCH + MINUTE, "opened"), incident("spring", MARCH + 2 * MINUTE, "resolved")]
    events.append(incident("spring", MARCH + 2 * MINUTE + 500, "resolved"))
    events.append(row("spring", 0, 1, MARCH, type="note", severity="info", message="", details="{}"))
    losses = [
        row("spring", rank, step, MARCH + 9 * step + 10 * rank, name="loss", value=value, unit=None, labels=None)
        for rank, step, value in ((0, 1, 3.0), (1, 1, 4.0), (0, 2, 2.0), (1, 2, 5.0), (0, 3, 1.0))
    ]
    losses += [
        {**row("spring", rank, step, ms, name="grad_norm", value=float(step)), "attempt": attempt}
        for rank in (0, 1)
        for attempt, step, ms in ((0, 4, MARCH + 1), (1, 10, SECOND_ATTEMPT + MINUTE))
    ]
    rows = {"attempts": versions, "events": events, "scalars": losses}
    tables = {name: table(name, listed) for name, listed in rows.items()}
    with stored(tmp_path_factory.mktemp("runs") / "store", tables) as connection:
        yield History(connection)


SPRING = (("job", "=", "rankscope"), ("run", "=", "spring"))


def of_spring(metric, *labels):
    return tuple(sorted((("__name__", metric), ("job", "rankscope"), ("run", "spring"), *labels)))


def test_run_has_the_values_of_its_latest_attempt_at_each_time(history):
    times = [MARCH, MARCH + MINUTE, SECOND_ATTEMPT, SECOND_ATTEMPT + MINUTE]
    expected = {
        "rankscope_run_step": [1.0, 4.0, 5.0, 10.0],
        "rankscope_run_progress_ratio": [0.1, 0.4, 0.5, 1.0],
        "rankscope_run_attempt": [0.0, 0.0, 1.0, 1.0],
        "rankscope_run_steps_planned": [10.0] * 4,
        "rankscope_run_ranks_expected": [2.0] * 4,
        "rankscope_run_start_timestamp_seconds": [MARCH / 1000] * 2 + [SECOND_ATTEMPT / 1000] * 2,
    }

    for metric, values in expected.items():
        found = history.ask(*SPRING, ("__name__", "=", metric))
        assert {of_spring(metric): list(zip(times, values, strict=True))} == found
    metric, ends = "rankscope_run_end_timestamp_seconds", (MARCH + MINUTE, SECOND_ATTEMPT + MINUTE)
    assert {of_spring(metric): [(ms, ms / 1000) for ms in ends]} == history.ask(*SPRING, ("__name__", "=", metric))


def test_loss_of_a_run_is_the_mean_of_the_ranks_that_logged_it_at_each_step(history):
    """As a curve, the loss ends with each attempt."""
    means = [(MARCH + 9, 3.5), (MARCH + 18, 3.5), (MARCH + 27, 1.0)]  # rank 1 logs step 2 after rank 0 logs step 3
    ends = [(MARCH + MINUTE + 1, "stale"), (SECOND_ATTEMPT + MINUTE + 1, "stale")]

    found = history.ask(*SPRING, ("__name__", "=", "rankscope_run_loss"))[of_spring("rankscope_run_loss")]

    assert [*means, *ends] == [(ms, "stale" if math.isnan(value) else value) for ms, value in found]


def test_each_state_is_one_series_that_is_1_while_it_lasts(history):
    found = history.ask(*SPRING, ("__name__", "=", "rankscope_run_state"))
    values = {dict(labels)["state"]: [value for _, value in samples] for labels, samples in found.items()}

    assert set(RunState) == values.keys()
    assert {"running": [1.0, 0.0, 1.0, 0.0], "failed": [0.0, 1.0, 0.0, 0.0], "completed": [0.0, 0.0, 0.0, 1.0]} == {
        state: numbers for state, numbers in values.items() if 1.0 in numbers
    }
    one = history.ask(*SPRING, ("__name__", "=", "rankscope_run_state"), ("state", "=", "failed"), alone=True)
    assert [[(SECOND_ATTEMPT + MINUTE, 0.0)]] == list(one.values())


def test_incident_has_the_labels_of_the_service_and_the_age_0(history):
    found = history.ask(*SPRING, ("__name__", "=", "rankscope_ingest_incident_age_seconds"))
    labels = {"rank": "1", "rule": "AnomalyNan", "severity": "critical", "kind": "grad_reduced", "tensor": "head"}

    key = of_spring("rankscope_ingest_incident_age_seconds", *labels.items(), ("op", "norm"), ("step", "7"))
    assert {key: [(MARCH + MINUTE, 0.0)]} == found


def test_latest_events_have_a_sample_for_each_minute_with_the_time_as_value(history):
    found = history.ask(*SPRING, ("__name__", "=", "rankscope_event_last_timestamp_seconds"))
    times = [MARCH + MINUTE, MARCH + 2 * MINUTE + 500]

    name = "rankscope_event_last_timestamp_seconds"
    expected = {"incident": times, "note": [MARCH]}
    assert {
        of_spring(name, ("type", kind)): [(ms, ms / 1000) for ms in moments] for kind, moments in expected.items()
    } == found


def test_runs_are_selected_by_job_run_time_and_labels(history):
    step = ("__name__", "=", "rankscope_run_step")

    assert {} == history.ask(step, ("job", "=", "rankscope-service"))
    assert {} == history.ask(step, ("job", "=", "rankscope"), ("rank", "=", "0"))
    assert {} == history.ask(*SPRING, step, start=JULY)
    assert {"spring", "other"} == {dict(labels)["run"] for labels in history.ask(step, ("run", "=~", "spring|other"))}


def test_curve_ends_with_each_attempt(history):
    """Prometheus does not repeat the last value after a staleness marker."""
    (found,) = history.ask(("__name__", "=", "rankscope_grad_norm"), ("rank", "=", "1"), *SPRING).values()
    before_end, end = SECOND_ATTEMPT + MINUTE, SECOND_ATTEMPT + MINUTE + 1

    assert [(MARCH + 1, 4), (MARCH + MINUTE + 1, "stale"), (before_end, 10), (end, "stale")] == [
        (ms, "stale" if math.isnan(value) else value) for ms, value in found
    ]
    (live,) = history.ask(("__name__", "=", "rankscope_grad_norm"), ("rank", "=", "1"), *SPRING, end=MARCH + 2).values()
    assert [(MARCH + 1, 4)] == live
