"""Stalls: requests for stacks, the time of the notification, and the end of the stall."""

import asyncio
import contextlib
import ipaddress
import json
from typing import Any

import pytest
from aiohttp import ClientSession, web
from tests.ingest import builders
from tests.ingest.builders import rank_of, registration
from tests.ingest.servers import serving

from rankscope_contract.model.events import RunState
from rankscope_contract.model.stacks import Collective, FlightRecord, Frame, StackDump, ThreadStack
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.detect.stall_tracker import (
    QUIET_SECONDS,
    WAIT_SECONDS,
    StallTracker,
    parse_stacks_request,
    request_stacks,
)
from rankscope_ingest.notify.announcer import incident_message, resolved_message
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.runs.incident import Incident
from rankscope_ingest.runs.models import Attempt, Health, Liveness
from rankscope_ingest.runs.text import Place
from rankscope_ingest.runs.tracker import RunTracker

KEY = ("r", 0)


def attempt(*, ranks: int = 2, state: RunState = RunState.STALLED, progressed_at: float = 100.0) -> Attempt:
    fields = {"state": state, "last_step": 41, "progressed_at": progressed_at, "reason": "alive, but no step for 300 s"}
    return builders.attempt(map(rank_of, range(ranks)), **fields)


def run_tracker() -> RunTracker:
    """Return a tracker with one registered rank, whose run is stalled after 10 s without a step."""
    limits = {"refused_after_seconds": 1e9, "failed_after_seconds": 1e9, "stalled_after_seconds": 10}
    tracker = RunTracker(RunsSection(**limits, stalled_in_phase_after_seconds=60))
    tracker.registered(registration(), 0, Liveness(last_sign=0), wall=0)
    return tracker


def event(kind: str, details: str, message: str = "") -> Any:
    return [{"run": "r", "type": kind, "message": message, "details": details}]


def stacks(line: int) -> Any:
    thread = ThreadStack(ident=1, is_training=True, frames=(Frame("/job/train.py", line, "main"),))
    return event("stacks", StackDump(reason="hang", threads=(thread,)).to_json())


def flight(seq: int, *, is_pending: bool) -> Any:
    group = {"backend": "gloo", "group": "default_pg"}
    entry = Collective(op="all_reduce", seq=seq, is_pending=is_pending, age_seconds=300.0, **group)
    return event("flight_record", FlightRecord(reason="hang", collectives=(entry,), recorded=1).to_json())


def hang(state: str) -> Any:
    return event("hang", json.dumps({"state": state, "seconds": 240.0}), "no sign of training for 240 s, after step 41")


def add_reports_of_both(tracker: StallTracker, now: float) -> None:
    tracker.add(KEY, 0, stacks(88), now)
    tracker.add(KEY, 0, flight(41, is_pending=True), now)
    tracker.add(KEY, 1, stacks(12), now)
    tracker.add(KEY, 1, flight(40, is_pending=False), now)


def announced(tracker: StallTracker, run: Attempt, seconds: float = QUIET_SECONDS) -> Incident:
    """Return the incident of a stall that is reported at 200 and announced after `seconds`."""
    add_reports_of_both(tracker, 200)
    tracker.check([run], 200)
    (incident,) = tracker.check([run], 200 + seconds).due
    return incident


def test_stall_requests_missing_stacks_once_and_is_announced_once():
    tracker, run = StallTracker(), attempt()
    tracker.add(KEY, 1, stacks(12), 200)
    first = tracker.check([run], 201)

    assert [(KEY, (0,))] == first.to_request
    assert ([], []) == (tracker.check([run], 202).to_request, first.due)

    add_reports_of_both(tracker, 203)

    assert [] == tracker.check([run], 203 + QUIET_SECONDS / 2).due
    (incident,) = tracker.check([run], 203 + QUIET_SECONDS).due
    assert [] == tracker.check([run], 300).due
    assert (
        "rank 1 never entered all_reduce 41 of default_pg; rank 0 is in it since 300 s, called at train.py[88]",
        "rank 1 at train.py:12 in main; its last collective was all_reduce 40",
        "rank 0 in all_reduce seq 41 (gloo, default_pg), called at train.py:88 in main",
    ) == incident.places
    assert 1 == incident.first.rank
    assert "RunStalled:0:41:r" == incident.key


def test_rank_without_stacks_delays_the_message_by_the_wait_time():
    tracker, run = StallTracker(), attempt()
    tracker.add(KEY, 0, stacks(88), 200)
    tracker.check([run], 201)
    tracker.add_refusal(KEY, 1, "no response: C code", 205)

    assert [] == tracker.check([run], 200 + WAIT_SECONDS).due
    (incident,) = tracker.check([run], 201 + WAIT_SECONDS).due
    assert "rank 1 sent no stacks: no response: C code" == incident.places[-1]


