"""The event log, incidents and markers of a run, selected events, and rows without a transformation."""

import math
import random

import numpy as np
import pyarrow as pa
import pytest
from tests.view.training import HOSTILE, MAIN, START, event, events, run_row, scalars, write

from rankscope.commands.runs import runs
from rankscope_contract.model.events import Severity
from rankscope_storage.connection import connect
from rankscope_view.data.curves import Axis
from rankscope_view.data.detail import EventQuery, nothing, read_chart, read_detail, select_events
from rankscope_view.data.events import NEWEST, Group, event_lines, event_log, markers
from rankscope_view.data.incidents import happening, incidents, sentence_of
from rankscope_view.data.series import main_series, read_rows


def test_log_merges_steps_and_events_the_newest_first(connection):
    loss, evaluations = read_chart(connection, MAIN, "loss"), read_chart(connection, MAIN, "eval_loss")
    found = event_log(event_lines(connection, MAIN), loss, [read_chart(connection, MAIN, "grad_norm")], evaluations)

    assert (3, 2) == (found.counts[Group.RESTART], found.restarts)
    assert (138, len(evaluations)) == (found.counts[Group.STEP], found.counts[Group.EVALUATION])
    assert "loss 2.809, grad 0.5963" == found.lines[0].text
    times = [line.at for line in found.lines]
    assert sorted(times, reverse=True) == times


def test_event_without_a_time_follows_the_row_of_its_step(opened):
    """A traceback in a log whose rows have times."""
    steps = np.arange(1, 401)
    error = event("r", "error", 250, None, ordinal=250, message="Traceback")
    store = opened(scalars=scalars("r", "loss", steps, 1.0, ts=START + steps * 1_000_000), events=events([error]))
    loss = read_chart(store, "r", "loss")
    found = event_log(event_lines(store, "r"), loss, (), nothing("eval_loss"), newest=1000)
    place = [line.text for line in found.lines].index("Traceback")

    assert [251, 250, 250] == [line.step for line in found.lines[place - 1 : place + 2]]


def test_completed_end_of_a_run_is_no_restart_and_no_incident(opened):
    done = event("r", "exit", 9, START + 9, details={"reason": "completed"}, message="[after training is done]")
    killed = event("r", "exit", 9, START + 9, attempt=1, details={"reason": "signal"}, message="killed")
    groups = {line.text: line.group for line in event_lines(opened(events=events([done, killed])), "r")}

    assert {"[after training is done]": Group.OTHER, "killed": Group.RESTART} == groups


def test_log_of_one_group_has_only_this_group(connection):
    loss, evaluations = read_chart(connection, MAIN, "loss"), read_chart(connection, MAIN, "eval_loss")
    lines = event_lines(connection, MAIN)
    found = event_log(lines, loss, (), evaluations, groups={Group.CHECKPOINT}, newest=5)

    assert [Group.CHECKPOINT] * 5 == [line.group for line in found.lines]
    nan = [line for line in lines if line.type == "anomaly" and line.events > 1]  # those of a step are one line
    assert nan
    assert all("more" in line.text for line in nan)


@pytest.mark.thorough
def test_events_of_one_time_have_one_order_with_several_threads(opened):
    """4,000 events of one step and time, shuffled in each of 8 files."""
    types = ["error", "hang", "xid", "phase"]
    known = {"rank": 0, "ordinal": 1}
    listed = [event("r", types[at % 4], 5, 5, message=f"message {at:04}", rule=None, **known) for at in range(3800)]
    turbulent = known | {"rule": "A", "op": "norm"}
    listed += [event("r", "anomaly", 5, 5, tensor=f"t{at:03}", value=float(at), **turbulent) for at in range(200)]
    random.Random(1).shuffle(listed)
    expected = ["A: t000 and 199 more"]
    expected += [f"message {number:04}" for type_ in sorted(types) for number in range(types.index(type_), 3800, 4)]
    store = opened(*({"events": events(listed[part::8])} for part in range(8)))
    store.query("SET threads TO 4")

    assert [expected] * 5 == [[line.text for line in event_lines(store, "r")] for _ in range(5)]


def test_markers_lie_on_the_axis_of_the_attempt(connection, course):
    loss, evaluations = read_chart(connection, MAIN, "loss"), read_chart(connection, MAIN, "eval_loss")
    found = markers(event_lines(connection, MAIN), evaluations, loss, Axis.ARRIVAL)

    assert [50.0, 94.0] == [marker.x for marker in found if marker.group is Group.RESTART]
    (first, *_) = (marker for marker in found if marker.group is Group.INCIDENT and marker.is_critical)
    assert float(course.nan_from) == first.x
    one = [read_chart(connection, "one-row", name) for name in ("eval_loss", "loss")]
    assert [] == markers([], *one, Axis.STEP)


