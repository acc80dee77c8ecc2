"""The parts of the wall time of a run, and figures of runs with a clock that was set, compared with written times."""

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
from rankscope_storage.api.summaries import summary
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
    """Return a run that was killed at 160 s, after step 8, and restarted at 200 s from the checkpoint after step 5."""
    # The first step begins at 12 s and takes 20 s. Later steps take 10 s, with a checkpoint of 8 s after step 5 and an
    # evaluation of 5 s after step 3.
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


# Figures of runs with a clock that was set equal those with a right clock.

HOUR, DAYS = 3600.0, 40 * 86400.0
MADE_STEPS, JUMPED_AT = 10, 6  # a step takes 10 s


def rows_of(run: str, attempt: int, rank: int, began: float, jump: float | None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a process that makes STEPS steps from `began` on, with a jump before the step JUMPED_AT.

    As in any store, the times are without the jump.
    """
    scalars, events = [], []
    for step in range(1, MADE_STEPS + 1):
        row = {"run": run, "attempt": attempt, "rank": rank, "incarnation": f"{run}/{attempt}/{rank}", "seq": step}
        row |= {"ts": at(began + 10 * step), "ts_origin": "rank", "step": attempt * MADE_STEPS + step}
        values = {"step_seconds": 10.0, "tokens_total": 320.0 * step, "loss": 1.0}
        scalars += [row | {"name": name, "value": value} for name, value in values.items()]
        if jump is not None and step == JUMPED_AT:
            details = json.dumps({"offset_us": round(jump * 1e6)})
            events.append(row | {"type": "clock", "value": jump, "details": details})
    return {"scalars": scalars, "events": events}


def put_run(writer: Any, run: str, processes: list[dict[str, list[dict[str, Any]]]], launches: list[float]) -> None:
    """Store the rows of `processes`, and an attempt that lasts 101 s for each start in `launches`."""
    times = [
        (START + dt.timedelta(seconds=at), START + dt.timedelta(seconds=at + MADE_STEPS * 10 + 1)) for at in launches
    ]
    common = {"run": run, "source_kind": "live"}
    attempts = [
        {**common, "attempt": number, "state": "completed", "started_at": began, "ended_at": ended}
        for number, (began, ended) in enumerate(times)
    ]
    rows = {name: [row for process in processes for row in process[name]] for name in ("scalars", "events")}
    rows |= {"attempts": attempts, "runs": [{**common, "state": "running", "planned_steps": 100}]}
    tables = {name: table(name, listed) for name, listed in rows.items() if listed}
    writer.append(Batch(tables=tables, watermarks={row["incarnation"]: MADE_STEPS for row in rows["scalars"]}))


def attempts(connection: Any, order: str = "attempt") -> list[dict[str, Any]]:
    return connection.query(f"FROM goodput_attempts ORDER BY {order}").to_pylist()


def test_jumps_are_listed_with_the_time_of_the_clock(writer, connection):
    put_run(writer, "r", [rows_of("r", 0, 0, 0, -HOUR)], [0])
    query = "SELECT rank, step, seconds, epoch(ts) FROM clock_jumps"

    assert [(0, JUMPED_AT, -HOUR, at(10 * JUMPED_AT - HOUR).timestamp())] == ask(connection, query)


@pytest.mark.parametrize("jump", [HOUR, DAYS])
def test_jump_in_the_pause_between_attempts_is_downtime(jump, writer, connection):
    """No process sees the jump, and wall time is the measure of the time between attempts."""
    put_run(writer, "r", [rows_of("r", 0, 0, 0, None), rows_of("r", 1, 0, 150 + jump, None)], [0, 150 + jump])
    first, second = attempts(connection)

    assert (0, pytest.approx(49 + jump)) == (first["downtime_seconds"], second["downtime_seconds"])
    assert (0, 0) == (first["lost_steps"], second["lost_steps"])
    assert summary(connection, "r").tokens_per_second == pytest.approx(32)


@pytest.mark.usual(1)
@pytest.mark.parametrize("jump", [-HOUR, -DAYS])
def test_jump_back_in_the_pause_between_attempts_takes_no_time(jump, writer, connection):
    """The attempts follow each other by their numbers, although the second one begins at an earlier time."""
    put_run(writer, "r", [rows_of("r", 0, 0, 0, None), rows_of("r", 1, 0, 150 + jump, None)], [0, 150 + jump])
    rows = attempts(connection, "place")
    (run,) = connection.query("FROM goodput").to_pylist()

    assert [(0, 101, 0), (1, 101, 0)] == [
        (row["attempt"], row["wall_seconds"], row["downtime_seconds"]) for row in rows
    ]
    assert (0, pytest.approx(180 / 202), START) == (run["lost_steps"], run["goodput"], run["began"])
    assert summary(connection, "r").tokens_per_second == pytest.approx(32)


def launch_of(run: str, attempt: int, registered_at: float, rank: int = 0) -> dict[str, Any]:
    """Return the row of `events` with which a service reports the first registration of a launch."""
    ts = START + dt.timedelta(seconds=registered_at)
    row = {"run": run, "attempt": attempt, "rank": rank, "incarnation": f"{run}/{attempt}/{rank}", "type": "launch"}
    return row | {"ts": ts, "ts_origin": "ingest", "ordinal": round(ts.timestamp() * 1e6)}


@pytest.mark.usual(1)
@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAYS, DAYS, -30, 30])
def test_jump_in_an_earlier_attempt_changes_no_time_between_attempts(jump, writer, connection):
    """The host of the rank that jumps keeps its clock, and starts the next attempt after 49 s."""
    for run, jumps in (("right", (0, 0)), ("all", (jump, jump)), ("first", (jump, 0)), ("second", (0, jump))):
        first = [rows_of(run, 0, rank, 0, jumps[rank] or None) for rank in range(2)]
        began, starter = (150 + jump, int(not jumps[0])) if any(jumps) else (150, 0)
        second = [rows_of(run, 1, rank, began, None) for rank in range(2)]
        if run == "second":
            second[0]["events"].append(launch_of(run, 1, began, starter))
        put_run(writer, run, [*first, *second], [0, began])
    parts = "SELECT * EXCLUDE (run, began, ended) FROM goodput_attempts WHERE run = '{}' ORDER BY ALL"
    queries = (parts, "SELECT * EXCLUDE (run) FROM goodput WHERE run = '{}'")
    right, *others = (
        [connection.query(query.format(run)).to_pylist() for query in queries]
        for run in ("right", "all", "first", "second")
    )

    assert 49 == right[0][1]["downtime_seconds"]
    assert [right] * 3 == others


def test_clock_that_starts_an_attempt_measures_the_time_before_it(writer, connection):
    """Only the host of rank 1 was set. The clock of rank 0 starts the second attempt."""
    first = [rows_of("r", 0, rank, 0, HOUR if rank else None) for rank in range(2)]
    put_run(writer, "r", [*first, rows_of("r", 1, 0, 150, None)], [0, 150])

    assert [0, 49] == [row["downtime_seconds"] for row in attempts(connection)]


def test_attempt_whose_spool_is_found_later_precedes_those_that_began_later(writer, connection):
    """The service was down during the first launch, which it therefore numbers as the second."""
    older, newer = rows_of("r", 1, 0, 0, None), rows_of("r", 0, 0, 150, None)
    older["events"].append(launch_of("r", 1, 160))
    newer["events"].append(launch_of("r", 0, 151))
    put_run(writer, "r", [newer, older], [150, 0])

    assert [(1, 0), (0, 49)] == [(row["attempt"], row["downtime_seconds"]) for row in attempts(connection, "place")]


def test_short_jump_back_in_the_pause_cuts_no_step_of_the_attempt_before(writer, connection):
    """The second attempt begins within the first one by the clock, but was registered after its end."""
    first, second = rows_of("r", 0, 0, 0, None), rows_of("r", 1, 0, 50, None)
    second["events"].append(launch_of("r", 1, 51) | {"ordinal": round((START.timestamp() + 120) * 1e6)})
    put_run(writer, "r", [first, second], [0, 50])
    names = ("useful_seconds", "wall_seconds", "downtime_seconds")

    assert [(90, 101, 0), (90, 101, 0)] == [tuple(row[name] for name in names) for row in attempts(connection)]
