"""The status page and the API of the same content: golden files, bounded size, hostile names, access, lag and tags."""

import base64
import dataclasses
import json
import os
import re
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest import builders
from tests.ingest.http.statuses import HOSTILE, STARTED, empty, large, run, small, target
from tests.properties import examples
from tests.view.test_site import Reader as PageReader

from rankscope_contract.model.events import RunState
from rankscope_ingest.http.status_page import HEALTH_KINDS, MAX_OBSERVATIONS, MAX_ROWS, MAX_RUNS, LagClock
from rankscope_ingest.http.status_page import page as status_page
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.runs.tags import edit_tags, set_note, set_tags
from rankscope_view.assets import ASSETS
from rankscope_view.pages.format import duration, number, percent
from rankscope_view.pages.rendering import Place
from rankscope_view.site import HEADERS

GOLDEN = Path(__file__).parents[2] / "golden" / "status"


class Reader(PageReader):
    """The reader of all pages, with the visible text apart from the folded text."""

    def __init__(self, text):
        self.folded = []
        super().__init__(text)

    def handle_data(self, data):
        if data.strip() and not {"style", "script"} & set(self.open):
            (self.folded if "details" in self.open else self.words).append(" ".join(data.split()))


def page(status):
    return status_page(Place(is_live=True, has_service=True, assets="0"), status)


def standing_of(*runs, targets=()):
    return dataclasses.replace(empty(), runs=runs, targets=targets)


@pytest.mark.parametrize(("name", "standing"), [("empty", empty), ("small", small)])
def test_page_of_a_fixed_status_equals_the_golden_file(name, standing):
    """RANKSCOPE_UPDATE_GOLDEN=1 writes the file again; then check it in a browser."""
    text, path = page(standing()).replace("><", ">\n<"), GOLDEN / f"{name}.html"
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    assert path.read_text(encoding="utf-8") == text
    Reader(text)


def test_every_state_has_a_color_and_its_name():
    for state in RunState:
        found = page(standing_of(run(state)))
        assert re.search(f'<span class="pill {state}"><svg [^>]*><path [^>]*></svg>{state}</span>', found)

    style = ASSETS["style.css"].read().decode()
    for kind in {*RunState, *HEALTH_KINDS.values()} - {RunState.STOPPED}:  # the colour of all others
        assert f".pill.{kind} {{" in style


def test_hostile_names_are_shown_as_text():
    """Names of runs, tags, hosts and errors can contain any text."""
    texts = {"reason": HOSTILE, "tags": {HOSTILE: HOSTILE}, "note": f"{HOSTILE}\n{HOSTILE}"}
    hostile = run("failed", run=HOSTILE, started_at=STARTED, **texts)
    rank = target(0, run=HOSTILE, host=HOSTILE, url=f"http://{HOSTILE}", last_error=HOSTILE, health="failing")
    exporter = dict.fromkeys(("name", "url", "samples", "lag_seconds", "last_error"), HOSTILE) | {"up": False}
    service = dataclasses.replace(empty().service, reason=HOSTILE, store=HOSTILE, status="degraded")
    whole = dataclasses.replace(standing_of(hostile, targets=[rank]), service=service, exporters=[exporter])
    found = Reader(page(whole))

    assert all(attrs.get("src") for tag, attrs in found.elements if tag == "script")
    assert not {name for _, attrs in found.elements for name in attrs if name.startswith("on") or name == "style"}
    assert found.text.count("<script>alert(1)</script>") >= 12
    assert all(char.isprintable() for char in found.text)


def test_page_loads_only_own_styles_and_scripts_and_works_without_them():
    elements = Reader(page(small())).elements

    assert all(attrs.get(name, "/").startswith("/") for _, attrs in elements for name in ("href", "src"))
    assert not {"style"} & {tag for tag, _ in elements}
    assert ("meta", {"http-equiv": "refresh", "content": "5"}) in elements  # within noscript


def test_degraded_ranks_are_listed_first_and_healthy_ones_are_collapsed():
    text = page(large())
    found = Reader(text)
    shown = " ".join(found.words)

    assert len(text) < 400_000
    assert "no answer within 10 s" in shown
    assert re.search(r"failing.* 1 min 35 s .*pending", shown)  # the one that lags, and then the one to come
    assert "995 up" in " ".join(found.folded)
    assert "1 gone" in " ".join(found.folded)
    assert "node124" not in shown
    assert {"well", "gone"} == {attrs["id"].split("-")[0] for tag, attrs in found.elements if tag == "details"}


