"""A clock that is set back in the middle of a run changes none of its figures."""

from pathlib import Path

import pytest

from rankscope_storage.api.summaries import summary
from rankscope_storage.connection import connect

TRAINING = Path(__file__).with_name("small_training.py")


@pytest.mark.thorough
def test_speed_of_a_run_whose_clock_is_set_back_by_an_hour(service, start_job):
    service.start()
    assert 0 == start_job(TRAINING, service.folder, 60, 0.05, -3600, RANKSCOPE_RUN="clock").wait(120)
    (run,) = service.wait_for(lambda: [run for run in service.runs() if run["state"] == "completed"])
    assert 0 == service.stop()
    with connect(service.store) as connection:
        found = summary(connection, "clock")
        span = "SELECT epoch(max(ts) - min(ts)) AS stored, (SELECT seconds FROM clock_jumps) AS jump FROM scalars"
        (times,) = connection.query(f"{span} WHERE name = 'loss'").to_pylist()
        (steps,) = connection.query("SELECT sum(value) AS s FROM scalars WHERE name = 'step_seconds'").to_pylist()

    truth = 60 * 32 / steps["s"]
    assert truth / 2 < found.tokens_per_second < truth * 2
    assert found.goodput is not None
    assert steps["s"] / 2 < found.wall_seconds < 120
    assert 0 < (run["ended_at"] - run["started_at"]) / 1e6 < 120
    assert -3600 == round(times["jump"])
    assert 0 < times["stored"] < 120
