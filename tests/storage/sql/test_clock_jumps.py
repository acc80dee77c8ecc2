"""Figures of runs with a clock that was set equal those with a right clock; stored times do not change."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from tests.storage.rows import ask, table

from rankscope_storage.api.store import Batch
from rankscope_storage.api.summaries import runs, summary
from rankscope_view.data.newest import read_newest

START = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)
HOUR, DAYS = 3600.0, 40 * 86400.0
STEPS, JUMPED_AT = 10, 6  # a step takes 10 s


def rows_of(run: str, attempt: int, rank: int, began: float, jump: float | None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a process that makes STEPS steps from `began` on, with a jump before the step JUMPED_AT."""
    scalars, events = [], []
    for step in range(1, STEPS + 1):
        is_off = jump is not None and step >= JUMPED_AT
        seconds = began + 10 * step + (jump or 0.0) * is_off
        row = {"run": run, "attempt": attempt, "rank": rank, "incarnation": f"{run}/{attempt}/{rank}", "seq": step}
        row |= {"ts": START + dt.timedelta(seconds=seconds), "ts_origin": "rank", "step": attempt * STEPS + step}
        values = {"step_seconds": 10.0, "tokens_total": 320.0 * step, "loss": 1.0}
        scalars += [row | {"name": name, "value": value} for name, value in values.items()]
        if is_off and step == JUMPED_AT:
            details = json.dumps({"offset_us": round((jump or 0.0) * 1e6)})
            events.append(row | {"type": "clock", "value": jump, "details": details})
    return {"scalars": scalars, "events": events}


def put(writer: Any, run: str, processes: list[dict[str, list[dict[str, Any]]]], launches: list[float]) -> None:
    """Store the rows of `processes`, and an attempt that lasts 101 s for each start in `launches`."""
    times = [(START + dt.timedelta(seconds=at), START + dt.timedelta(seconds=at + STEPS * 10 + 1)) for at in launches]
    common = {"run": run, "source_kind": "live"}
    attempts = [
        {**common, "attempt": number, "state": "completed", "started_at": began, "ended_at": ended}
        for number, (began, ended) in enumerate(times)
    ]
    rows = {name: [row for process in processes for row in process[name]] for name in ("scalars", "events")}
    rows |= {"attempts": attempts, "runs": [{**common, "state": "running", "planned_steps": 100}]}
    tables = {name: table(name, listed) for name, listed in rows.items() if listed}
    writer.append(Batch(tables=tables, watermarks={row["incarnation"]: STEPS for row in rows["scalars"]}))


def attempts(connection: Any, order: str = "attempt") -> list[dict[str, Any]]:
    return connection.query(f"FROM goodput_attempts ORDER BY {order}").to_pylist()


def figures(connection: Any, run: str) -> list[dict[str, Any]]:
    """Return everything that is derived from times of `run`, without its name."""
    whole = summary(connection, run)
    found = [{"tokens": whole.tokens_per_second, "goodput": whole.goodput, "wall": whole.wall_seconds}]
    for view in ("goodput_attempts", "goodput", "run_eta"):
        found += connection.query(f"SELECT * EXCLUDE (run) FROM {view} WHERE run = $run", {"run": run}).to_pylist()
    listed = next(row for row in runs(connection).to_pylist() if row["run"] == run)
    return [*found, {name: listed[name] for name in ("started_at", "last_seen_at", "seconds")}]


@pytest.mark.usual(1)
@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAYS, DAYS])
def test_figures_of_a_run_do_not_depend_on_jumps_of_its_clock(jump, writer, connection):
    """One rank of the second run jumps, both of the third."""
    for run, jumps in (("right", (None, None)), ("one", (None, jump)), ("first", (jump, None)), ("all", (jump, jump))):
        put(writer, run, [rows_of(run, 0, rank, 0, jumps[rank]) for rank in range(2)], [0])
    right, *others = (figures(connection, run) for run in ("right", "one", "first", "all"))

    assert right[0]["tokens"] == pytest.approx(64)
    assert [right] * 3 == others


