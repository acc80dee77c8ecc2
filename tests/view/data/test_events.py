"""The event log, markers and incidents of a run."""

from __future__ import annotations

import math
import random

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import MAIN, START, append, event, events, run_row, scalars

from rankscope.commands.runs import runs
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_view.data.curves import Axis
from rankscope_view.data.detail import nothing
from rankscope_view.data.events import Group, event_lines, event_log, markers
from rankscope_view.data.history import read_history
from rankscope_view.data.incidents import happening, incidents, sentence_of


def test_log_merges_steps_and_events_the_newest_first(connection):
    loss, evaluations = read_history(connection, MAIN, "loss"), read_history(connection, MAIN, "eval_loss")
    found = event_log(event_lines(connection, MAIN), loss, [read_history(connection, MAIN, "grad_norm")], evaluations)

    assert (3, 2) == (found.counts[Group.RESTART], found.restarts)
    assert (138, len(evaluations)) == (found.counts[Group.STEP], found.counts[Group.EVALUATION])
    assert "loss 2.809, grad 0.5963" == found.lines[0].text
    times = [line.at for line in found.lines]
    assert sorted(times, reverse=True) == times


def test_event_without_a_time_follows_the_row_of_its_step(tmp_path):
    """A traceback in a log whose rows have times."""
    steps = np.arange(1, 401)
    error = event("r", "error", 250, None, ordinal=250, message="Traceback")
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, scalars=scalars("r", "loss", steps, 1.0, ts=START + steps * 1_000_000), events=events([error]))
    with connect(tmp_path / "store") as connection:
        loss = read_history(connection, "r", "loss")
        found = event_log(event_lines(connection, "r"), loss, (), nothing("eval_loss"), newest=1000)
    place = [line.text for line in found.lines].index("Traceback")

    assert [251, 250, 250] == [line.step for line in found.lines[place - 1 : place + 2]]


def test_completed_end_of_a_run_is_no_restart_and_no_incident(tmp_path):
    done = event("r", "exit", 9, START + 9, details={"reason": "completed"}, message="[after training is done]")
    killed = event("r", "exit", 9, START + 9, attempt=1, details={"reason": "signal"}, message="killed")
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, events=events([done, killed]))
    with connect(tmp_path / "store") as connection:
        groups = {line.text: line.group for line in event_lines(connection, "r")}

    assert {"[after training is done]": Group.OTHER, "killed": Group.RESTART} == groups


def test_log_of_one_group_has_only_this_group(connection):
    loss, evaluations = read_history(connection, MAIN, "loss"), read_history(connection, MAIN, "eval_loss")
    found = event_log(event_lines(connection, MAIN), loss, (), evaluations, groups={Group.CHECKPOINT}, newest=5)

    assert {Group.CHECKPOINT} == {line.group for line in found.lines}
    assert 5 == len(found.lines)


def test_anomalies_of_a_step_are_one_line(connection):
    nan = [line for line in event_lines(connection, MAIN) if line.type == "anomaly" and line.events > 1]

    assert nan
    assert all("more" in line.text for line in nan)


@pytest.mark.thorough
def test_events_of_one_time_have_one_order_with_several_threads(tmp_path):
    """4,000 events of one step and time, shuffled in each of 8 files."""
    shuffled = random.Random(1)
    types = ["error", "hang", "xid", "phase"]
    listed = [
        event("r", types[number % 4], 5, 5, rank=0, ordinal=1, message=f"message {number:04}", rule=None)
        for number in range(3800)
    ]
    listed += [
        event("r", "anomaly", 5, 5, rank=0, ordinal=1, rule="A", tensor=f"t{number:03}", op="norm", value=float(number))
        for number in range(200)
    ]
    shuffled.shuffle(listed)
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        for part in range(8):
            append(writer, events=events(listed[part::8]))
    expected = ["A: t000 and 199 more"]
    expected += [f"message {number:04}" for type_ in sorted(types) for number in range(types.index(type_), 3800, 4)]
    with connect(tmp_path / "store") as opened:
        opened.query("SET threads TO 4")
        found = [[line.text for line in event_lines(opened, "r")] for _ in range(5)]

    assert [expected] * 5 == found