def test_ranks_of_earlier_launches_are_listed_with_their_run():
    """A rank may still deliver records while a later launch of its run is active or completed."""
    late = target(0, attempt=1, health="failing", last_error="late")
    found = Reader(page(standing_of(run(attempt=2), targets=[late, target(1, run="forgotten", health="failing")])))

    assert "attempt 2" in found.text
    assert re.search("attempt 1 0 failing .*late .*forgotten earlier launches .*attempt 0 1 failing", found.text)


def test_page_size_is_bounded_and_omitted_rows_are_counted():
    runs = [run("completed", run=f"r{number}", started_at=STARTED + number) for number in range(MAX_RUNS + 30)]
    targets = [target(rank, run=f"r{MAX_RUNS + 29}", health="failing", last_error="x" * 200) for rank in range(2100)]
    text = page(standing_of(*runs, targets=targets))
    found = Reader(text)

    assert len(text) < 2_000_000
    assert MAX_RUNS == sum(tag == "article" for tag, _ in found.elements)
    assert "30 older runs are not shown (30 completed)" in found.text
    assert f"{2100 - MAX_ROWS:,} more are not shown" in found.text
    assert found.text.index("r129") < found.text.index("r128")  # the newest first


def test_degraded_state_is_in_the_title_and_at_the_top():
    trouble = dataclasses.replace(empty().service, status="degraded", reason="the disk is full")
    degraded = page(dataclasses.replace(small(), service=trouble))

    assert "<title>1 failed, 1 running · Rankscope</title>" in page(small())
    assert "<title>degraded · Rankscope</title>" in degraded
    assert "degraded 0.1.0, up 1 d 2 h Degraded. the disk is full last commit" in Reader(degraded).text
    assert '<div role="alert"><div class="verdict critical">' in degraded


@pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
def test_running_run_with_nan_or_infinite_loss_is_not_green(loss):
    bad = {"loss": loss, "nonfinite_loss": "loss"}
    found = page(standing_of(run(**bad), run("completed", **bad, run="a"), run(run="b")))
    bad, healthy, ended = (f"{part}</article>" for part in found.split("</article>")[:3])

    assert "<title>1 with NaN or infinite loss, 2 running · Rankscope</title>" in found
    assert f'<dd><span class="bad">{number(loss)}</span></dd>' in bad
    for part, state, kind in (
        (bad, "running", "failed"),
        (ended, "completed", "completed"),
        (healthy, "running", "running"),
    ):
        assert re.search(f'<span class="pill {kind}"><svg [^>]*><path [^>]*></svg>{state}</span>', part)
        assert f'<rect class="{kind}"' in part
    assert [True, True, False] == ["loss not finite</span>" in part for part in (bad, ended, healthy)]


def test_durations_have_their_two_largest_units():
    shown = {0.04: "0.0 s", 9.94: "9.9 s", 59.6: "1 min", 61: "1 min 1 s", 3600: "1 h", 93_784: "1 d 2 h"}
    shown |= {9.2e18: "over 1,000 years", float("inf"): "∞"}

    assert list(shown.values()) == list(map(duration, shown))


def test_ratio_below_one_is_never_shown_as_100_percent():
    shares = (0.99999, 1.0, 0.0001, 0.125, 260 / 300)
    assert ["99.9 %", "100 %", "0 %", "12.5 %", "86.7 %"] == [percent(share) for share in shares]


# Page and API of a real service.

GOLDEN_API = Path(__file__).parents[2] / "golden" / "status" / "api.txt"
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
        GOLDEN_API.write_text(text, encoding="utf-8")

    assert GOLDEN_API.read_text(encoding="utf-8") == text
    assert HEADERS.items() <= headers.items()
    assert "text/html; charset=utf-8" == headers["Content-Type"]
    shown = ("r&amp;d", "</svg>running</span>", "step 4 of 8, 50 %", "team=<b>ours</b>", "as &lt;before&gt;", "1 up")
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


# The lag: time that published records wait for their commit.


def target_at(head=-1, committed=-1):
    return builders.target(head=head, committed=committed)


def test_observations_are_bounded_and_keep_the_oldest_one():
    rank, clock = target_at(), LagClock()
    for second in range(20_000):
        rank.head = second
        clock.look([rank], float(second))

    assert 20_000.0 == clock.seconds(rank, 20_000.0)
    assert len(clock._observations["i0"]) <= MAX_OBSERVATIONS


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=100))
def test_lag_differs_from_the_exact_one_only_by_dropped_observations(moves):
    """Compared with a list of all observations."""
    rank, clock, seen = target_at(), LagClock(), []
    for now, (published, stored) in enumerate(moves):
        rank.head += published
        clock.look([rank], float(now))
        seen.append((rank.head, float(now)))
        rank.committed = min(rank.head, rank.committed + stored)
        waiting = [at for head, at in seen if head > rank.committed]
        assert clock.seconds(rank, now + 1.0) == (now + 1.0 - waiting[0] if waiting else 0.0)