def test_failure_at_repeated_steps_has_a_mark(opened):
    """Attempt 0 failed at step 50. Attempt 1 began at step 41, so that its rows alone are on the axis of steps."""
    failed = {"rule": "RunFailed", "severity": "critical", "message": "rank 1: ValueError: bad shard"}
    listed = [event("r", "incident", 50, START + 50, **failed), event("r", "checkpoint", 45, START + 45)]
    first, second = (
        scalars("r", "loss", steps, 1.0, attempt=at, incarnation=f"r-{at}", ts=START + 60 * at + steps)
        for at, steps in enumerate((np.arange(1, 50), np.arange(41, 121)))
    )
    store = opened({"scalars": second}, scalars=first, events=events(listed))
    lines, loss = event_lines(store, "r"), read_chart(store, "r", "loss")
    found = {axis: markers(lines, nothing("eval_loss"), loss, axis) for axis in (Axis.STEP, Axis.CUMULATIVE)}

    begin = (Group.RESTART, 41.0, "attempt 1 begins at step 41")
    crash = (Group.INCIDENT, 50.0, "rank 1: ValueError: bad shard")
    assert [begin, crash] == [(one.group, one.x, one.text) for one in found[Axis.STEP]]
    groups = [Group.CHECKPOINT, Group.INCIDENT, Group.RESTART]
    assert groups == [one.group for one in found[Axis.CUMULATIVE]]


def test_incident_of_the_service_has_its_states(connection):
    first, second = incidents(connection, [MAIN])[MAIN]

    assert ("a1", ["opened", "notified"]) == (first.key, [state for _, state in first.states])
    assert "gradient became NaN" == happening(first)
    assert (first.is_open, first.is_critical, second.rule) == (True, True, "SlowRank")


def test_anomalies_without_a_service_are_grouped_as_the_service_does(opened):
    """One rule and tensor, all anomalies of a step, and a NaN that spreads; the NaN is no part of a spike before it."""
    spike = {"rule": "AnomalyTurbulence", "op": "norm", "value": 9.0, "baseline": 1.0, "kind": "grad_reduced"}
    nan = {"rule": "AnomalyNan", "severity": "critical", "op": "nans", "value": 4.0}
    firings = [(5, "t5", spike), (7, "t5", spike), (7, "t6", spike), (60, "t5", spike), (70, "t7", spike)]
    firings += [(step, f"w{step}", nan) for step in (75, 76, 77)]
    listed = [event("r", "anomaly", step, step, tensor=name, rank=0, **one) for step, name, one in firings]
    found = sorted(incidents(opened(events=events(listed)), ["r"])["r"], key=lambda one: one.number)

    assert [(5, "t5", 3, 7), (60, "t5", 1, 60), (70, "t7", 1, 70), (75, "w75", 3, 77)] == [
        (one.step, one.tensor, one.events, one.last_step) for one in found
    ]
    assert "gradient norm 9, 9 times its average" == happening(found[0])


def test_sentence_of_a_spike_has_the_largest_loss_that_followed_it(opened):
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
    found = incidents(opened(events=events(listed)), ["r", "over"])

    again = "Rank 0: loss 9.7, 8.1 times its median at step 300"
    over = "Rank 0: loss 99, 82 times its median at step 60"
    risen = "Rank 0: loss up to 970,000, 808,333 times its median, since step 60"
    assert {"r": [risen], "over": [again, over]} == {run: [*map(sentence_of, some)] for run, some in found.items()}


def test_ruin_is_named_before_a_stall_until_the_end_of_the_run(stored, capsys):
    """A loss spiked at step 20, with its largest value at step 22, and the ranks wait since step 29."""
    spike = {"rule": "LossSpike", "severity": "warning", "op": "loss", "baseline": 2.0, "value": 10.0}
    hang = {"rule": "RunStalled", "severity": "critical"}
    hang["message"] = "rank 1: no sign of training for 9 s, after step 29"
    listed = [event("r", "anomaly", 20 + at, at, **spike | {"value": at * 8 + 10.0}) for at in range(3)]
    listed += [event("r", "incident", 29, 50, details={"key": "hang", "state": "opened"}, **hang)]
    listed += [event("r", "incident", 20, 51, details={"key": "spike", "state": "opened"}, **spike)]
    shown, store = [], stored(events=events(listed))
    for ordinal, state in enumerate(("stalled", "stopped"), 1):
        runs(store=write(store, {"runs": run_row("r", state, ordinal=ordinal)}))
        shown.append(capsys.readouterr().out)
    with connect(store) as connection:
        (spiked, stalled) = incidents(connection, ["r"])["r"]
    sentence = "Loss up to 26, 13 times its median, since step 20"

    assert ["stalled, 2 open", "stopped, 1 open"] == [text.splitlines()[1][5:20] for text in shown]
    assert f"r: Stalled with 2 open incidents: {sentence}." in shown[0]
    assert f"r: Stopped with 1 open incident: {sentence}." in shown[1]
    assert "Rank 1: no sign of training for 9 s, after step 29" == sentence_of(stalled)
    assert [True, False] == [spiked.is_open, stalled.is_open]


