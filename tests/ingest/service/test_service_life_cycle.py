"""States of runs over real HTTP, across restarts and launches, and texts about a run with an open incident."""

import contextlib
import functools
import html
import io
import json
import re

import pytest
from tests.ingest.servers import Receiver

from rankscope.commands.incidents import incidents
from rankscope.commands.runs import runs
from rankscope.commands.summary import summary
from rankscope_view.site import Site

STALLING = {"runs.stalled_after_seconds": 2.0, "runs.stalled_in_phase_after_seconds": 30.0}


async def end(rank, service, eventually, reason="completed", error=None):
    """Send an exit report of `rank`, drain it and close its port."""
    rank.publish(events=[{"type": "exit", "details": json.dumps({"reason": reason, "error": error})}])
    rank.state = "draining"
    await rank.deliver(service)
    await rank.die()


async def is_in(service, state, attempt=0):
    found = await service.run_state()
    return found["state"] == state and found["attempt"] == attempt and found


async def test_stalled_run_that_continues_is_running_again(start_service, fake_rank, eventually):
    async with start_service(**STALLING) as service, fake_rank() as rank:
        rank.publish_steps(1)
        await rank.register(service.url)
        found = await eventually(lambda: is_in(service, "stalled"))

        def make_step():
            rank.publish_steps(1)  # at each check: a pause of 2 s would stall the run again
            return is_in(service, "running")

        await eventually(make_step)
        await end(rank, service, eventually)
        await eventually(lambda: is_in(service, "completed"))
        await service.end()
        states = service.rows("SELECT state FROM runs_history ORDER BY ordinal")

    assert found["reason"].startswith("alive, but no step for ")
    assert ["pending", "running", "stalled", "running", "completed"] == [
        row["state"] for place, row in enumerate(states) if place == 0 or row["state"] != states[place - 1]["state"]
    ]


async def test_launch_with_fewer_ranks_is_the_next_attempt_of_its_run(start_service, fake_rank, eventually):
    async with start_service() as service:
        async with fake_rank(rank=0, world_size=2) as zero, fake_rank(rank=1, world_size=2) as one:
            for rank in (zero, one):
                rank.publish_steps(3)
                await rank.register(service.url)
            await eventually(lambda: is_in(service, "running"))
            await end(zero, service, eventually, "exception", "RuntimeError: Connection closed by peer")
            await end(one, service, eventually, "exception", "ValueError: no")
            failed = await eventually(lambda: is_in(service, "failed"))
        async with fake_rank(rank=0, world_size=1, launch_id="second", incarnation="later") as alone:
            alone.publish(step=2, scalars=[{"name": "loss", "value": 1.0}])
            await alone.register(service.url)
            running = await eventually(lambda: is_in(service, "running", attempt=1))
            await end(alone, service, eventually)
            await eventually(lambda: is_in(service, "completed", attempt=1))
        await service.end()
        rows = service.rows("SELECT attempt, state, world_size, last_step, reason FROM attempts ORDER BY attempt")

    assert (2, 0) == (failed["world_size"], failed["ranks_alive"])
    assert (1, 2, 1, 1) == tuple(running[key] for key in ("attempt", "step", "world_size", "ranks_alive"))
    assert [(0, "failed", 2), (1, "completed", 1)] == [
        (row["attempt"], row["state"], row["world_size"]) for row in rows
    ]
    assert "rank 1: ValueError: no" == rows[0]["reason"]


@pytest.mark.thorough
async def test_repeated_launch_id_after_the_end_starts_a_new_attempt(start_service, fake_rank, eventually):
    """Restarted ranks without a process group derive an equal id. This works across a restart of the service."""
    numbers = []
    for name in ("first", "second", "third"):
        async with start_service() as service:
            for again in ("", "-again") if name == "third" else ("",):
                async with fake_rank(incarnation=name + again, started_at=4_000_000_000_000_000) as rank:
                    rank.publish_steps(2)
                    await rank.register(service.url)
                    numbers.append(rank.attempt)
                    await eventually(lambda: is_in(service, "running", attempt=numbers[-1]))
                    await end(rank, service, eventually)
                    await eventually(lambda: is_in(service, "completed", attempt=numbers[-1]))
            await service.end()

    assert [0, 1, 2, 3] == numbers