def test_hang_report_of_one_rank_is_a_stall_while_others_make_steps():
    tracker = StallTracker()
    tracker.add(KEY, 1, hang("began"), 200)
    tracker.add(KEY, 1, stacks(12), 200)
    run = attempt(state=RunState.RUNNING, progressed_at=250)
    tracker.check([run], 251)
    (incident,) = tracker.check([run], 251 + WAIT_SECONDS).due

    assert "rank 1: no sign of training for 240 s, after step 41" == incident.first.message
    assert "rank 1 at train.py:12 in main" == incident.places[0]

    tracker.add(KEY, 1, hang("ended"), 270)
    run.last_step = 42

    assert [(incident, True)] == tracker.check([run], 271).over
    assert [] == tracker.check([run], 272).over


def test_process_that_replaces_a_hanging_one_ends_the_stall():
    tracker, run = StallTracker(), attempt(state=RunState.RUNNING)
    tracker.add(KEY, 0, hang("began"), 200)
    incident = announced(tracker, run, WAIT_SECONDS)
    run.ranks[0] = rank_of(0, incarnation="next", liveness=Liveness(last_sign=260), known_since=260)
    run.last_step = 42

    assert [(incident, True)] == tracker.check([run], 261).over


def test_stacks_from_before_the_last_step_are_requested_again():
    tracker, run = StallTracker(), attempt(progressed_at=150)
    add_reports_of_both(tracker, 149)

    assert [(KEY, (0, 1))] == tracker.check([run], 450).to_request


@pytest.mark.parametrize(
    ("state", "last_step", "has_continued"),
    [
        *((RunState.RUNNING, 42, True), (RunState.COMPLETED, 50, True), (RunState.COMPLETED, 41, False)),
        *((RunState.STOPPED, 42, False), (RunState.FAILED, 41, False)),
    ],
)
def test_end_of_a_stall_reports_whether_training_continued(state, last_step, has_continued):
    tracker, run = StallTracker(), attempt()
    incident = announced(tracker, run)
    run.state, run.last_step = state, last_step

    assert [(incident, has_continued)] == tracker.check([run], 200 + 2 * QUIET_SECONDS).over


def test_restored_stall_is_not_announced_again_but_resolved():
    run = attempt()
    incident = announced(StallTracker(), run)
    tracker = StallTracker([incident])

    assert ([], []) == ((actions := tracker.check([run], 300)).due, actions.to_request)
    run.state, run.ranks[0].last_step, run.ranks[0].stepped_at = RunState.RUNNING, 20, 301.0
    assert [(incident, True)] == tracker.check([run], 301).over


def test_interrupted_hang_is_over_only_when_the_run_has_ended():
    """The first rank exits some seconds before the other one, and reports of the hang end with the process."""
    tracker, run = StallTracker(), attempt(state=RunState.RUNNING)
    tracker.add(KEY, 0, hang("began"), 200)
    tracker.add(KEY, 1, hang("began"), 200)
    incident = announced(tracker, run, WAIT_SECONDS)
    run.ranks[1].exit_reason = "stopped"
    tracker.add(KEY, 0, hang("ended"), 220)  # the script saves a checkpoint before it exits

    assert [] == tracker.check([run], 220).over
    run.ranks[0].exit_reason = "stopped"
    assert [] == tracker.check([run], 221).over
    run.state = RunState.STOPPED
    assert [(incident, False)] == tracker.check([run], 222).over
    assert [] == tracker.check([run], 223).over


def test_malformed_details_are_ignored():
    tracker, run = StallTracker(), attempt(ranks=1)
    for kind in ("stacks", "flight_record", "hang"):
        for details in ("", "[]", '{"threads": 3}', "no json", '{"state": 7}'):
            tracker.add(KEY, 0, event(kind, details), 200)
    tracker.check([run], 201)
    (incident,) = tracker.check([run], 201 + WAIT_SECONDS).due

    assert ("rank 0 sent no stacks: no response",) == incident.places


def test_texts_of_the_notifications_of_a_stall():
    incident = announced(StallTracker(), attempt())
    place = Place(store="/data/history", url="http://service:9470")
    began, ended = incident_message(incident, place=place), resolved_message(incident, has_continued=True)
    stopped = resolved_message(incident, has_continued=False, place=place)

    assert "[critical] r: RunStalled, rank 1, step 41" == began.title
    assert (
        """\
run: r (attempt 0)
rank: 1
step: 41
message: alive, but no step for 300 s
cause: rank 1: it never entered all_reduce 41 of default_pg, in which rank 0 waits (flight records)
where:
  rank 1 never entered all_reduce 41 of default_pg; rank 0 is in it since 300 s, called at train.py[88]
  rank 1 at train.py:12 in main; its last collective was all_reduce 40
  rank 0 in all_reduce seq 41 (gloo, default_pg), called at train.py:88 in main
details: rankscope stacks r --service http://service:9470
page: http://service:9470/runs/r/incidents/RunStalled%3A0%3A41%3Ar
incident: RunStalled:0:41:r"""
        == began.body
    )
    run, key = "run: r (attempt 0)\n", "\nincident: RunStalled:0:41:r"
    assert "[resolved] r: RunStalled, training continues" == ended.title
    assert f"{run}Training continues. The last step before the stall was 41.{key}" == ended.body
    assert "[resolved] r: RunStalled, the run ended" == stopped.title
    details = "\ndetails: rankscope summary r --store /data/history"
    assert f"{run}The run ended. The last step before the stall was 41.{details}{key}" == stopped.body
    assert began.key != ended.key


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"run": 3}', b'{"run": "r", "ranks": [true]}', b'{"run": "r", "ranks": 1}']
)
def test_malformed_stacks_request_is_rejected_with_the_valid_form(body):
    with pytest.raises(RegistrationError, match="send a JSON object"):
        parse_stacks_request(body)


