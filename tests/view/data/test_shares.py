"""Every share of time against SQL over the raw rows of a run whose phases are sampled at different steps."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import run_row, scalars, write

from rankscope_storage.connection import connect
from rankscope_view.data.ranks import RECENT_STEPS, rank_table
from rankscope_view.data.summary import read_summary
from rankscope_view.pages.sections import sections

STEPS = 60
EVERY = {"data_wait": 1, "forward": 1, "backward": 1, "collective": 3, "checkpoint": 10, "evaluation": 20}
SECONDS = {"data_wait": 0.4, "forward": 0.1, "backward": 0.2, "collective": 0.6, "checkpoint": 3.0, "evaluation": 5.0}
RAW = """\
SELECT sum(value) FILTER (labels->>'$.phase' = '{phase}') / sum(value) AS share
FROM scalars WHERE run = 'r' AND name = 'step_phase_seconds' AND step > 0"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    tables, random = [], np.random.default_rng(3)
    for rank in range(2):
        step = np.arange(1, STEPS)
        whole = np.where(np.arange(STEPS) == 0, 20.0, 0.0)
        chosen = {"rank": rank, "incarnation": f"r-0-{rank}"}
        tables.append(phase_rows("first_step", np.array([0, 1]), np.array([20.0, 0.0]), chosen))
        for phase, every in EVERY.items():
            if phase == "collective" and rank == 1:
                continue  # the last rank does not wait
            at = step[step % every == 0]
            seconds = SECONDS[phase] * random.uniform(0.5, 1.5, len(at))
            whole[at] += seconds
            tables.append(phase_rows(phase, at, seconds, chosen))
        tables.append(scalars("r", "step_seconds", np.arange(STEPS), whole, **chosen))
    batch = {"runs": run_row("r", "completed"), "scalars": pa.concat_tables(tables)}
    with connect(write(tmp_path_factory.mktemp("shares") / "store", batch)) as connection:
        yield connection


def phase_rows(phase, step, seconds, columns):
    return scalars("r", "step_phase_seconds", step, seconds, labels=json.dumps({"phase": phase}), **columns)


def raw_share(connection, phase):
    (row,) = connection.query(RAW.format(phase=phase)).to_pylist()
    return row["share"]


def test_shares_are_sums_over_the_sum_of_the_same_steps(shares):
    found = read_summary(shares, "r")
    expected = {phase: raw_share(shares, phase) for phase in EVERY}
    shown = dict(part.rsplit(" ", 2)[:2] for part in found.speed.time_spent.split(", "))
    lines = dict(row for section in sections(found) for row in section.rows)

    waits = (found.speed.data_wait.value, found.speed.collective.value)
    assert pytest.approx((expected["data_wait"], expected["collective"])) == waits
    assert {phase.replace("_", " "): f"{100 * share:.1f}" for phase, share in expected.items()} == shown
    assert f"{100 * expected['data_wait']:.0f} % of the step time is waiting for data" in found.hints[0].observation
    assert lines["time of a step"] == found.speed.time_spent
    assert f"{100 * expected['data_wait']:.1f} % of the step time" in lines["data wait"]


def test_time_in_collectives_that_only_some_ranks_have_is_no_communication(shares, opened):
    """A rank that is late does not wait: the shortest time of a step is that of the collective itself."""
    tables = [
        phase_rows(phase, np.arange(1, 21), np.full(20, seconds), {"rank": rank, "incarnation": f"r-0-{rank}"})
        for rank, wait in ((0, 0.6), (1, 0.1))
        for phase, seconds in (("data_wait", 1 - wait), ("collective", wait))
    ]
    late = read_summary(opened(runs=run_row("r", "completed"), scalars=pa.concat_tables(tables)), "r").speed
    other = read_summary(shares, "r").speed

    assert other.collective.value == pytest.approx(other.for_slower)
    assert (0.35, 0.25) == (pytest.approx(late.collective.value), pytest.approx(late.for_slower))


def test_phases_of_a_rank_are_those_of_an_average_step(shares):
    table = rank_table(shares, "r")
    raw = shares.query(
        f"""SELECT rank, labels->>'$.phase' AS phase, sum(value) / {RECENT_STEPS} AS seconds FROM scalars
        WHERE run = 'r' AND name = 'step_phase_seconds' AND step >= {STEPS - RECENT_STEPS} GROUP BY ALL"""
    ).to_pylist()

    assert {(row["rank"], row["phase"]): pytest.approx(row["seconds"]) for row in raw} == {
        (row.rank, phase): seconds for row in table.rows for phase, seconds in row.phases.items()
    }
    assert [pytest.approx(row.step_seconds) for row in table.rows] == [sum(row.phases.values()) for row in table.rows]


def test_shares_of_the_sql_view_are_those_of_each_step(shares):
    worst = shares.query(
        """SELECT max(abs(share - seconds / step.value)) AS error FROM step_phases
        JOIN scalars AS step USING (run, rank, step) WHERE step.name = 'step_seconds' AND step > 0"""
    )["error"].to_pylist()

    assert [pytest.approx(0, abs=1e-12)] == worst
