"""Status page and API of a real service: content, access, and expired registrations."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import aiohttp

from rankscope_ingest.status_page.assets import PAGE_HEADERS
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.runs.tags import edit_tags, set_note, set_tags

GOLDEN = Path(__file__).parents[2] / "golden" / "status" / "api.txt"
TOKEN = "open-sesame"


def basic(password):
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


async def document(service, path, **headers):
    status, text = await service.get(path, **headers)
    assert 200 == status, text
    return json.loads(text)


async def test_page_and_api_show_the_same_status(start_service, fake_rank, eventually):
    """The names of the API are in a golden file, because programs use them. RANKSCOPE_UPDATE_GOLDEN=1 writes it."""
    async with fake_rank(run="r&d", planned_steps=8, incarnation="x") as rank, start_service() as service:
        rank.publish_steps(4, ts=1_000_000)
        rank.publish(step=4, ts=2_000_000)
        await rank.deliver(service)
        await eventually(lambda: service.rows("SELECT 1 FROM runs WHERE run = 'r&d' AND state = 'running'"))
        edit_tags(service.store, "r&d", set_tags({"team": "ours"}), sync_to_disk)
        edit_tags(service.store, "r&d", set_note("as <before>"), sync_to_disk)

        async def labelled():  # a slow store is not waited for: labels come a moment later
            return (await document(service, "/api/v1/runs"))[0]["note"]

        await eventually(labelled)
        told = {name: await document(service, f"/api/v1/{name}") for name in ("status", "runs", "targets")}
        async with aiohttp.ClientSession() as session, session.get(service.url + "/service") as answer:
            page, headers = await answer.text(), answer.headers
        metrics, health = (await service.get("/metrics"))[1], await service.get("/healthz")
    (run,), (target,), whole = told["runs"], told["targets"], told["status"]
    text = "".join(
        f"{name}: {' '.join(known)}\n" for name, known in (("status", whole), ("runs", run), ("targets", target))
    )
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")

    assert GOLDEN.read_text(encoding="utf-8") == text
    assert PAGE_HEADERS.items() <= headers.items()
    assert "text/html; charset=utf-8" == headers["Content-Type"]
    shown = ("r&amp;d", ">running</span>", "step 4 of 8, 50 %", "team=ours", "as &lt;before&gt;", "1 up")
    assert [] == [part for part in (*shown, str(service.store)) if part not in page]
    assert ("running", 4, 8, 3.0, 0, {"team": "ours"}, "as <before>") == tuple(
        run[name] for name in ("state", "step", "planned_steps", "loss", "lag_records", "tags", "note")
    )
    for line in (
        'rankscope_run_state{run="r&d",state="running"} 1.0',
        'rankscope_ingest_lag_records{rank="0",run="r&d"} 0.0',
        "rankscope_ingest_records_total 5.0",
        'rankscope_ingest_targets{health="up"} 1.0',
        'rankscope_run_ranks_missing{run="r&d"} 0.0',
    ):
        assert line in metrics
    assert (200, '{"status": "ok"}') == health
    assert run["rows_stored"] >= 4
    assert ("up", 4, 0, 0.0, None) == tuple(
        target[name] for name in ("health", "committed", "lag_records", "lag_seconds", "last_error")
    )
    assert ("ok", None, 1) == (whole["status"], whole["reason"], whole["targets"]["up"])
    assert whole["rows_committed"] >= 5
    assert whole["last_commit_ago_seconds"] < 60


async def test_browser_may_read_with_the_token_as_password_but_not_write(start_service, fake_rank):
    """A browser adds the password to requests of other pages, so that it must permit only reading."""

    async def asked(method, path, **headers):
        body = {"data": "{}"} if method == "POST" else {}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, service.url + path, headers=headers, **body) as answer,
        ):
            return answer.status, answer.headers

    async with start_service(**{"service.token": TOKEN}) as service:
        as_browser = await asked("GET", "/", Accept="text/html,application/xhtml+xml")
        as_program = await asked("GET", "/api/v1/runs")
        shown = [await asked("GET", path, **basic(TOKEN)) for path in ("/", "/api/v1/status", "/metrics")]
        others = (basic("x"), {"Authorization": "Basic !"}, {"Authorization": "Basic"}, basic(""))
        wrong = [(await asked("GET", "/", **headers))[0] for headers in others]
        json_body = {"Content-Type": "application/json"}
        changing = [
            await asked("POST", f"/api/v1/{path}", **basic(TOKEN), **json_body)
            for path in ("poke", "register", "stacks")
        ]
        bearer = await asked("GET", "/", Authorization=f"Bearer {TOKEN}")

    assert (401, True) == (as_browser[0], as_browser[1]["WWW-Authenticate"].startswith("Basic realm="))
    assert (401, "Bearer") == (as_program[0], as_program[1]["WWW-Authenticate"])
    assert [200] * 3 == [status for status, _ in shown]
    assert {"same-origin"} == {headers["Cross-Origin-Resource-Policy"] for _, headers in shown}
    assert not any("Access-Control-Allow-Origin" in headers for _, headers in shown)
    assert [401] * 4 == wrong
    assert [(401, "Bearer")] * 3 == [(status, headers["WWW-Authenticate"]) for status, headers in changing]
    assert 200 == bearer[0]


async def test_expired_registration_is_gone_and_can_return(start_service, fake_rank, eventually):
    """A second process is rejected while the first sends heartbeats. After a refused connection, the target is gone."""
    changes = {"runs.heartbeat_seconds": 5.0, "runs.failed_after_seconds": 30.0, "runs.refused_after_seconds": 1.0}
    async with start_service(**changes) as service, fake_rank() as rank:

        async def is_in(health):
            return [one["health"] for one in await document(service, "/api/v1/targets")] == [health]

        async def runs_again():
            (again,) = await document(service, "/api/v1/runs")
            return (again["state"], again["attempt"]) == ("running", 0)

        await rank.deliver(service, 2)
        async with fake_rank(incarnation="twin") as twin:
            refused = await twin.register(service.url)
        await rank.die()
        await eventually(lambda: is_in("gone"))
        page = (await service.get("/service"))[1]
        discovered = await document(service, "/sd")
        (failed,) = await document(service, "/api/v1/runs")
        await rank.__aenter__()  # the network is back, and with it the process
        returned = await rank.register(service.url)
        await eventually(lambda: is_in("up"))
        await rank.deliver(service, 2)
        await eventually(runs_again)
        stored = service.rows("SELECT seq FROM scalars ORDER BY seq")

    assert 409 == refused[0]
    assert "already has a live rank 0 of launch 'launch': process 1000 on here." in refused[1]
    assert "Give this process another rank or RANKSCOPE_RUN, or end the other process" in refused[1]
    assert "1 gone</summary>" in page
    assert [] == discovered
    assert ("failed", True) == (failed["state"], "rank 0" in failed["reason"])
    assert 200 == returned[0]
    assert [0, 1, 2, 3] == [row["seq"] for row in stored]