def test_evaluation_is_one_line(opened):
    """A phase that the script announced, and the loss that it logged, at two steps; the third one logged none."""
    listed = [event("r", "phase", step, START + step, details={"phase": "evaluation"}) for step in (10, 20, 30)]
    tables = [scalars("r", "loss", np.arange(1, 41), 1.0), scalars("r", "eval_loss", np.array([10, 20]), 2.0)]
    store = opened(scalars=pa.concat_tables(tables), events=events(listed))
    loss, evaluations = read_chart(store, "r", "loss"), read_chart(store, "r", "eval_loss")
    found = event_log(event_lines(store, "r"), loss, (), evaluations, groups={Group.EVALUATION})

    texts = [(line.step, line.text) for line in found.lines]
    assert [(10, "evaluation loss 2.000"), (20, "evaluation loss 2.000"), (30, "evaluation")] == sorted(texts)
    assert 3 == found.counts[Group.EVALUATION]


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ({"kind": "grad_reduced", "tensor": "head.weight", "op": "nans", "value": 4.0}, "gradient of head.weight"),
        ({"kind": "param_after", "tensor": "head.weight", "op": "nans", "value": 4.0}, "weight of head.weight"),
        ({"op": "loss"}, "loss"),
    ],
)
def test_evaluation_is_the_first_cause_only_if_nothing_else_is(opened, cause, words):
    """An evaluation after the step follows from its parameters, and can be reported before them."""
    nan = {"rule": "AnomalyNan", "severity": "critical", "rank": 0, "value": math.nan}
    listed = [event("r", "anomaly", step, step, op="eval_loss", **nan) for step in (5, 90)]
    listed.append(event("r", "anomaly", 5, 6, **nan | cause))
    titles = [sentence_of(one) for one in incidents(opened(events=events(listed)), ["r"])["r"]]

    assert [f"Rank 0: {words} became NaN at step 5", "Rank 0: eval_loss became NaN at step 90"] == titles


def test_first_cause_among_anomalies_of_one_time_is_always_the_same(tmp_path):
    """The same 400 anomalies of one rank and step, in 8 files, in two stores with different orders."""
    listed = [event("r", "anomaly", 5, 5, rank=0, rule="A", tensor=f"t{number:03}", op="norm") for number in range(400)]
    found = []
    for name, ordered in (("one", listed), ("two", listed[::-1])):
        parts = ({"events": events(ordered[part::8])} for part in range(8))
        with connect(write(tmp_path / name, *parts)) as store:
            store.query("SET threads TO 4")
            found += [one.tensor for _ in range(3) for one in incidents(store, ["r"])["r"]]

    assert ["t000"] * 6 == found


def test_firings_of_one_cause_are_one_line(opened):
    """A NaN from step 40 to step 160 gives 119 events in each step, and one that comes back later its own line."""
    # The optimizer does not run then, on two ranks.
    nan = {"rule": "AnomalyNan", "severity": "critical"}
    places = [(step, number) for step in (*range(40, 161), 300) for number in range(119)]
    listed = [event("r", "anomaly", step, 1_000_000 * step, tensor=f"layer.{number}", **nan) for step, number in places]
    listed += [event("r", "anomaly", 40, 40_500_000, rule="AnomalyNan", kind="param_before", tensor="z.cause")]
    listed += [event("r", "anomaly", None, 5, rule="AnomalyNan", tensor="a"), event("r", "note", 50, 9, message="note")]
    skipped = [(step, rank) for step in (*range(41, 160), 200) for rank in (0, 1)]
    listed += [event("r", "step_skipped", step, step, rank=rank, message="not run") for step, rank in skipped]
    store = opened(events=events(listed), scalars=scalars("r", "loss", np.arange(301), 1.0, ts=START))
    found = event_lines(store, "r")
    marks = markers(found, nothing("eval_loss"), read_chart(store, "r", "loss"), Axis.STEP)

    assert [
        (300, 119, "AnomalyNan: layer.0 and 118 more"),
        *((40, 121 * 119 + 1, "AnomalyNan: z.cause and 14,399 more until step 160"), (200, 2, "not run")),
        *((41, 2 * 119, "not run: 119 steps until step 159"), (50, 1, "note"), (None, 1, "AnomalyNan: a")),
    ] == [(line.step, line.events, line.text) for line in found]
    assert [40, 41, 200, 300] == [mark.step for mark in marks]