def test_markers_lie_on_the_axis_of_the_attempt(connection, course):
    loss = read_history(connection, MAIN, "loss")
    found = markers(event_lines(connection, MAIN), read_history(connection, MAIN, "eval_loss"), loss, Axis.ARRIVAL)

    assert [50.0, 94.0] == [marker.x for marker in found if marker.group is Group.RESTART]
    (first, *_) = (marker for marker in found if marker.group is Group.INCIDENT and marker.is_critical)
    assert float(course.nan_from) == first.x


def test_failure_at_repeated_steps_has_a_mark(tmp_path):
    """Attempt 0 failed at step 50. Attempt 1 began at step 41, so that its rows alone are on the axis of steps."""
    failed = {"rule": "RunFailed", "severity": "critical", "message": "rank 1: ValueError: bad shard"}
    listed = [event("r", "incident", 50, START + 50, **failed), event("r", "checkpoint", 45, START + 45)]
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        for attempt, steps in enumerate((np.arange(1, 50), np.arange(41, 121))):
            own = {"attempt": attempt, "incarnation": f"r-{attempt}", "ts": START + 60 * attempt + steps}
            append(writer, scalars=scalars("r", "loss", steps, 1.0, **own))
        append(writer, events=events(listed))
    with connect(tmp_path / "store") as opened:
        lines, loss = event_lines(opened, "r"), read_history(opened, "r", "loss")
        found = {axis: markers(lines, nothing("eval_loss"), loss, axis) for axis in (Axis.STEP, Axis.CUMULATIVE)}

    begin = (Group.RESTART, 41.0, "attempt 1 begins at step 41")
    crash = (Group.INCIDENT, 50.0, "rank 1: ValueError: bad shard")
    assert [begin, crash] == [(one.group, one.x, one.text) for one in found[Axis.STEP]]
    groups = [Group.CHECKPOINT, Group.INCIDENT, Group.RESTART]
    assert groups == [one.group for one in found[Axis.CUMULATIVE]]


def test_run_with_one_row_has_no_marker(connection):
    loss = read_history(connection, "one-row", "loss")

    assert [] == markers([], read_history(connection, "one-row", "eval_loss"), loss, Axis.STEP)


def test_incident_of_the_service_has_its_states(connection):
    first, second = incidents(connection, [MAIN])[MAIN]

    assert ("a1", ["opened", "notified"]) == (first.key, [state for _, state in first.states])
    assert "gradient became NaN" == happening(first)
    assert (first.is_open, first.is_critical, second.rule) == (True, True, "SlowRank")


def test_anomalies_without_a_service_are_grouped_as_the_service_does(tmp_path):
    """One rule and tensor, all anomalies of a step, and a NaN that spreads; the NaN is no part of a spike before it."""
    columns = {"rule": "AnomalyTurbulence", "op": "norm", "value": 9.0, "baseline": 1.0, "kind": "grad_reduced"}
    firings = [(5, "t5"), (7, "t5"), (7, "t6"), (60, "t5"), (70, "t7")]
    listed = [event("r", "anomaly", step, step, tensor=name, rank=0, **columns) for step, name in firings]
    for step in (75, 76, 77):
        nan = {"rule": "AnomalyNan", "severity": "critical", "op": "nans", "value": 4.0}
        listed.append(event("r", "anomaly", step, step, tensor=f"w{step}", rank=0, **nan))
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, events=events(listed))
    with connect(tmp_path / "store") as opened:
        found = sorted(incidents(opened, ["r"])["r"], key=lambda one: one.number)

    assert [(5, "t5", 3, 7), (60, "t5", 1, 60), (70, "t7", 1, 70), (75, "w75", 3, 77)] == [
        (one.step, one.tensor, one.events, one.last_step) for one in found
    ]
    assert "gradient norm 9, 9 times its average" == happening(found[0])


