"""Scalars of viewed runs: the mean over ranks of each step, only while a page of the run is open."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from rankscope_ingest.reporting.live_tail import KEPT_STEPS, KEPT_VALUES, MOST_NAMES, LiveTails


def body(rank: int, values: dict[int, float | None], *, name="loss", labels=None, attempt=0):
    """Return the parts of a poll response that the tails read: one scalar at each step."""
    count = len(values)
    columns = {"name": pa.array([name] * count), "labels": pa.array([labels] * count, pa.string())}
    columns["value"] = pa.array(list(values.values()), pa.float64())
    return SimpleNamespace(
        context=SimpleNamespace(run="r", rank=rank, attempt=attempt),
        nested={"scalars": SimpleNamespace(columns=columns, records=np.arange(count))},
        columns={"step": pa.array(list(values)), "ts": pa.array([step * 1_000_000 for step in values])},
    )


async def rows(tails: LiveTails, seen: int = 0):
    number, text = await asyncio.wait_for(tails.changed("r", seen), 5)
    return number, json.loads(text)


async def test_loss_of_a_step_is_the_mean_of_all_ranks_with_their_number():
    tails = LiveTails()
    with tails.viewing("r"):
        tails.add(body(0, {7: 2.0, 8: 3.0}))
        tails.add(body(1, {7: 4.0}))
        _, found = await rows(tails)

    assert [[0, 7, 7.0, {"loss": [3.0, 2.0, 4.0, 2]}], [0, 8, 8.0, {"loss": [3.0, 3.0, 3.0, 1]}]] == found


async def test_late_rank_changes_all_steps_from_its_own_on():
    """A response without a shown scalar changes nothing."""
    tails = LiveTails()
    with tails.viewing("r"):
        tails.add(body(0, {1: 1.0, 2: 1.0, 3: 1.0}))
        seen, _ = await rows(tails)
        waiting = asyncio.create_task(rows(tails, seen))
        await asyncio.sleep(0)
        tails.add(body(0, {1: 7.0}, name="host_cpu_utilization"))
        await asyncio.sleep(0)
        tails.add(body(1, {2: 5.0}))
        _, found = await waiting

    assert [(2, 3.0), (3, 1.0)] == [(step, values["loss"][0]) for _, step, _, values in found]


async def test_nan_is_null_and_throughput_has_its_sum():
    tails = LiveTails()
    with tails.viewing("r"):
        tails.add(body(0, {1: float("nan")}))
        tails.add(body(0, {1: 10.0}, name="tokens_per_second"))
        tails.add(body(1, {1: 30.0}, name="tokens_per_second"))
        tails.add(body(0, {1: 9.0}, name="learning_rate", labels='{"group":"1"}'))
        tails.add(body(0, {1: 8.0}, name="learning_rate", labels='{"group":"0"}'))
        tails.add(body(0, {1: 7.0}, name="process_threads"))
        _, found = await rows(tails)

    values = {"loss": [None] * 3, "tokens_per_second": [20.0, 10.0, 30.0, 40.0], "learning_rate": [8.0] * 3}
    groups = {'learning_rate{"group":"0"}': [8.0] * 3, 'learning_rate{"group":"1"}': [9.0] * 3}
    assert values | groups == found[0][3]


async def test_every_name_that_the_script_logs_is_kept_within_a_limit():
    tails = LiveTails()
    with tails.viewing("r"):
        for number in range(MOST_NAMES + 50):
            tails.add(body(0, dict.fromkeys(range(250), 1.0), name=f"val/m{number}"))
        tails.add(body(0, {250: 1.0}, name="loss"))
        _, found = await rows(tails)

    assert {f"val/m{number}" for number in range(MOST_NAMES)} == {name for row in found[:-1] for name in row[3]}
    assert ["loss"] == list(found[-1][3])
    assert KEPT_VALUES >= len(found) * MOST_NAMES


async def test_at_most_the_newest_steps_are_kept():
    viewed = []
    tails = LiveTails(viewed.append)
    with tails.viewing("r"), tails.viewing("r"):
        tails.add(body(0, dict.fromkeys(range(2 * KEPT_STEPS), 1.0)))
        _, found = await rows(tails)

    assert ["r"] == viewed
    assert KEPT_STEPS == len(found)
    assert not tails.is_viewed("r")


async def test_page_that_is_opened_gets_rows_that_are_not_stored_yet():
    """Steps that one rank sent before and another after the kept time have no mean."""
    tails = LiveTails()
    tails.add(body(1, {1: 5.0, 2: 5.0}))
    tails.add(body(0, {2: 1.0, 3: 1.0}))
    tails.add(body(0, {1: 0.5}, name="eval_loss"))
    with tails.viewing("r"):
        _, found = await rows(tails)

    assert [(1, {"eval_loss": [0.5] * 3}), (2, {"loss": [3.0, 1.0, 5.0, 2]}), (3, {"loss": [1.0, 1.0, 1.0, 1]})] == [
        (step, values) for _, step, _, values in found
    ]


async def test_old_responses_are_not_kept():
    tails = LiveTails(kept_seconds=0.0)
    tails.add(body(0, {1: 1.0}))
    tails.add(body(0, {2: 1.0}))
    with tails.viewing("r"):
        _, found = await rows(tails)

    assert [2] == [step for _, step, _, _ in found]
