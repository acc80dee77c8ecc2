"""Firings of rules in a followed log: one line, one message and one incident for each, until their cause is gone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pytest
from tests.ingest.watch.conftest import Replay, Watch

from rankscope_storage.connection import connect
from rankscope_view.data.incidents import incidents, sentence_of

HEALTHY: Mapping[str, float] = {"loss": 3.16, "lr": 1e-4, "step_time_s": 1.0}


def lines(first: int, last: int, **faults: Mapping[int, float]) -> list[str]:
    """Return the lines of steps with a noise of about 1 %; `faults` has other values of quantities, by step."""
    found = []
    for step in range(first, last + 1):
        row = HEALTHY | {"loss": HEALTHY["loss"] * (1 + 0.01 * (step * 7 % 5 - 2))}
        found.append({"step": step, **row, **{name: at[step] for name, at in faults.items() if step in at}})
    return [json.dumps(row) for row in found]


async def write(watch: Watch, replay: Replay, *parts: list[str]) -> None:
    """Write the parts to the log, and poll after each one."""
    async with watch.session() as session:
        for part in parts:
            replay.write(part, seconds=10.0)
            await session.poll()


def listed(watch: Watch) -> list[tuple[str, str]]:
    """Return the state and the sentence of each incident, as `rankscope incidents` lists them."""
    with connect(watch.folder) as connection:
        found = incidents(connection, ["r"]).get("r", ())
    return [("open" if one.is_open else one.states[-1][1], sentence_of(one)) for one in found]


FAULTS: Mapping[str, tuple[Mapping[str, Mapping[int, float]], str, str]] = {
    "AnomalyNan in loss": ({"loss": {40: math.nan}}, "critical", "loss became NaN"),
    "LossSpike in loss": ({"loss": {40: 7.66}}, "warning", "loss 7.66, 2.4 times its median"),
    "LearningRateJump in learning_rate": (
        {"lr": dict.fromkeys(range(40, 91), 1e-3)},
        "warning",
        "learning rate 0.001, 10 times its previous maximum",
    ),
    "SlowSteps in step_seconds": (
        {"step_time_s": {38: 3.1, 39: 3.1, 40: 3.1}},
        "warning",
        "step time 3.1 s, 3.1 times its median",
    ),
}


@pytest.mark.usual(2)
@pytest.mark.parametrize("rule", FAULTS)
async def test_firing_is_printed_sent_and_listed_once(watch, replay, caplog, rule):
    faults, severity, wrong = FAULTS[rule]
    await write(watch, replay, lines(1, 36), lines(37, 45, **faults), lines(46, 50, **faults))
    during = listed(watch)
    await write(watch, replay, lines(51, 90, **faults))
    (message,) = watch.receiver.messages

    assert f"[{severity}] r: {rule}, {replay.path}, step 40: {wrong}" == message.title
    assert "details: rankscope anomalies r --store" in message.body
    assert "  step 40  " in message.body
    assert [f"r: {wrong} at step 40"] == [record.getMessage() for record in caplog.records]
    assert [f"{wrong[0].upper()}{wrong[1:]} at step 40"] == [sentence for _, sentence in during]
    assert [("resolved", during[0][1])] == listed(watch)


async def test_lasting_nan_is_open_and_reported_once(watch, replay):
    nan = dict.fromkeys(range(40, 121), math.nan)
    await write(watch, replay, lines(1, 60, loss=nan), lines(61, 90, loss=nan))
    await write(watch, replay, lines(91, 120, loss=nan))
    (message,) = watch.receiver.messages

    assert "loss: 3.16 to 3.1916, NaN or infinite in 1 of 10 rows; in a normal training: falls" in message.body
    assert [("open", "Loss became NaN at step 40")] == listed(watch)


async def test_training_that_finished_with_nan_has_its_severity(watch, replay):
    done = {**HEALTHY, "loss": math.nan, "step": 60, "total_steps": 60}
    rows = [*lines(1, 59, loss=dict.fromkeys(range(40, 60), math.nan)), json.dumps(done)]
    await write(watch, replay, rows[:30], rows[30:])
    title = next(title for title in watch.receiver.titles if "RunFinished" in title)
    reason = "finished with 1 open incident: loss became NaN at step 40"

    assert f"[critical] r: RunFinished, {replay.path}, step 60: {reason}" == title
    assert ("finished", reason) == (watch.changes[-1].condition, watch.changes[-1].reason)
    assert not watch.changes[-1].is_normal


async def test_spike_that_rises_to_the_end_has_its_largest_value(watch, replay):
    rising = {step: 7.66 * 1.1 ** (step - 40) for step in range(40, 60)}
    done = {**HEALTHY, "loss": 60.0, "step": 60, "total_steps": 60}
    rows = [*lines(1, 59, loss=rising), json.dumps(done)]
    await write(watch, replay, rows[:45], rows[45:])
    shown = "loss up to 60, 19 times its median, since step 40"

    assert f"finished with 1 open incident: {shown}" == watch.changes[-1].reason
    assert [("open", f"L{shown[1:]}")] == listed(watch)


async def test_rows_of_every_hundredth_step_are_neighbours(watch, replay):
    """The log has a row for every 100 steps, of which the last two are NaN."""
    rows = [json.dumps({"step": 100 * n, "loss": math.nan if n > 28 else 3.0 - n / 90}) for n in range(1, 31)]
    await write(watch, replay, rows[:25], rows[25:])
    (message,) = watch.receiver.messages

    assert "step 2900: loss became NaN" in message.title
    assert [("open", "Loss became NaN at step 2,900")] == listed(watch)


async def test_anomaly_of_an_attempt_is_open_until_a_later_one_passes_its_step(watch, replay):
    """The script is started again from step 20, in the same log."""
    nan = dict.fromkeys(range(40, 61), math.nan)
    async with watch.session() as session:
        replay.write(lines(1, 60, loss=nan), seconds=10.0)
        await session.poll()
        replay.write(lines(20, 38), seconds=10.0)
        await session.poll()
        await session._reporter.sent()
        before = listed(watch)
        replay.write(lines(39, 42), seconds=10.0)
        await session.poll()

    assert [("open", "Loss became NaN at step 40")] == before
    assert [("resolved", "Loss became NaN at step 40")] == listed(watch)
    assert [1] == [row["attempt"] for row in watch.query("SELECT attempt FROM runs")]
    assert 1 == len(watch.receiver.messages)


async def test_crash_and_restart_between_two_polls_are_printed_sent_and_listed(watch, replay, caplog):
    """The traceback is younger than `failed_after_seconds` when the script starts again from step 41."""
    crash = ["Traceback (most recent call last):", '  File "train.py", line 3', "RuntimeError: disk full"]
    await write(watch, replay, lines(1, 60), crash, lines(41, 50))
    failed = f"[critical] r: RunFailed, {replay.path}, step 60: exception: RuntimeError: disk full"

    assert [failed, "[resolved] r: RunFailed, training continues"] == watch.receiver.titles
    assert [
        "r: failed at step 60: exception: RuntimeError: disk full",
        "r: training was started again as attempt 1, step 41",
    ] == [record.getMessage() for record in caplog.records]
    assert [("resolved", "Exception: RuntimeError: disk full at step 60")] == listed(watch)
    assert ["failed", "stopped"] == [row["state"] for row in watch.query("FROM attempts ORDER BY attempt")]


async def test_same_anomaly_in_the_later_attempt_keeps_both_open(watch, replay):
    nan = dict.fromkeys(range(40, 61), math.nan)
    await write(watch, replay, lines(1, 60, loss=nan), lines(20, 60, loss=nan))

    assert [("open", "Loss became NaN at step 40")] * 2 == listed(watch)
    assert 2 == len(watch.receiver.messages)


async def test_slow_steps_at_the_end_of_the_log_are_one_message(watch, replay):
    slow = dict.fromkeys(range(38, 51), 3.1)
    await write(watch, replay, lines(1, 37), lines(38, 50, step_time_s=slow))
    (message,) = watch.receiver.messages

    assert message.title.endswith("step 50: the last step took 3.1 s, 3.1 times the median of 1 s")
    assert ("open", "The last step took 3.1 s, 3.1 times the median of 1 s at step 50") in listed(watch)