def test_sentence_of_a_spike_has_the_largest_loss_that_followed_it(tmp_path):
    """A loss that a service reported at 9.7 rose to 970,000, in one run after a larger spike that was over."""
    spike = {"rule": "LossSpike", "severity": "warning", "rank": 0, "op": "loss", "baseline": 1.2}
    listed = [event("r", "anomaly", 60 + at, at, value=9.7 * 10.0**at, **spike) for at in range(6)]
    listed += [event("r", "anomaly", 66, 66, **spike | {"rule": "AnomalyNan", "value": math.nan})]
    listed += [event("over", "anomaly", step, step, value=value, **spike) for step, value in ((60, 99.0), (300, 9.7))]
    for run, step, states in (("r", 60, ("opened",)), ("over", 60, ("opened", "resolved")), ("over", 300, ("opened",))):
        known = spike | {"value": 99.0 if states[1:] else 9.7}
        listed += [
            event(run, "incident", step, 70 + at, details={"key": f"{step}", "state": state, "events": 1}, **known)
            for at, state in enumerate(states)
        ]
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, events=events(listed))
    with connect(tmp_path / "store") as opened:
        found = {run: [sentence_of(one) for one in listed] for run, listed in incidents(opened, ["r", "over"]).items()}

    again, over = (
        "Rank 0: loss 9.7, 8.1 times its median at step 300",
        "Rank 0: loss 99, 82 times its median at step 60",
    )
    assert {
        "r": ["Rank 0: loss up to 970,000, 808,333 times its median, since step 60"],
        "over": [again, over],
    } == found


def test_ruin_is_named_before_a_stall_until_the_end_of_the_run(tmp_path, capsys):
    """A loss spiked at step 20, with its largest value at step 22, and the ranks wait since step 29."""
    spike = {"rule": "LossSpike", "severity": "warning", "op": "loss", "baseline": 2.0, "value": 10.0}
    hang = {
        "rule": "RunStalled",
        "severity": "critical",
        "message": "rank 1: no sign of training for 9 s, after step 29",
    }
    listed = [event("r", "anomaly", 20 + at, at, **spike | {"value": at * 8 + 10.0}) for at in range(3)]
    listed += [event("r", "incident", 29, 50, details={"key": "hang", "state": "opened"}, **hang)]
    listed += [event("r", "incident", 20, 51, details={"key": "spike", "state": "opened"}, **spike)]
    shown = []
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, events=events(listed), runs=run_row("r", "stalled"))
        for ordinal in (1, 2):
            runs(store=tmp_path / "store")
            shown.append(capsys.readouterr().out)
            append(writer, runs=run_row("r", "stopped", ordinal=ordinal + 1))
    with connect(tmp_path / "store") as opened:
        (spiked, stalled) = incidents(opened, ["r"])["r"]
    sentence = "Loss up to 26, 13 times its median, since step 20"

    assert ["stalled, 2 open", "stopped, 1 open"] == [text.splitlines()[1][5:20] for text in shown]
    assert f"r: Stalled with 2 open incidents: {sentence}." in shown[0]
    assert f"r: Stopped with 1 open incident: {sentence}." in shown[1]
    assert "Rank 1: no sign of training for 9 s, after step 29" == sentence_of(stalled)
    assert [True, False] == [spiked.is_open, stalled.is_open]


def test_evaluation_is_one_line(tmp_path):
    """A phase that the script announced, and the loss that it logged, at two steps; the third one logged none."""
    steps = np.arange(1, 41)
    listed = [event("r", "phase", step, START + step, details={"phase": "evaluation"}) for step in (10, 20, 30)]
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        tables = [scalars("r", "loss", steps, 1.0), scalars("r", "eval_loss", np.array([10, 20]), 2.0)]
        append(writer, scalars=pa.concat_tables(tables), events=events(listed))
    with connect(tmp_path / "store") as opened:
        loss, evaluations = read_history(opened, "r", "loss"), read_history(opened, "r", "eval_loss")
        found = event_log(event_lines(opened, "r"), loss, (), evaluations, groups={Group.EVALUATION})

    texts = [(line.step, line.text) for line in found.lines]
    assert [(10, "evaluation loss 2.000"), (20, "evaluation loss 2.000"), (30, "evaluation")] == sorted(texts)
    assert 3 == found.counts[Group.EVALUATION]


