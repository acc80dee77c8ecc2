"""The whole service with real HTTP servers as ranks: each record is stored once, and faults remain isolated."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import re

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from tests.ingest.conftest import encode_records

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.wire.channel import ARROW_STREAM
from rankscope_ingest.detect import run_monitor
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_storage.api.summaries import runs, summary
from rankscope_storage.connection import connect
from rankscope_view.data.curves import CurveRequest, Smoothing, curve
from rankscope_view.data.detail import read_chart
from rankscope_view.data.summary import read_summary

shared = pytest.mark.asyncio(loop_scope="module")
LOSSES = "SELECT attempt, rank, seq FROM scalars WHERE name = 'loss' ORDER BY attempt, rank, seq"
PLAN = Plan((PlanEntry(kind="grad_reduced", tensor="w", dtype="float32", shape=(2,)),))


@shared
async def test_every_record_is_stored_once_and_its_commit_is_reported(shared_service, fake_rank):
    async with fake_rank(run="once") as rank:
        rank.max_rows = 7
        await rank.deliver(shared_service, 30, plan=rank.add_plan(PLAN), values=[1.0] * 6, counts=[0, 0, 0, 2])
    stored = "SELECT attempt, rank, incarnation, seq FROM scalars WHERE run = 'once' AND name = 'loss' ORDER BY seq"
    statistics = "SELECT count(*) AS n FROM tensor_stats WHERE run = 'once' AND tensor = 'w' AND numel = 2"

    assert [(0, 0, "inc-once-0", seq) for seq in range(30)] == [tuple(r.values()) for r in shared_service.rows(stored)]
    assert [{"n": 30}] == shared_service.rows(statistics)
    assert [{"tensor": "w", "shape": [2]}] == shared_service.rows("SELECT tensor, shape FROM tensors")


async def test_statistics_are_rounded_to_the_configured_mantissa(start_service, fake_rank):
    norm = float(np.float32(math.pi))
    async with fake_rank() as rank, start_service(**{"store.mantissa_bits": 12}) as service:
        rank.publish(scalars=[{"name": "loss", "value": math.pi}])
        values = [norm, -norm, norm, 0.0, norm, 0.0]
        await rank.deliver(service, 3, plan=rank.add_plan(PLAN), values=values, counts=[0, 0, 0, 2])
    found = service.rows("SELECT DISTINCT norm, min, max, mean, norm_baseline, mean_baseline FROM tensor_stats")

    assert [(3.1416015625, -3.1416015625, 3.1416015625, 0.0, norm, 0.0)] == [tuple(row.values()) for row in found]
    assert [{"value": math.pi}] == service.rows("SELECT value FROM scalars WHERE name = 'loss' AND seq = 0")


async def test_restart_continues_at_watermark_and_attempt_numbers_of_the_store(start_service, fake_rank):
    async with fake_rank() as rank, fake_rank(launch_id="second", incarnation="second") as second:
        for records in (5, 6):
            async with start_service() as service:
                await rank.deliver(service, records)
        async with start_service() as service:
            await second.deliver(service, 1)
    seqs = [(0, seq) for seq in range(11)] + [(1, 0)]

    assert seqs == [(row["attempt"], row["seq"]) for row in service.rows(LOSSES)]
    assert [0, 1] == [row["attempt"] for row in service.rows("SELECT attempt FROM attempts ORDER BY attempt")]


async def test_live_training_is_shown_after_a_younger_one_of_its_name_has_ended(
    start_service, fake_rank, eventually, monkeypatch, caplog
):
    """The two are reported, once in the log and to the rank that is alive."""
    monkeypatch.setattr(run_monitor, "OVERLAP_SECONDS", 0.1)
    ended = [{"type": "exit", "details": '{"reason": "completed"}'}]
    older_, younger_ = fake_rank(launch_id="a", planned_steps=9), fake_rank(launch_id="b", incarnation="b")
    async with older_ as older, younger_ as younger, start_service() as service:
        older.publish_steps(6)
        await older.register(service.url)
        await eventually(lambda: older.committed == 5)
        younger.publish_steps(3)
        younger.publish(step=None, events=ended)
        await younger.register(service.url)
        await eventually(lambda: service.rows("FROM attempts WHERE attempt = 1 AND state = 'completed'"))
        older.publish_steps(1)
        await eventually(lambda: older.committed == 6)
        await eventually(lambda: [row["attempt"] for row in service.rows("FROM runs WHERE state = 'running'")] == [0])
        shown = await service.run_state()
        await eventually(lambda: "two trainings have" in caplog.text)
        await eventually(lambda: "Rankscope-Notice" in older.requests[-1].headers)
        reply = json.loads((await older.register(service.url))[1])
        pages = [(await service.get(path))[1] for path in ("/", "/service", "/api/v1/status")]
        with connect(service.store) as connection:
            listed, found = runs(connection).to_pylist(), read_summary(connection, "r")
            drawn = curve(read_chart(connection, "r", "loss"), CurveRequest(smoothing=Smoothing.NONE))
        older.publish(step=None, events=ended)
        await eventually(lambda: service.rows("FROM runs WHERE state = 'completed' AND attempt = 1"))

    assert (0, "running", 6) == (shown["attempt"], shown["state"], shown["step"])
    assert reply["notice"].startswith(
        "two trainings have the same run name 'r' at the same time: attempts 0 and 1. Both"
    )
    assert all("two trainings have the same run name" in page for page in pages)
    assert 1 == caplog.text.count("two trainings have the same run name")
    assert [(6, 9)] == [(row["last_step"], row["planned_steps"]) for row in listed]
    assert (0, [0, 1, 2, 3, 4, 5, 6]) == (drawn.attempt, list(drawn.lines[0].step))
    assert (6, 9, 6) == (found.progress.step, found.progress.planned_steps, found.losses.current_step)


async def test_stop_stores_the_remaining_records_of_the_ranks(start_service, fake_rank, eventually):
    changes = {"ingest.flush_after_seconds": 1000.0, "ingest.poll_seconds": 60.0}
    async with fake_rank() as rank, start_service(**changes) as service:
        await rank.register(service.url)
        rank.publish_steps(20)
        rank.max_rows = 3
        await eventually(service.targets)
        await service.end()

        assert 19 == rank.committed
    assert 20 == len(service.rows(LOSSES))


@shared
async def test_hostile_names_are_stored_unchanged(shared_service, fake_rank):
    names = ["../../etc", "a=b/c", "123", 'it\'s "quoted"; DROP TABLE runs', "学习 🙂", " ", "%2e", "a\nb"]
    async with contextlib.AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(fake_rank(run=name)) for name in names]
        await asyncio.gather(*(rank.deliver(shared_service, 2) for rank in ranks))
        listed = {target["labels"]["instance"] for target in json.loads((await shared_service.get("/sd"))[1])}

    assert {f"{name}/0" for name in names} <= listed
    for table in ("scalars", "runs"):
        stored = {row["run"] for row in shared_service.rows(f"SELECT run FROM {table}")}
        assert set() == set(names) - stored


@shared
async def test_overwritten_records_become_a_gap_event(shared_service, fake_rank):
    async with fake_rank(run="gap") as rank:
        rank.ring = 4
        await rank.deliver(shared_service, 10)
        page = (await shared_service.get("/metrics"))[1]
    stored = shared_service.rows("SELECT seq FROM scalars WHERE run = 'gap' AND name = 'loss' ORDER BY seq")
    (gap,) = shared_service.rows("SELECT seq, rank, incarnation, value, message FROM events WHERE type = 'gap'")

    assert [6, 7, 8, 9] == [row["seq"] for row in stored]
    assert (5, 0, "inc-gap-0", 6.0) == (gap["seq"], gap["rank"], gap["incarnation"], gap["value"])
    assert "6 records lost (seq 0 to 5)" in gap["message"]
    assert 'rankscope_ingest_lost_records_total{run="gap"} 6.0' in page


async def cut_in_the_middle(rank, request):
    chosen = rank.window(int(request.query["after"]))
    if not chosen:
        return None
    response = web.StreamResponse(headers=rank.body_headers(chosen, -1) | {"Content-Length": "100000"})
    await response.prepare(request)
    await response.write(b"x" * 50)
    request.transport.close()
    return response


def answer_with(status=200, body=b"", **headers):
    async def behave(rank, _):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers=rank.headers() | named)

    return behave


def contradict(header, value):
    """Return a behaviour that sends the records with a wrong value of one header."""

    async def behave(rank, _):
        chosen = rank.window(-1)
        return web.Response(body=encode_records(chosen), headers=rank.body_headers(chosen, -1) | {header: value})

    return behave


async def chunked(rank, request):
    response = web.StreamResponse(headers=rank.body_headers(rank.window(-1), -1))
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(b"\xff\xff\xff\xff\0\0\0\0")
    return response


async def until_closed(rank, request):
    """Send a body that ends with the connection."""
    head = "".join(f"{name}: {value}\r\n" for name, value in rank.body_headers(rank.window(-1), -1).items())
    request.transport.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + b"\xff\xff\xff\xff\0\0\0\0")
    request.transport.close()
    return web.Response()


async def silent(*_):
    await asyncio.sleep(60)


BAD_ANSWERS = {  # Expected error text, the response, and the reason that is counted
    "closed in the middle": (cut_in_the_middle, "cut"),
    "text/html": (answer_with(body=b"<html>hello</html>", Content_Type="text/html"), "garbage"),
    "end-of-stream": (
        answer_with(
            body=b"not arrow", Content_Type=ARROW_STREAM, Rankscope_First="0", Rankscope_Last="4", Rankscope_Rows="5"
        ),
        "garbage",
    ),
    "no Content-Length": (chunked, "garbage"),
    "so that a truncated body cannot be detected": (until_closed, "garbage"),
    "has schema version 7": (answer_with(status=406, Rankscope_Schema="7"), "schema"),
    "token": (answer_with(status=401), "unauthorized"),
    "not followed": (answer_with(status=302, Location="http://127.0.0.1:1/"), "redirect"),
    "500: oops": (answer_with(status=500, body=b"oops"), "status"),
    "limits requests": (answer_with(status=429, Retry_After="1"), "busy"),
    "store has newer records": (answer_with(status=416), "cursor"),
    "Rankscope-First": (answer_with(Content_Type=ARROW_STREAM), "garbage"),
    "Rankscope-Head": (answer_with(Content_Type=ARROW_STREAM, Rankscope_Head="many"), "garbage"),
    "Rankscope-Incarnation": (answer_with(status=204, Rankscope_Incarnation=""), "garbage"),
    "timed out": (silent, "timeout"),
    "announce 4 records": (contradict("Rankscope-Rows", "4"), "cut"),
    "announce seq 0 to 5": (contradict("Rankscope-Last", "5"), "cut"),
    "announce seq 1 to 4": (contradict("Rankscope-First", "1"), "cut"),
}


async def test_invalid_response_is_reported_and_stores_nothing(start_service, fake_rank, eventually):
    """Each response comes from a rank of a separate run, at the same time. The faults do not affect each other."""
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(start_service(**{"ingest.timeout_seconds": 0.3}))
        ranks = {}
        for number, (words, (misbehaviour, _)) in enumerate(BAD_ANSWERS.items()):
            ranks[words] = rank = await stack.enter_async_context(fake_rank(run=f"r{number}"))
            rank.publish_steps(5)
            rank.behave = functools.partial(misbehaviour, rank)
            await rank.register(service.url)

        async def failing():
            found = {target["incarnation"]: target for target in await service.targets() if target["last_error"]}
            return found if len(found) == len(ranks) else None

        targets = await eventually(failing)
        page = (await service.get("/metrics"))[1]
        for rank in ranks.values():
            rank.behave = None
        await eventually(lambda: all(rank.committed == 4 for rank in ranks.values()))
    counted = dict(re.findall(r'^rankscope_ingest_scrape_failures_total\{reason="(\w+)"\} (\S+)$', page, re.MULTILINE))
    stored = service.rows("SELECT run, list(seq ORDER BY seq) AS seqs FROM scalars WHERE name = 'loss' GROUP BY run")

    for number, (words, (_, reason)) in enumerate(BAD_ANSWERS.items()):
        target = targets[ranks[words].registration.incarnation]
        assert words in target["last_error"]
        assert ("failing", -1) == (target["health"], target["cursor"])
        assert float(counted[reason]) >= sum(reason == other for _, other in BAD_ANSWERS.values())
        assert [0, 1, 2, 3, 4] == next(row["seqs"] for row in stored if row["run"] == f"r{number}")


@shared
async def test_unreachable_target_is_reported_and_does_not_stop_the_others(
    shared_service, fake_rank, eventually, free_port
):
    async with fake_rank(run="reachable") as rank:
        lost = fake_rank(run="unreachable")
        lost.registration = dataclasses.replace(lost.registration, url=f"http://127.0.0.1:{free_port}")
        await lost.register(shared_service.url)
        await rank.deliver(shared_service, 3)

        async def refused():
            found = [one for one in await shared_service.targets() if "connection refused" in (one["last_error"] or "")]
            return [one["run"] for one in found]

        assert "unreachable" in await eventually(refused)


async def test_slow_target_does_not_delay_the_others(start_service, fake_rank, eventually):
    patient = {"ingest.timeout_seconds": 120.0}
    async with fake_rank(run="slow") as slow, fake_rank() as rank, start_service(**patient) as service:
        released = asyncio.Event()
        slow.behave = lambda _: released.wait()
        await slow.register(service.url)
        await eventually(lambda: slow.polls)
        await rank.deliver(service, 3)  # the poll of the slow rank never ends
        released.set()


@shared
@pytest.mark.parametrize(
    ("changes", "url", "expected", "words"),
    [
        ({"incarnation": "twin"}, None, 409, "process 1000 on here"),
        ({"rank": 1}, "http://192.0.2.7:9400", 403, "allowed_networks"),
        ({"schema_version": 99}, None, 406, "supported: 1"),
    ],
    ids=["second process", "forbidden address", "schema version"],
)
async def test_rejected_registration_contains_the_reason(shared_service, fake_rank, changes, url, expected, words):
    async with fake_rank(run="known", world_size=2) as first, fake_rank(run="known", world_size=2, **changes) as other:
        await first.register(shared_service.url)
        other.registration = dataclasses.replace(other.registration, url=url or other.registration.url)
        status, text = await other.register(shared_service.url)

    assert expected == status
    assert words in text


async def test_token_is_required_and_sent(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service(**{"service.token": "s3cret"}) as service:
        wrong = (None, "", "wrong", "s3cre", "s3cret2")
        refused = [(await rank.register(service.url, token=token))[0] for token in wrong]
        paths = ("/metrics", "/sd", "/api/v1/runs", "/", "/runs/r", "/data/live", "/assets/0/app.js", "/healthz")
        pages = [(await service.get(path))[0] for path in paths]
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
        writer.write(b"GET /sd HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        arbitrary = await reader.readline()
        writer.close()
        rank.publish_steps(1)
        accepted, _ = await rank.register(service.url, token="s3cret")
        await eventually(lambda: rank.committed == 0)

    assert [401] * 5 + [200] == [*refused, accepted]
    assert [401] * 7 + [200] == pages
    assert b"HTTP/1.1 401 Unauthorized\r\n" == arbitrary
    assert "Bearer s3cret" == rank.requests[0].headers["Authorization"]


EXIT_EVENTS = {  # Exit events of a rank, and the resulting state and reason of its run
    "surrogate": ('{"reason": "exception", "error": "no file \\udcff.bin"}', "failed", "rank 0: no file ?.bin"),
    "nested": ('{"reason": "completed", "error": ["\\ud800"]}', "completed", None),
    "deep": ("[" * 3000, "stopped", "ended without reporting success"),
    "null": ("null", "stopped", "ended without reporting success"),
}


async def test_exit_events_of_any_content_are_handled(start_service, fake_rank, eventually):
    """Exit events are evaluated and stored. They stop neither this service nor the next one that reads them."""
    expected = {run: (state, reason) for run, (_, state, reason) in EXIT_EVENTS.items()}
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(start_service())
        for run, (details, _, _) in EXIT_EVENTS.items():
            rank = await stack.enter_async_context(fake_rank(run=run))
            rank.publish(events=[{"type": "exit", "details": details}])
            await rank.register(service.url)

        async def ended():
            found = {run: await service.run_state(run) for run in EXIT_EVENTS}
            return expected == {run: (shown["state"], shown.get("reason")) for run, shown in found.items()}

        await eventually(ended)
        await service.end()
        again = await stack.enter_async_context(start_service())
        status, _ = await again.get("/healthz")

    assert 200 == status
    assert expected == {
        row["run"]: (row["state"], row["reason"]) for row in again.rows("SELECT run, state, reason FROM runs")
    }


@shared
async def test_time_outside_the_calendar_is_stored(shared_service, fake_rank):
    times = [2**62, -(2**62), 253_402_300_800_000_000]
    async with fake_rank(run="times") as rank:
        rank.publish_steps(5)
        for seq, ts in enumerate(times, 1):
            rank.records[seq]["ts"] = ts
        await rank.deliver(shared_service)
    stored = shared_service.rows("SELECT epoch_us(ts) AS ts FROM scalars WHERE run = 'times' ORDER BY seq")

    assert times == [row["ts"] for row in stored][1:4]


@shared
async def test_another_process_at_the_address_ends_the_old_target(shared_service, fake_rank):
    async with fake_rank(run="replaced") as rank:
        await rank.deliver(shared_service, 3)
        rank.registration = dataclasses.replace(rank.registration, incarnation="next", launch_id="relaunched")
        rank.records, rank.head, rank.committed, rank.lease = {}, -1, -1, None
        await rank.deliver(shared_service, 2)
    stored = "SELECT attempt, incarnation, seq FROM scalars WHERE run = 'replaced' ORDER BY attempt, seq"
    expected = [(0, "inc-replaced-0", seq) for seq in range(3)] + [(1, "next", seq) for seq in range(2)]

    assert expected == [tuple(row.values()) for row in shared_service.rows(stored)]


async def test_static_target_is_polled_across_processes(start_service, fake_rank, eventually):
    async with fake_rank(incarnation="one") as rank:
        target = {"url": rank.registration.url, "run": "static", "rank": 0}
        async with start_service(targets=[target]) as service:
            rank.publish_steps(3)

            def stored(count):
                return lambda: service.rows("SELECT count(*) AS n FROM scalars")[0]["n"] == count

            await eventually(stored(3))
            rank.registration = dataclasses.replace(rank.registration, incarnation="two")
            rank.records, rank.head = {}, -1
            rank.publish_steps(2)
            await eventually(stored(5))

    rows = service.rows("SELECT DISTINCT run, incarnation FROM scalars ORDER BY 2")
    assert [("static", "one"), ("static", "two")] == [tuple(row.values()) for row in rows]


async def test_draining_rank_is_committed_early_and_dismissed(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service(**{"ingest.flush_after_seconds": 1000.0}) as service:
        await rank.register(service.url)
        rank.publish_steps(3)
        exit_event = {"type": "exit", "severity": "info", "details": '{"reason": "completed", "last_step": 2}'}
        rank.publish(events=[exit_event])
        rank.state = "draining"
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 3)

        async def gone():
            return [target["health"] for target in await service.targets()] == ["gone"]

        await eventually(gone)
        await eventually(lambda: service.rows("SELECT state FROM runs") == [{"state": "completed"}])


async def poke(service, incarnation):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{service.url}/api/v1/poke", json={"incarnation": incarnation}) as response,
    ):
        return response.status


async def test_poke_causes_an_early_poll(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service(**{"ingest.poll_seconds": 30.0}) as service:
        await rank.register(service.url)
        rank.publish_steps(1)

        async def polled():
            await poke(service, rank.registration.incarnation)
            return len(rank.polls) > 1

        await eventually(polled, seconds=5)

        assert [404, 204] == [await poke(service, name) for name in ("unknown", rank.registration.incarnation)]


@shared
@pytest.mark.parametrize(("path", "encoding"), [("register", "gzip"), ("poke", "zstd")])
async def test_compressed_body_is_a_bad_request(shared_service, path, encoding):
    headers, url = {"Content-Encoding": encoding, "Content-Type": "application/json"}, f"{shared_service.url}/api/v1"
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/{path}", data=b"not compressed", headers=headers) as response,
    ):
        status, text = response.status, await response.text()

    assert (400, 200) == (status, (await shared_service.get("/healthz"))[0])
    assert "Content-Encoding" in text


async def test_dead_process_is_no_longer_polled_and_its_lost_records_are_counted(start_service, fake_rank, eventually):
    """Its last heartbeat reported records that were not polled."""
    async with fake_rank() as rank, fake_rank(run="other") as other, start_service() as service:
        for one in (rank, other):
            await one.deliver(service, 5)
        rank.behave = silent
        await eventually(lambda: rank.requests[-1].query["after"] == "4")
        rank.publish_steps(10)
        await rank.register(service.url)
        await rank.die()
        await eventually(lambda: service.snapshots and "failed" in [run.state for run in service.snapshots[-1].runs])
        page = (await service.get("/metrics"))[1]
        await eventually(lambda: service.snapshots[-1].targets == 1)
        shown = len(service.snapshots)
        await eventually(lambda: len(service.snapshots) > shown + 2)  # longer than any pause between polls
        later = (await service.get("/metrics"))[1]
        await other.deliver(service, 5)

    def refusals(text):
        return [line for line in text.splitlines() if 'reason="refused"' in line]

    assert refusals(page) == refusals(later)
    assert [{"seq": None, "value": 10.0}] == service.rows("SELECT seq, value FROM events WHERE type = 'gap'")
    assert {"ok"} == {snapshot.degraded or "ok" for snapshot in service.snapshots}


async def test_lost_records_are_undone_when_they_arrive(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service(**{"runs.failed_after_seconds": 1.0}) as service:
        await rank.deliver(service, 5)
        rank.behave = silent
        await eventually(lambda: rank.requests[-1].query["after"] == "4")
        rank.publish_steps(5)
        await rank.register(service.url)

        async def failed():
            return (await service.run_state())["records_lost"] == 5

        async def runs_without_loss():
            state = await service.run_state()
            return ("running", 0) == (state["state"], state["records_lost"])

        await eventually(failed)
        rank.behave = None
        await rank.deliver(service)
        await eventually(runs_without_loss)
    gaps = service.rows("SELECT value FROM events WHERE type = 'gap' ORDER BY ordinal")

    assert list(range(10)) == [row["seq"] for row in service.rows(LOSSES)]
    assert [{"value": 5.0}, {"value": -5.0}] == gaps
    with connect(service.store) as connection:
        assert 0 == summary(connection, "r").lost_records


async def test_rank_that_cannot_be_drained_does_not_affect_the_others(start_service, fake_rank, monkeypatch):
    """The service polls the remaining records when it stops."""
    async with fake_rank(world_size=2) as one, fake_rank(rank=1, world_size=2) as other:
        async with start_service() as service:
            for rank in (one, other):
                await rank.deliver(service, 1)
            original = TargetLoop.poll_once

            async def poll(loop):
                if loop.target.registration.rank == 0:
                    raise TypeError("not foreseen")
                return await original(loop)

            monkeypatch.setattr(TargetLoop, "poll_once", poll)
            for rank in (one, other):
                rank.publish_steps(4)
        rows = service.rows(LOSSES)

    assert 4 == max(row["seq"] for row in rows if row["rank"] == 1)
