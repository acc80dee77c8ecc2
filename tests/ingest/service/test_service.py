"""The whole service with real HTTP servers as ranks: each record is stored once, and faults remain isolated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import re
import time

import numpy as np
import pytest
from aiohttp import web

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.protocol.channel import ARROW_STREAM
from rankscope_ingest.detect import run_monitor
from rankscope_ingest.detect.stall_handler import StallHandler
from rankscope_ingest.record_channel.loop import TargetLoop
from rankscope_storage.api.summaries import runs, summary
from rankscope_storage.connection import connect
from rankscope_view.data.curves import CurveRequest, Smoothing, curve
from rankscope_view.data.detail import read_chart
from rankscope_view.data.summary import read_summary

LOSSES = (
    "SELECT run, attempt, rank, incarnation, seq, step, value FROM scalars WHERE name = 'loss' ORDER BY run, rank, seq"
)
PLAN = Plan((PlanEntry(kind="grad_reduced", tensor="w", dtype="float32", shape=(2,)),))


async def test_every_record_is_stored_once_and_its_commit_is_reported(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service() as service:
        plan = rank.add_plan(PLAN)
        rank.publish_steps(30, plan=plan, values=[1.0] * 6, counts=[0, 0, 0, 2])
        rank.max_rows = 7
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 29)
    rows = service.rows(LOSSES)

    assert list(range(30)) == [row["seq"] for row in rows]
    assert [("r", 0, 0, "inc-r-0")] == sorted({(r["run"], r["attempt"], r["rank"], r["incarnation"]) for r in rows})
    assert [{"n": 30}] == service.rows("SELECT count(*) AS n FROM tensor_stats WHERE tensor = 'w' AND numel = 2")
    assert [{"tensor": "w", "shape": [2]}] == service.rows("SELECT tensor, shape FROM tensors")


async def test_statistics_are_rounded_to_the_configured_mantissa(start_service, fake_rank, eventually):
    norm = float(np.float32(math.pi))
    async with fake_rank() as rank, start_service(**{"store.mantissa_bits": 12}) as service:
        plan = rank.add_plan(PLAN)
        rank.publish_steps(3, plan=plan, values=[norm, -norm, norm, 0.0, norm, 0.0], counts=[0, 0, 0, 2])
        rank.publish(scalars=[{"name": "loss", "value": math.pi}])
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 3)
    columns = "norm, min, max, mean, norm_baseline, mean_baseline"

    assert [
        {"norm": 3.1416015625, "min": -3.1416015625, "max": 3.1416015625, "mean": 0.0}
        | {"norm_baseline": norm, "mean_baseline": 0.0}
    ] == service.rows(f"SELECT DISTINCT {columns} FROM tensor_stats")
    assert [{"value": math.pi}] == service.rows("SELECT value FROM scalars WHERE name = 'loss' AND seq = 3")


async def test_restart_continues_at_the_watermark_of_the_store(start_service, fake_rank, eventually):
    async with fake_rank() as rank:
        for total in (5, 11):
            async with start_service() as service:
                await rank.register(service.url)
                rank.publish_steps(total - rank.head - 1)
                await eventually(lambda total=total: rank.committed == total - 1)

    assert list(range(11)) == [row["seq"] for row in service.rows(LOSSES)]
    assert [{"attempt": 0}] == service.rows("SELECT attempt FROM attempts")


async def test_new_launch_is_the_next_attempt_also_after_a_restart(start_service, fake_rank, eventually):
    attempts = []
    for launch in ("first", "second", "third"):
        async with fake_rank(launch_id=launch, incarnation=launch) as rank, start_service() as service:
            await rank.register(service.url)
            rank.publish_steps(1)
            await eventually(lambda rank=rank: rank.committed == 0)
            attempts.append(rank.attempt)

    assert [0, 1, 2] == attempts
    assert attempts == [row["attempt"] for row in service.rows("SELECT attempt FROM scalars ORDER BY attempt")]


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


async def test_clock_set_back_does_not_make_an_old_version_the_latest(
    start_service, fake_rank, eventually, monkeypatch
):
    async with fake_rank() as rank:
        async with start_service() as service:
            await rank.register(service.url)
            rank.publish_steps(3)
            await eventually(lambda: rank.committed == 2)
            await eventually(lambda: service.rows("SELECT 1 FROM runs WHERE state = 'running'"))
        before = service.rows("SELECT max(ordinal) AS last FROM scalars")[0]["last"]
        genuine = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: genuine() - 3_600_000_000_000)
        async with start_service() as service:
            await rank.register(service.url)
            rank.publish_steps(2)
            rank.publish(events=[{"type": "exit", "details": '{"reason": "completed", "last_step": 4}'}])
            rank.state = "draining"
            await eventually(lambda: service.rows("SELECT 1 FROM runs_history WHERE state = 'completed'"))

    assert [{"state": "completed"}] == service.rows("SELECT state FROM runs")
    assert [{"above": 2}] == service.rows(f"SELECT count(*) AS above FROM scalars WHERE ordinal > {before}")


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


async def test_hostile_names_are_stored_unchanged(start_service, fake_rank, eventually):
    names = ["../../etc", "a=b/c", "123", 'it\'s "quoted"; DROP TABLE runs', "学习 🙂", " ", "%2e", "a\nb"]
    async with start_service() as service:
        for name in names:
            async with fake_rank(run=name) as rank:
                await rank.register(service.url)
                rank.publish_steps(2)
                await eventually(lambda rank=rank: rank.committed == 1)

    assert sorted(names) == sorted(row["run"] for row in service.rows("SELECT DISTINCT run FROM scalars"))
    assert sorted(names) == sorted(row["run"] for row in service.rows("SELECT run FROM runs"))


async def test_overwritten_records_become_a_gap_event(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service() as service:
        rank.ring = 4
        rank.publish_steps(10)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 9)
        page = (await service.get("/metrics"))[1]
    gap = service.rows("SELECT seq, rank, incarnation, value, details, message FROM events WHERE type = 'gap'")

    assert [6, 7, 8, 9] == [row["seq"] for row in service.rows(LOSSES)]
    assert [(5, 0, "inc-r-0", 6.0)] == [(g["seq"], g["rank"], g["incarnation"], g["value"]) for g in gap]
    assert "6 records lost (seq 0 to 5)" in gap[0]["message"]
    assert 'rankscope_ingest_lost_records_total{run="r"} 6.0' in page


def cut_in_the_middle(rank):
    async def behave(request):
        chosen = rank.window(int(request.query["after"]))
        if not chosen:
            return None
        response = web.StreamResponse(headers=rank.body_headers(chosen, -1) | {"Content-Length": "100000"})
        await response.prepare(request)
        await response.write(b"x" * 50)
        request.transport.close()
        return response

    return behave


def answer_with(status=200, body=b"", **headers):
    def make(rank):
        async def behave(request):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.Response(status=status, body=body, headers=rank.headers() | named)

        return behave

    return make


def chunked(rank):
    async def behave(request):
        response = web.StreamResponse(headers=rank.body_headers(rank.window(-1), -1))
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"\xff\xff\xff\xff\0\0\0\0")
        return response

    return behave


def silent(rank):
    async def behave(request):
        await asyncio.sleep(60)

    return behave


BAD_ANSWERS = {
    "closed in the middle": (cut_in_the_middle, "cut"),
    "text/html": (answer_with(body=b"<html>hello</html>", Content_Type="text/html"), "garbage"),
    "end-of-stream": (
        answer_with(
            body=b"not arrow", Content_Type=ARROW_STREAM, Rankscope_First="0", Rankscope_Last="4", Rankscope_Rows="5"
        ),
        "garbage",
    ),
    "no Content-Length": (chunked, "garbage"),
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
}
"""Expected error text, the response, and the reason that is counted."""


async def test_invalid_response_is_reported_and_stores_nothing(start_service, fake_rank, eventually):
    """Each response comes from a rank of a separate run, at the same time. The faults do not affect each other."""
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(start_service(**{"ingest.timeout_seconds": 0.3}))
        ranks = {}
        for number, (words, (misbehaviour, _)) in enumerate(BAD_ANSWERS.items()):
            ranks[words] = rank = await stack.enter_async_context(fake_rank(run=f"r{number}"))
            rank.publish_steps(5)
            rank.behave = misbehaviour(rank)
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


async def test_body_that_contradicts_its_headers_is_rejected(start_service, fake_rank, eventually, encode):
    async with fake_rank() as rank, start_service() as service:
        rank.publish_steps(5)
        seen = []
        for header, value in (("Rankscope-Rows", "4"), ("Rankscope-Last", "5"), ("Rankscope-First", "1")):

            async def behave(request, header=header, value=value):
                chosen = rank.window(-1)
                return web.Response(body=encode(chosen), headers=rank.body_headers(chosen, -1) | {header: value})

            rank.behave = behave
            before = len(rank.polls)
            await rank.register(service.url)
            await eventually(lambda before=before: len(rank.polls) > before + 2)
            seen += [(target["health"], target["cursor"]) for target in await service.targets()]
        rank.behave = None
        await eventually(lambda: rank.committed == 4)

    assert [("failing", -1)] * 3 == seen
    assert 5 == len(service.rows(LOSSES))


async def test_unreachable_target_is_reported_and_does_not_stop_the_others(
    start_service, fake_rank, eventually, free_port
):
    async with fake_rank() as rank, start_service(**{"runs.refused_after_seconds": 60}) as service:
        lost = fake_rank(run="unreachable")
        lost.registration = dataclasses.replace(lost.registration, url=f"http://127.0.0.1:{free_port}")
        await lost.register(service.url)
        await rank.register(service.url)
        rank.publish_steps(3)
        await eventually(lambda: rank.committed == 2)

        async def refused():
            return [t for t in await service.targets() if t["last_error"] and "connection refused" in t["last_error"]]

        assert "unreachable" == (await eventually(refused))[0]["run"]


async def test_slow_target_does_not_delay_the_others(start_service, fake_rank, eventually):
    patient = {"ingest.timeout_seconds": 120.0}
    async with fake_rank(run="slow") as slow, fake_rank() as rank, start_service(**patient) as service:
        released = asyncio.Event()
        slow.behave = lambda _: released.wait()
        await slow.register(service.url)
        await eventually(lambda: slow.polls)
        await rank.register(service.url)
        rank.publish_steps(3)
        await eventually(lambda: rank.committed == 2)  # the poll of the slow rank never ends
        released.set()


async def test_second_process_with_an_identity_is_rejected_and_the_first_named(start_service, fake_rank):
    async with fake_rank() as first, fake_rank(incarnation="twin") as twin, start_service() as service:
        await first.register(service.url)
        status, text = await twin.register(service.url)

    assert 409 == status
    assert "process 1000 on here" in text


async def test_error_for_a_forbidden_address_names_the_setting(start_service, fake_rank):
    async with start_service() as service:
        far = fake_rank()
        far.registration = dataclasses.replace(far.registration, url="http://192.0.2.7:9400")
        status, text = await far.register(service.url)

    assert 403 == status
    assert "allowed_networks" in text


async def test_other_schema_version_is_rejected_at_registration(start_service, fake_rank):
    async with fake_rank(schema_version=99) as rank, start_service() as service:
        status, text = await rank.register(service.url)

    assert 406 == status
    assert "supported: 1" in text


async def test_token_is_required_and_sent(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service(**{"service.token": "s3cret"}) as service:
        refused = [
            (await rank.register(service.url, token=token))[0] for token in (None, "", "wrong", "s3cre", "s3cret2")
        ]
        pages = [(await service.get(path))[0] for path in ("/metrics", "/sd", "/api/v1/runs", "/healthz")]
        rank.publish_steps(1)
        accepted, _ = await rank.register(service.url, token="s3cret")
        await eventually(lambda: rank.committed == 0)

    assert [401] * 5 + [200] == [*refused, accepted]
    assert [401, 401, 401, 200] == pages
    assert "Bearer s3cret" == rank.requests[0].headers["Authorization"]


async def test_token_with_arbitrary_bytes_is_a_wrong_token(start_service):
    async with start_service(**{"service.token": "s3cret"}) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
        writer.write(b"GET /sd HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        status = await reader.readline()
        writer.close()

    assert b"HTTP/1.1 401 Unauthorized\r\n" == status


EXIT_EVENTS = {
    "surrogate": ('{"reason": "exception", "error": "no file \\udcff.bin"}', "failed", "rank 0: no file ?.bin"),
    "nested": ('{"reason": "completed", "error": ["\\ud800"]}', "completed", None),
    "deep": ("[" * 3000, "stopped", "ended without reporting success"),
    "null": ("null", "stopped", "ended without reporting success"),
}
"""Exit events of a rank, and the resulting state and reason of its run."""


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


@pytest.mark.parametrize("ts", [2**62, -(2**62), 253_402_300_800_000_000])
async def test_time_outside_the_calendar_is_stored(start_service, fake_rank, eventually, ts):
    async with fake_rank() as rank, start_service() as service:
        rank.publish_steps(3)
        rank.records[1]["ts"] = ts
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 2)

    assert [{"seq": 1}] == service.rows(f"SELECT seq FROM scalars WHERE epoch_us(ts) = {ts}")


async def test_another_process_at_the_address_ends_the_old_target(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service() as service:
        await rank.register(service.url)
        rank.publish_steps(3)
        await eventually(lambda: rank.committed == 2)
        rank.registration = dataclasses.replace(rank.registration, incarnation="next", launch_id="relaunched")
        rank.records, rank.head, rank.committed, rank.lease = {}, -1, -1, None
        rank.publish_steps(2)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 1)

    rows = service.rows("SELECT attempt, incarnation, seq FROM scalars ORDER BY attempt, seq")
    assert [(0, "inc-r-0", n) for n in range(3)] + [(1, "next", n) for n in range(2)] == [
        tuple(r.values()) for r in rows
    ]


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


async def test_poke_causes_an_early_poll(start_service, fake_rank, eventually):
    import aiohttp

    async with fake_rank() as rank, start_service(**{"ingest.poll_seconds": 30.0}) as service:
        await rank.register(service.url)
        rank.publish_steps(1)

        async def poke(incarnation):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{service.url}/api/v1/poke", json={"incarnation": incarnation}) as response,
            ):
                return response.status

        async def polled():
            await poke(rank.registration.incarnation)
            return rank.polls

        await eventually(polled, seconds=5)

        assert [404, 204] == [await poke("unknown"), await poke(rank.registration.incarnation)]


@pytest.mark.thorough
@pytest.mark.parametrize("is_failing", [True, False])
async def test_pokes_cause_at_most_four_extra_polls_per_second(start_service, fake_rank, eventually, is_failing):
    import aiohttp

    changes = {"ingest.poll_seconds": 60.0, "ingest.max_backoff_seconds": 60.0}
    async with fake_rank() as rank, start_service(**changes) as service, aiohttp.ClientSession() as session:
        if is_failing:
            rank.behave = answer_with(500)(rank)
        await rank.register(service.url)
        poke = {"incarnation": rank.registration.incarnation}

        async def poked():
            async with session.post(f"{service.url}/api/v1/poke", json=poke) as response:
                assert 204 == response.status
            return len(rank.polls) >= 6

        await eventually(poked)
        took = rank.polls[5] - rank.polls[0]

    assert 5 * 0.25 <= took + 0.1  # polls are recorded at their arrival, shortly after they were sent


@pytest.mark.usual(2)
@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("path", ["register", "poke"])
async def test_compressed_body_is_a_bad_request(start_service, encoding, path):
    import aiohttp

    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with start_service() as service, aiohttp.ClientSession() as session:
        async with session.post(f"{service.url}/api/v1/{path}", data=b"not compressed", headers=headers) as response:
            status, text = response.status, await response.text()
        after, _ = await service.get("/healthz")

    assert (400, 200) == (status, after)
    assert "Content-Encoding" in text


async def test_discovery_lists_live_ranks_for_prometheus(start_service, fake_rank):
    async with fake_rank(run="a b") as rank, start_service() as service:
        await rank.register(service.url)
        _, text = await service.get("/sd")

    address = rank.registration.url.removeprefix("http://")
    assert text == f'[{{"targets": ["{address}"], "labels": {{"job": "rankscope", "instance": "a b/0"}}}}]'


async def test_service_pages_show_the_status(start_service, fake_rank, eventually):
    async with fake_rank(planned_steps=100) as rank, start_service() as service:
        await rank.register(service.url)
        rank.publish_steps(4)
        await eventually(lambda: rank.committed == 3)

        async def running():
            return (await service.run_state())["state"] == "running"

        await eventually(running)
        state = await service.run_state()
        metrics = (await service.get("/metrics"))[1]
        health = await service.get("/healthz")
        missing = await service.get("/nowhere")

    assert (3, 100, 3.0, 0) == (state["step"], state["planned_steps"], state["loss"], state["lag_records"])
    assert state["rows_stored"] >= 4
    for line in (
        'rankscope_run_state{run="r",state="running"} 1.0',
        'rankscope_ingest_lag_records{rank="0",run="r"} 0.0',
        "rankscope_ingest_records_total 4.0",
        'rankscope_ingest_targets{health="up"} 1.0',
        'rankscope_run_ranks_missing{run="r"} 0.0',
    ):
        assert line in metrics
    assert (200, '{"status": "ok"}') == health
    assert 404 == missing[0]
    assert "/api/v1/targets" in missing[1]


async def out_of_reach(request):
    await asyncio.sleep(60)


async def test_records_lost_with_a_dead_process_are_counted(start_service, fake_rank, eventually):
    """Its last heartbeat reported records that were not polled."""
    async with fake_rank() as rank, fake_rank(run="other") as other, start_service() as service:
        for one in (rank, other):
            await one.register(service.url)
            one.publish_steps(5)
        await eventually(lambda: rank.committed == other.committed == 4)
        rank.behave = out_of_reach
        await eventually(lambda: rank.requests[-1].query["after"] == "4")
        rank.publish_steps(10)
        await rank.register(service.url)
        await rank.die()
        await eventually(lambda: service.snapshots and "failed" in [run.state for run in service.snapshots[-1].runs])
        other.publish_steps(5)
        await eventually(lambda: other.committed == 9)
    gap = service.rows("SELECT seq, value FROM events WHERE type = 'gap'")

    assert [{"seq": None, "value": 10.0}] == gap
    assert {"ok"} == {snapshot.degraded or "ok" for snapshot in service.snapshots}


async def test_dead_process_is_no_longer_polled(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service() as service:
        await rank.register(service.url)
        rank.publish_steps(1)
        await eventually(lambda: rank.committed == 0)
        await rank.die()

        async def health():
            return (await service.targets())[0]["health"] == "gone"

        await eventually(health)
        page = (await service.get("/metrics"))[1]
        await eventually(lambda: service.snapshots[-1].targets == 0)
        for _ in range(3):  # longer than any pause between polls
            shown = len(service.snapshots)
            await eventually(lambda shown=shown: len(service.snapshots) > shown)
        later = (await service.get("/metrics"))[1]

    def refusals(text):
        return [line for line in text.splitlines() if 'reason="refused"' in line]

    assert refusals(page) == refusals(later)
    assert [] == [run for run in service.snapshots[-2:] if run.targets]


def last_stored(service) -> int:
    with connect(service.store) as connection:
        return connection.query("SELECT max(seq) AS last FROM scalars").to_pylist()[0]["last"]


@pytest.mark.thorough
async def test_pending_rows_are_not_polled_again_when_a_process_returns(start_service, fake_rank, eventually):
    slow = {"runs.failed_after_seconds": 1.0, "ingest.flush_after_seconds": 3600.0}
    async with fake_rank() as rank, start_service(**slow) as service:
        await rank.register(service.url)
        rank.publish_steps(1)
        await eventually(lambda: rank.requests and rank.requests[-1].query["after"] == "0")
        rank.behave = out_of_reach

        async def gone():
            return (await service.targets())[0]["health"] == "gone"

        async def read_up_to(seq):
            await rank.register(service.url)  # a heartbeat: here, 1 s without one is the end
            return rank.requests[-1].query["after"] == seq

        await eventually(gone)  # this flushes without a report to the rank
        rank.behave = None
        await rank.register(service.url)
        rank.publish_steps(5)
        await eventually(lambda: read_up_to("5"))
        rank.behave = out_of_reach
        await eventually(gone)
        rank.behave = None
        seen = len(rank.requests)
        before = last_stored(service)
        await rank.register(service.url)
        await eventually(lambda: len(rank.requests) > seen + 1)
        asked = rank.requests[seen].query
        behind = last_stored(service)  # a flush may happen at the same time

    assert "5" == asked["after"]
    assert before <= int(asked["committed"]) <= behind
    assert list(range(6)) == [row["seq"] for row in service.rows(LOSSES)]


@pytest.mark.thorough
async def test_process_that_was_unreachable_for_long_undoes_its_lost_records(
    start_service, fake_rank, eventually, monkeypatch
):
    """After a network failure of minutes, the rank was removed. It comes back with all its records."""
    monkeypatch.setattr(run_monitor, "REMEMBER_SECONDS", 0.5)
    async with fake_rank() as rank, start_service(**{"runs.failed_after_seconds": 1.0}) as service:
        await rank.register(service.url)
        rank.publish_steps(5)
        await eventually(lambda: rank.committed == 4)
        rank.behave = out_of_reach
        await eventually(lambda: rank.requests[-1].query["after"] == "4")

        async def forgotten():
            return not await service.targets()

        await eventually(forgotten)
        rank.behave = None
        rank.publish_steps(5)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 9)

        async def runs_on():
            state = await service.run_state()
            return ("running", 0) == (state["state"], state["records_lost"])

        await eventually(runs_on)

    assert list(range(10)) == [row["seq"] for row in service.rows(LOSSES)]


async def test_lost_records_are_undone_when_they_arrive(start_service, fake_rank, eventually):
    async with fake_rank() as rank, start_service(**{"runs.failed_after_seconds": 1.0}) as service:
        await rank.register(service.url)
        rank.publish_steps(5)
        await eventually(lambda: rank.committed == 4)
        rank.behave = out_of_reach
        await eventually(lambda: rank.requests[-1].query["after"] == "4")
        rank.publish_steps(5)
        await rank.register(service.url)

        async def failed():
            return (await service.run_state())["records_lost"] == 5

        await eventually(failed)
        rank.behave = None
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 9)

        async def runs_on():
            state = await service.run_state()
            return ("running", 0) == (state["state"], state["records_lost"])

        await eventually(runs_on)
    gaps = service.rows("SELECT value FROM events WHERE type = 'gap' ORDER BY ordinal")

    assert list(range(10)) == [row["seq"] for row in service.rows(LOSSES)]
    assert [{"value": 5.0}, {"value": -5.0}] == gaps
    with connect(service.store) as connection:
        assert 0 == summary(connection, "r").lost_records


async def test_fault_in_the_update_of_runs_does_not_stop_other_jobs(start_service, fake_rank, eventually, monkeypatch):
    checks: list[str] = []

    def fail(_self):
        raise TypeError("not foreseen")

    monkeypatch.setattr(run_monitor.RunMonitor, "update_runs", fail)
    monkeypatch.setattr(StallHandler, "check", lambda _self: checks.append("checked"))
    async with fake_rank() as rank, start_service() as service:
        await rank.register(service.url)
        await eventually(lambda: len(checks) > 1)


async def test_rank_that_cannot_be_drained_does_not_affect_the_others(
    start_service, fake_rank, eventually, monkeypatch
):
    """The service polls the remaining records when it stops."""
    async with fake_rank(world_size=2) as one, fake_rank(rank=1, world_size=2) as other:
        async with start_service() as service:
            for rank in (one, other):
                rank.publish_steps(1)
                await rank.register(service.url)
            await eventually(lambda: one.committed == other.committed == 0)
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
