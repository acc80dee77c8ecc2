"""The parts of the wall time of a run, compared with hand-written times; they always add up to the whole."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.rows import ask, put, table

from rankscope_storage.api.store import Batch
from rankscope_storage.sql.goodput import PARTS, STATEMENTS

START = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


class History:
    """Builds the rows of a run, as a service would have stored them, second by second."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {"scalars": [], "events": [], "attempts": []}
        self._seq = 0

    def launch(self, attempt: int, began: float, ended: float | None) -> None:
        times = {"started_at": at(began), "ended_at": None if ended is None else at(ended)}
        self.rows["attempts"].append({"attempt": attempt, "state": "x", "source_kind": "live", **times})

    def step(self, attempt: int, step: int, ended: float, seconds: float, *, rank: int = 0, **phases: float) -> None:
        row = self._row(attempt, ended, rank) | {"step": step}
        self.rows["scalars"].append(row | {"name": "step_seconds", "value": seconds})
        for phase, value in phases.items():
            labels = json.dumps({"phase": phase})
            self.rows["scalars"].append(row | {"name": "step_phase_seconds", "value": value, "labels": labels})

    def event(self, attempt: int, when: float, kind: str, *, seconds: float | None = None, **details: Any) -> None:
        row = self._row(attempt, when, 0) | {"type": kind, "value": seconds, "details": json.dumps(details)}
        self.rows["events"].append(row)

    def tables(self) -> dict[str, pa.Table]:
        return {dataset: table(dataset, rows, run="r") for dataset, rows in self.rows.items()}

    def put(self, writer: Any) -> None:
        known = {row["incarnation"]: self._seq for name in ("scalars", "events") for row in self.rows[name]}
        writer.append(Batch(tables=self.tables(), watermarks=known))

    def _row(self, attempt: int, when: float, rank: int) -> dict[str, Any]:
        self._seq += 1
        who = {"attempt": attempt, "rank": rank, "incarnation": f"{attempt}/{rank}", "seq": self._seq}
        return {**who, "ts": at(when), "ts_origin": "rank"}


def parts(row: dict[str, Any]) -> dict[str, float]:
    return {part: round(row[f"{part}_seconds"], 6) for part in PARTS if row[f"{part}_seconds"]}


@pytest.fixture
def whole(writer, connection):
    """Return a function that stores a history and returns the row of `goodput`."""

    def made(history: History) -> dict[str, Any]:
        history.put(writer)
        (row,) = connection.query("FROM goodput").to_pylist()
        return row

    return made


@pytest.fixture
def killed() -> History:
    """Return a run that was killed at 160 s, after step 8, and restarted at 200 s from the checkpoint after step 5.

    The first step begins at 12 s and takes 20 s. Later steps take 10 s, with a checkpoint of 8 s after step 5 and an
    evaluation of 5 s after step 3.
    """
    history = History()
    history.launch(0, 0, 160)
    history.step(0, 1, 32, 20, first_step=20)
    ends = {2: 42, 3: 57, 4: 67, 5: 85, 6: 95, 7: 105, 8: 115}
    apart = {3: {"evaluation": 5.0}, 5: {"checkpoint": 8.0, "forward": 10.0}}
    last = 32.0
    for step, end in ends.items():
        history.step(0, step, end, end - last, **apart.get(step, {}))
        last = end
    history.launch(1, 200, None)
    history.step(1, 6, 230, 25, first_step=25)
    history.step(1, 7, 240, 10)
    history.step(1, 8, 250, 10)
    history.step(1, 9, 262, 12, warm_cache=2.0)
    return history


def test_parts_of_a_run_that_was_killed_and_restarted(killed, writer, connection):
    killed.put(writer)
    first, second = connection.query("FROM goodput_attempts ORDER BY attempt").to_pylist()
    (run,) = connection.query("FROM goodput").to_pylist()

    # Steps 2 to 5 are useful; 6 to 8 were repeated.
    assert {
        "startup": 12, "first_step": 20, "useful": 40, "evaluation": 5, "checkpoint": 8, "lost": 30, "idle": 45,
    } == parts(first)  # fmt: skip
    assert {"downtime": 40, "startup": 5, "first_step": 25, "useful": 30, "other_phase": 2} == parts(second)
    assert (160, 102, 262) == (first["wall_seconds"], second["wall_seconds"], run["wall_seconds"])
    assert (8, 3, 4, 0) == (first["steps"], first["lost_steps"], second["steps"], second["lost_steps"])
    assert pytest.approx(70 / 262) == run["goodput"]
    assert (2, 12, 3) == (run["attempts"], run["steps"], run["lost_steps"])


@pytest.mark.parametrize(
    ("launched", "ended", "hangs", "expected"),
    [
        (100, 45, [(30, 15.0, "began"), (40, 25.0, "ended"), (70, 25.0, "began")], {"useful": 10, "hang": 25 + 55}),
        (50, 50, [(30, 15.0, "began")], {"useful": 5, "hang": 15 + 20}),  # Ctrl-C ends the step, but not the hang
    ],
)
def test_hang_is_subtracted_from_its_step_and_an_open_one_is_the_rest(whole, launched, ended, hangs, expected):
    """An event at 30 s reports 15 s without a sign of training."""
    history = History()
    history.launch(0, 0, launched)
    history.step(0, 1, 10, 10)
    history.step(0, 2, ended, ended - 10)
    for when, seconds, state in hangs:
        history.event(0, when, "hang", seconds=seconds, state=state)

    assert {"first_step": 10, **expected} == parts(whole(history))