@pytest.mark.parametrize("kind", ["grad_reduced", "param_after"])
def test_evaluation_is_the_first_cause_only_if_nothing_else_is(tmp_path, kind):
    """An evaluation after the step follows from its parameters, and can be reported before them."""
    nan = {"rule": "AnomalyNan", "severity": "critical", "rank": 0, "value": math.nan}
    listed = [event("r", "anomaly", step, step, op="eval_loss", **nan) for step in (5, 90)]
    listed.append(event("r", "anomaly", 5, 6, kind=kind, tensor="head.weight", **nan | {"op": "nans", "value": 4.0}))
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, events=events(listed))
    with connect(tmp_path / "store") as opened:
        titles = [sentence_of(one) for one in incidents(opened, ["r"])["r"]]

    word = "gradient" if kind == "grad_reduced" else "weight"
    assert [f"Rank 0: {word} of head.weight became NaN at step 5", "Rank 0: eval_loss became NaN at step 90"] == titles


def test_first_cause_among_anomalies_of_one_time_is_always_the_same(tmp_path):
    """The same 400 anomalies of one rank and step, in 8 files, in two stores with different orders."""
    listed = [event("r", "anomaly", 5, 5, rank=0, rule="A", tensor=f"t{number:03}", op="norm") for number in range(400)]
    found = []
    for name, ordered in (("one", listed), ("two", listed[::-1])):
        with Store.open(tmp_path / name, create=True).claim(owner="a test") as writer:
            for part in range(8):
                append(writer, events=events(ordered[part::8]))
        with connect(tmp_path / name) as opened:
            opened.query("SET threads TO 4")
            found += [one.tensor for _ in range(5) for one in incidents(opened, ["r"])["r"]]

    assert ["t000"] * 10 == found


def test_firings_of_one_cause_are_one_line(tmp_path):
    """A NaN from step 40 to step 160 gives 119 events in each step, and one that comes back later its own line.

    The optimizer does not run then, on two ranks.
    """
    listed = [
        event("r", "anomaly", step, 1_000_000 * step, rule="AnomalyNan", severity="critical", tensor=f"layer.{number}")
        for step in (*range(40, 161), 300)
        for number in range(119)
    ]
    listed += [event("r", "anomaly", 40, 40_500_000, rule="AnomalyNan", kind="param_before", tensor="z.cause")]
    listed += [event("r", "anomaly", None, 5, rule="AnomalyNan", tensor="a"), event("r", "note", 50, 9, message="note")]
    skipped = [(step, rank) for step in (*range(41, 160), 200) for rank in (0, 1)]
    listed += [event("r", "step_skipped", step, step, rank=rank, message="not run") for step, rank in skipped]
    with Store.open(tmp_path / "store", create=True).claim(owner="a test") as writer:
        append(writer, events=events(listed), scalars=scalars("r", "loss", np.arange(301), 1.0, ts=START))
    with connect(tmp_path / "store") as opened:
        found = event_lines(opened, "r")
        marks = markers(found, nothing("eval_loss"), read_history(opened, "r", "loss"), Axis.STEP)

    assert [
        (300, 119, "AnomalyNan: layer.0 and 118 more"),
        (40, 121 * 119 + 1, "AnomalyNan: z.cause and 14,399 more until step 160"),
        (200, 2, "not run"),
        (41, 2 * 119, "not run: 119 steps until step 159"),
        (50, 1, "note"),
        (None, 1, "AnomalyNan: a"),
    ] == [(line.step, line.events, line.text) for line in found]
    assert [40, 41, 200, 300] == [mark.step for mark in marks]