@pytest.fixture(scope="module")
def detail(connection):
    return read_detail(connection, MAIN)


def select(detail, **choices):
    return select_events(detail, EventQuery(**{"newest": 1000} | choices)).lines


def test_types_are_groups_or_types_of_events(connection, detail):
    expected = connection.query(f"SELECT count(*) AS n FROM events WHERE run = '{MAIN}' AND type = 'checkpoint'")

    assert {"launch"} == {line.type for line in select(detail, types=["restart"])}
    assert expected["n"].to_pylist() == [len(select(detail, types=["checkpoint"]))]
    assert {"launch", "step"} == {line.type for line in select(detail, types=["launch", "step"])}
    assert 138 == len(select(detail, types=["step"]))


def test_severity_selects_steps_with_nan_and_a_rank_no_steps(detail):
    critical, of_rank = select(detail, severity=Severity.CRITICAL), select(detail, rank=1)

    assert {"step", "anomaly", "incident"} == {line.type for line in critical}
    assert all("loss NaN" in line.text for line in critical if line.type == "step")
    assert {"warning", "critical"} == {line.severity for line in select(detail, severity=Severity.WARNING)}
    assert all(1 in line.ranks and line.type != "step" for line in of_rank)


def test_newest_lines_of_all_types_come_first_and_counts_are_of_all(detail):
    found = select_events(detail, EventQuery())
    times = [line.at for line in select(detail)]

    assert min(NEWEST, len(times)) == len(found.lines)
    assert sorted(times, reverse=True) == times
    assert sum(found.counts.values()) == len(times)
    assert found.counts == select_events(detail, EventQuery(types=["launch"])).counts


STEPS = 70_000  # more than one row group


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """Return a store with a long run, one with gaps, an imported one, and one of three scalars."""
    random, steps = np.random.default_rng(0), np.arange(STEPS)
    values, late = random.normal(size=STEPS), np.where(steps < STEPS - 9, steps, steps + 5)
    gaps = pa.array(values, mask=steps % 1000 == 7)
    series = [("long", "loss", steps, values), ("gaps", "loss", steps, gaps), ("log", "loss", steps, values)]
    series += [("several", name, own, values) for name, own in (("loss", steps), ("grad_norm", steps), ("late", late))]
    batches = [
        {"scalars": scalars(run, name, own, value, ts=START + steps, incarnation=source)}
        for run, name, own, value in series
        for source in ["import-0" if run == "log" else f"{run}-{name}-0"]
    ]
    with connect(write(tmp_path_factory.mktemp("raw") / "store", *batches)) as connection:
        yield connection


VIEW = """\
SELECT attempt, step, cumulative_step AS cumulative, epoch(ts) AS time, value, lowest, highest, stands
FROM scalar_history WHERE run = $run AND name = $name AND labels IS NOT DISTINCT FROM $labels
ORDER BY attempt, cumulative_step"""


def assert_equals_the_view(connection, run, name, found, labels=None):
    expected = connection.query(VIEW, {"run": run, "name": name, "labels": labels})
    for column in expected.column_names:
        stored = expected[column].to_numpy(zero_copy_only=False).astype(float)
        np.testing.assert_allclose(stored, getattr(found, column).astype(float), rtol=1e-15)


@pytest.mark.parametrize("name", ["loss", "learning_rate", "eval_loss"])
@pytest.mark.parametrize("run", [MAIN, "only-nan", "no-times", HOSTILE])
def test_history_equals_the_view(connection, run, name):
    labels = read_rows(connection, [run], [name]).main_labels(run, name)
    found = main_series(connection, run, [name]).get(name) or nothing(name)

    assert_equals_the_view(connection, run, name, found, labels or None)


@pytest.mark.parametrize("run", ["long", "gaps", "log", "several"])
def test_long_series_equals_the_view(long_runs, run):
    names = ["grad_norm", "late", "loss"] if run == "several" else ["loss"]
    histories = main_series(long_runs, run, names)

    for name in names:
        assert_equals_the_view(long_runs, run, name, histories[name])