def test_skipped_steps_and_steps_repeated_by_the_script_are_lost(whole):
    history = History()
    history.launch(0, 0, 60)
    for ended, step in ((10, 1), (20, 2), (30, 3), (40, 3), (50, 4), (60, 5)):  # step 3 is repeated within one process
        history.step(0, step, ended, 10)
    skipped = {key: history.rows["scalars"][-1][key] for key in ("attempt", "rank", "incarnation", "seq", "ts")}
    history.rows["events"].append({**skipped, "type": "step_skipped"})

    assert {"first_step": 10, "useful": 30, "lost": 20} == parts(whole(history))


def test_lowest_rank_counts_and_a_launch_without_steps_is_startup(writer, connection):
    history = History()
    history.launch(0, 0, 7)
    history.launch(1, 10, None)
    for rank in (3, 1):
        history.step(1, 1, 20, 10, rank=rank)
        history.step(1, 2, 30, 10, rank=rank)
    history.put(writer)
    rows = connection.query("FROM goodput_attempts ORDER BY attempt").to_pylist()

    assert [{"startup": 7}, {"downtime": 3, "first_step": 10, "useful": 10}] == [parts(row) for row in rows]


def test_imported_run_has_no_wall_time(writer, connection):
    put(writer, "scalars", [{"run": "r", "attempt": 0, "step": 1, "name": "step_seconds", "value": 1.0, "ts": START}])

    assert [] == ask(connection, "FROM goodput")


def test_share_of_each_phase_of_a_step(killed, writer, connection):
    killed.put(writer)
    asked = "SELECT phase, seconds, share FROM step_phases WHERE attempt = 0 AND step = 5 ORDER BY phase"

    assert [("checkpoint", 8.0, 8 / 18), ("forward", 10.0, 10 / 18)] == ask(connection, asked)


@pytest.mark.thorough
def test_memory_of_the_query_does_not_grow_with_the_number_of_ranks():
    """A service runs this query every minute, and 3.2 million rows of 800 ranks do not fit into the memory limit."""
    with duckdb.connect(config={"memory_limit": "20MB", "max_temp_directory_size": "0B", "threads": 2}) as plain:
        for dataset, table in History().tables().items():
            plain.register(f"no_{dataset}", table)
        plain.execute("CREATE VIEW attempts AS FROM no_attempts; CREATE VIEW events AS FROM no_events")
        plain.execute(f"""
            CREATE VIEW scalars AS FROM no_scalars UNION ALL BY NAME
            SELECT 'r' AS run, 0 AS attempt, (i // 4000)::INTEGER AS rank, 'process ' || i // 4000 AS incarnation,
              i // 4 % 1000 AS seq, i // 4 % 1000 AS step,
              TIMESTAMPTZ '{START}' + INTERVAL (i // 4 % 1000) SECONDS AS ts,
              CASE WHEN i % 4 = 0 THEN 'step_seconds' ELSE 'step_phase_seconds' END AS name,
              [1, 0.25, 0.25, 0.25][i % 4 + 1] AS value,
              [NULL, '{{"phase": "checkpoint"}}', '{{"phase": "mine"}}', '{{"phase": "mine"}}'][i % 4 + 1] AS labels
            FROM range(3200000) numbers(i)""")
        for statement in STATEMENTS:
            plain.execute(statement)
        (row,) = plain.sql("FROM goodput").to_arrow_table().to_pylist()

    assert 1000 == row["steps"]
    expected = {"useful": 999 / 4, "checkpoint": 999 / 4, "other_phase": 999 / 2}
    assert expected == parts(row)  # the first step takes no time


TIMES = st.floats(-20, 120, allow_nan=False)
PHASES = st.dictionaries(st.sampled_from(["checkpoint", "evaluation", "forward", "mine"]), st.floats(0, 50), max_size=3)
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), TIMES, st.floats(0, 60), PHASES), max_size=12)
HANGS = st.lists(st.tuples(st.integers(0, 2), TIMES, st.floats(0, 60), st.sampled_from(["began", "ended"])), max_size=3)


@pytest.mark.thorough
@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.tuples(TIMES, st.none() | TIMES), max_size=3), STEPS, HANGS)
def test_parts_add_up_to_the_wall_time_for_any_rows(launches, steps, hangs):
    """Clocks differ, launches and steps overlap, steps are longer than the elapsed time, phases are too long."""
    history = History()
    for number, (began, ended) in enumerate(launches):
        history.launch(number, began, ended)
    for attempt, step, ended, seconds, phases in steps:
        history.step(attempt, step, ended, seconds, **phases)
    for attempt, when, seconds, state in hangs:
        history.event(attempt, when, "hang", seconds=seconds, state=state)
    with duckdb.connect() as plain:
        for dataset, table in history.tables().items():
            plain.register(dataset, table)
        for statement in STATEMENTS:
            plain.execute(statement)
        rows = plain.sql("FROM goodput_attempts UNION ALL BY NAME FROM goodput").to_arrow_table().to_pylist()

    for row in rows:
        told = [row[f"{part}_seconds"] for part in PARTS]
        assert row["wall_seconds"] == pytest.approx(sum(told), abs=1e-4)
        assert all(seconds >= -1e-6 for seconds in told)
        assert row["goodput"] is None or -1e-6 <= row["goodput"] <= 1 + 1e-6
    if steps or launches:
        (run,) = rows[-1:]
        assert run["wall_seconds"] == pytest.approx((run["ended"] - run["began"]).total_seconds(), abs=1e-4)