def test_time_left_on_pages_does_not_depend_on_jumps(writer, connection):
    for run, jump in (("right", None), ("set", -HOUR)):
        put(writer, run, [rows_of(run, 0, 0, 0, jump)], [0])
    planned = {run: {"attempt": 0, "planned_steps": 100} for run in ("right", "set")}
    found = read_newest(connection, [*planned], planned, has_curves=True)

    assert dict.fromkeys(planned, pytest.approx(900)) == found.etas


def test_jumps_are_listed_and_stored_times_remain(writer, connection):
    put(writer, "r", [rows_of("r", 0, 0, 0, -HOUR)], [0])
    query = "SELECT epoch(max(ts) - min(ts)) FROM {} WHERE name = 'loss'"
    spans = [ask(connection, query.format(name))[0][0] for name in ("scalars", "scalars_without_jumps")]

    assert [(0, JUMPED_AT, -HOUR)] == ask(connection, "SELECT rank, step, seconds FROM clock_jumps")
    assert [HOUR - 10 * (JUMPED_AT - 1) + 10 * (JUMPED_AT - 2), 10.0 * (STEPS - 1)] == spans


@pytest.mark.parametrize("jump", [HOUR, DAYS])
def test_jump_in_the_pause_between_attempts_is_downtime(jump, writer, connection):
    """No process sees the jump, and wall time is the measure of the time between attempts."""
    put(writer, "r", [rows_of("r", 0, 0, 0, None), rows_of("r", 1, 0, 150 + jump, None)], [0, 150 + jump])
    first, second = attempts(connection)

    assert (0, pytest.approx(49 + jump)) == (first["downtime_seconds"], second["downtime_seconds"])
    assert (0, 0) == (first["lost_steps"], second["lost_steps"])
    assert summary(connection, "r").tokens_per_second == pytest.approx(32)


@pytest.mark.usual(1)
@pytest.mark.parametrize("jump", [-HOUR, -DAYS])
def test_jump_back_in_the_pause_between_attempts_takes_no_time(jump, writer, connection):
    """The attempts follow each other by their numbers, although the second one begins at an earlier time."""
    put(writer, "r", [rows_of("r", 0, 0, 0, None), rows_of("r", 1, 0, 150 + jump, None)], [0, 150 + jump])
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
        put(writer, run, [*first, *second], [0, began])
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
    put(writer, "r", [*first, rows_of("r", 1, 0, 150, None)], [0, 150])

    assert [0, 49] == [row["downtime_seconds"] for row in attempts(connection)]


def test_attempt_whose_spool_is_found_later_precedes_those_that_began_later(writer, connection):
    """The service was down during the first launch, which it therefore numbers as the second."""
    older, newer = rows_of("r", 1, 0, 0, None), rows_of("r", 0, 0, 150, None)
    older["events"].append(launch_of("r", 1, 160))
    newer["events"].append(launch_of("r", 0, 151))
    put(writer, "r", [newer, older], [150, 0])

    assert [(1, 0), (0, 49)] == [(row["attempt"], row["downtime_seconds"]) for row in attempts(connection, "place")]


def test_short_jump_back_in_the_pause_cuts_no_step_of_the_attempt_before(writer, connection):
    """The second attempt begins within the first one by the clock, but was registered after its end."""
    first, second = rows_of("r", 0, 0, 0, None), rows_of("r", 1, 0, 50, None)
    second["events"].append(launch_of("r", 1, 51) | {"ordinal": round((START.timestamp() + 120) * 1e6)})
    put(writer, "r", [first, second], [0, 50])
    names = ("useful_seconds", "wall_seconds", "downtime_seconds")

    assert [(90, 101, 0), (90, 101, 0)] == [tuple(row[name] for name in names) for row in attempts(connection)]