def test_stacks_request_names_a_run_and_optionally_ranks():
    assert ("r", None) == parse_stacks_request(b'{"run": "r"}')
    assert ("r", [0, 3]) == parse_stacks_request(b'{"run": "r", "ranks": [0, 3]}')


def test_records_of_the_last_step_are_no_progress():
    """Stacks and hangs have the number of the last step. Otherwise each report would end its own stall."""
    tracker = run_tracker()
    tracker.stepped(KEY, 0, 41, now=1)
    tracker.stepped(KEY, 0, 41, now=9)
    tracker.tick(11, wall=0)

    assert RunState.STALLED is tracker.get(KEY).state
    tracker.stepped(KEY, 0, 40, now=12)  # a step may rewind
    tracker.tick(13, wall=0)
    assert RunState.RUNNING is tracker.get(KEY).state


# Requests for the stacks of ranks over real HTTP: responses, errors and timeouts.


def target(rank, url, **more):
    who = builders.registration(rank=rank, world_size=8, host="node", pid=70 + rank, url=url)
    return builders.target(who, **more)


@pytest.fixture
async def serve():
    """Return a function that serves a handler of POST /stacks on loopback and returns its URL."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler):
            return f"http://{await stack.enter_async_context(serving(web.post('/stacks', handler)))}"

        yield start


@pytest.fixture
async def fetcher():
    networks = [ipaddress.ip_network("127.0.0.0/8")]
    async with Fetcher(networks=networks, token="secret", timeout_seconds=0.5) as made:
        yield made


async def test_live_ranks_receive_the_token_and_answers_are_sorted_by_rank(serve, fetcher):
    asked = []

    async def answer(request):
        asked.append(request.headers["Authorization"])
        return web.json_response({"stacks": {"threads": []}})

    url = await serve(answer)
    targets = [target(2, url), target(0, url), target(1, url, health=Health.GONE)]
    answers = await request_stacks(fetcher.stacks, targets, KEY, None)

    assert [(0, 70), (2, 72)] == [(each.rank, each.pid) for each in answers]
    assert [{"rank": 0, "host": "node", "pid": 70, "stacks": {"threads": []}}] == [
        each.to_document() for each in await request_stacks(fetcher.stacks, targets, KEY, [0, 1, 5])
    ]
    assert {"Bearer secret"} == set(asked)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        *((403, "set RANKSCOPE_TOKEN", "status 403: set RANKSCOPE_TOKEN"), (401, "", "the rank requires a token")),
        *((200, "no json", "are not valid JSON"), (200, "[1]", "are not a JSON object")),
        (302, "", "redirects are not followed"),
    ],
)
async def test_answer_of_a_rank_without_stacks_contains_the_reason(serve, fetcher, status, body, words):
    async def answer(_):
        return web.Response(status=status, text=body, headers={"Location": "http://127.0.0.1:1/"})

    (given,) = await request_stacks(fetcher.stacks, [target(3, await serve(answer))], KEY, None)

    assert words in given.to_document()["error"]
    assert None is given.document


async def test_rank_that_times_out_delays_no_other_rank(serve, fetcher):
    ended = asyncio.Event()

    async def never(_):
        await ended.wait()
        return web.Response()

    async def immediate(_):
        return web.Response(text=json.dumps({"stacks": 1}))

    ranks = [target(rank, await serve(answer)) for rank, answer in enumerate((never, immediate))]
    hung, healthy = await request_stacks(fetcher.stacks, ranks, KEY, None)
    ended.set()  # the server waits for its last response

    assert "C code may hold its interpreter" in str(hung.error)
    assert {"stacks": 1} == healthy.document


async def test_stacks_are_requested_only_in_allowed_networks(fetcher):
    (given,) = await request_stacks(fetcher.stacks, [target(0, "http://192.0.2.1:80")], KEY, None)

    assert "allowed_networks" in str(given.error)


@pytest.mark.parametrize(
    ("settings", "status"),
    [({}, 404), ({"service.listen": "0.0.0.0:0", "service.insecure": True}, 403)],
    ids=["loopback", "all addresses"],
)
async def test_service_without_token_sends_stacks_only_on_loopback(start_service, settings, status):
    """The status 404 is that of an unknown run."""
    async with start_service(**settings) as service, ClientSession() as client:
        port = service.url.rpartition(":")[2]
        answer = await client.post(f"http://127.0.0.1:{port}/api/v1/stacks", json={"run": "unknown"})

        assert status == answer.status, await answer.text()