async def test_rank_of_an_older_attempt_does_not_change_the_state_of_the_run(start_service, fake_rank, eventually):
    async with fake_rank(launch_id="old", incarnation="old") as old:
        async with start_service() as service:
            old.publish_steps(5)
            await old.register(service.url)
            await eventually(lambda: is_in(service, "running"))
            async with fake_rank(launch_id="new", incarnation="new") as new:
                new.publish_steps(1)
                await new.register(service.url)
                await eventually(lambda: is_in(service, "running", attempt=1))
                await end(new, service, eventually)
                ended = "FROM attempts WHERE attempt = 1 AND state = 'completed'"
                await eventually(lambda: service.rows(ended))
                await eventually(lambda: is_in(service, "running", attempt=0))  # which still trains
            await service.end()
        async with start_service() as service:
            await old.register(service.url)
            old.publish_steps(5)
            await end(old, service, eventually, "exception", "ValueError: late")
            await service.end()
        run = service.rows("SELECT attempt, state FROM runs")
        attempts = service.rows("SELECT attempt, state FROM attempts ORDER BY attempt")

    assert [{"attempt": 1, "state": "completed"}] == run
    assert [{"attempt": 0, "state": "failed"}, {"attempt": 1, "state": "completed"}] == attempts


# Texts about a run that ended with an open incident: pages, commands and messages.

SENTENCE = "Completed with 1 open incident: Rank 0: gradient of layers.3 became NaN at step 12."
NAN = {"severity": "critical", "rule": "AnomalyNan", "kind": "grad_unreduced", "tensor": "layers.3", "op": "nans"}


def nan_event(**columns):
    return {"type": "anomaly", "value": 4.0, "message": "AnomalyNan on layers.3", **NAN, **columns}


async def train(rank, service, eventually, *, steps, nan=(), reason="completed", error=None):
    """Publish `steps`, with NaN at those in `nan`, and end the rank."""
    for step in steps:
        events = [nan_event()] if step in nan else []
        rank.publish(step=step, scalars=[{"name": "loss", "value": 1.0}], events=events)
    await rank.deliver(service)
    await end(rank, service, eventually, reason, error)


def printed(command, *arguments, **options):
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), write_through=True)) as output:
        command(*arguments, **options)
    return output.buffer.getvalue().decode()


def page_of(store, *segments):
    body = Site(store).respond(segments, {}).body.decode()
    title = re.search("<title>(.*?)</title>", body)[1]
    return html.unescape(title), html.unescape(re.sub(r"<(script|svg).*?</\1>|<[^>]+>", "", body, flags=re.DOTALL))


def texts_of(store, run):
    """Return the texts about `run` that people see: list, page, report, `runs`, `runs show` and `summary`."""
    listed, shown, report = (page_of(store, *path)[1] for path in ((), ("runs", run), ("runs", run, "report")))
    table = printed(runs, store=store)
    details = printed(runs, "show", [run], store=store)
    return [listed, shown, report, table, details, printed(summary, source=run, store=store)]


async def test_run_that_ends_with_nan_has_an_open_incident_on_all_pages(start_service, fake_rank, eventually):
    async with Receiver() as receiver:
        start = functools.partial(start_service, **{"notify.urls": [receiver.url]})
        async with start() as service:
            async with fake_rank() as rank:
                await train(rank, service, eventually, steps=range(1, 31), nan=range(12, 31))
            await eventually(lambda: is_in(service, "completed"))
            await service.end()
            store = service.store
        ended = texts_of(store, "r")
        pages = (("runs", "r"), ("runs", "r", "report"), ("runs", "r", "ranks"), ())
        titles_of_pages = [page_of(store, *path)[0] for path in pages]
        async with start() as service:  # the service was restarted in between
            async with fake_rank(launch_id="second", incarnation="later") as rank:
                await train(rank, service, eventually, steps=range(5, 31))
            await eventually(lambda: is_in(service, "completed", attempt=1))
            await service.end()

    assert [1] * 6 == [text.count(SENTENCE) for text in ended]
    of_run = [f"1 open incident: {title} · Rankscope" for title in ("r", "Report of r", "Ranks of r")]
    assert [*of_run, "1 with incidents, 0 active · Rankscope"] == titles_of_pages
    assert ["[critical] r"] == [title.partition(":")[0] for title in receiver.titles]
    assert receiver.titles[0].endswith(", step 12: 4 elements are NaN")
    assert [0] * 6 == [text.count("open incident") for text in texts_of(store, "r")]
    assert "None." in page_of(store, "runs", "r")[1]


async def test_nan_that_is_over_before_the_end_and_an_open_one_of_two(start_service, fake_rank, eventually):
    async with start_service() as service:
        async with fake_rank() as rank:
            await train(rank, service, eventually, steps=range(1, 31), nan=range(12, 28))
        async with fake_rank(run="crash") as rank:
            crash = {"nan": [30], "reason": "exception", "error": "OSError: disk full"}
            await train(rank, service, eventually, steps=range(1, 31), **crash)
        await eventually(lambda: is_in(service, "completed"))
        await eventually(lambda: service.rows("SELECT 1 FROM events WHERE rule = 'RunFailed'"))
        await service.end()
        store = service.store
    printed(incidents, ["close", "crash", "1"], store=store, note="bad disk")
    rows = json.loads(printed(incidents, ["crash"], store=store, form="json"))
    (closing,) = service.rows("SELECT ts, details->>'$.user' AS user FROM events WHERE details->>'$.state' = 'closed'")

    assert [0] * 6 == [text.count("Completed with") for text in texts_of(store, "r")]
    assert [(2, "open", ""), (1, "closed", f"{closing['user']} “bad disk”")] == [
        (row["n"], row["state"], row["closed"]) for row in rows
    ]
    assert closing["user"]
    assert closing["ts"]
    shown = "Failed at step 30: rank 0: OSError: disk full."
    assert [1] * 6 == [text.count(shown) for text in texts_of(store, "crash")]
    assert f"rankscope incidents close crash --store {store}" in page_of(store, "runs", "crash")[1]


async def test_crash_is_shown_with_its_exception_and_the_step_of_its_rank(start_service, fake_rank, eventually):
    """Rank 0 has begun the step 31, which waits 11 s for its peer, when rank 1 raises at step 30."""
    # In the other run, the first rank to fail is unknown.
    closed = "RuntimeError: Connection closed by peer"
    async with Receiver() as receiver, start_service(**{"notify.urls": [receiver.url]}) as service:
        for run, last_step, cause in (("r", 31, "OSError: disk full"), ("unknown", 30, closed)):
            zero, one = (fake_rank(run=run, rank=rank, world_size=2) for rank in range(2))
            async with zero, one:
                for rank, last in ((zero, last_step), (one, 30)):
                    for step in range(1, last + 1):
                        values = {"loss": 1.0, "step_seconds": 0.25 if step < 31 else 11.0, "tokens_per_second": 300.0}
                        rank.publish(step=step, scalars=[{"name": name, "value": values[name]} for name in values])
                    await rank.register(service.url)
                await end(one, service, eventually, "exception", cause)
                await end(zero, service, eventually, "exception", closed)
        sent = {"[critical] r", "[critical] unknown"}
        await eventually(lambda: sent == {title.split(":")[0] for title in receiver.titles})
        await service.end()
    page, store = page_of(service.store, "runs", "r")[1], service.store
    unknown = [*texts_of(store, "unknown"), page_of(store, "runs", "unknown", "incidents")[1]]

    crash = "Failed at step 30: rank 1: OSError: disk full."
    assert [1] * 6 == [text.count(crash) for text in texts_of(store, "r")]
    assert [True] * 3 == [text in page for text in ("step 30 ·", "0.2500 s/step", "Throughput, all ranks600 tok/s")]
    assert [30] * 2 == [row["last_step"] for row in json.loads(printed(runs, store=store, form="json"))]
    (title,) = (title for title in receiver.titles if "] r:" in title)
    assert title.endswith(", step 30: OSError: disk full")
    assert [] == [found for text in unknown for found in re.findall("rank unknown|step 30 at step 30", text)]
    assert all("Connection closed by peer" in text for text in unknown)
