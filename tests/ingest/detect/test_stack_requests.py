"""Requests for the stacks of ranks over real HTTP: responses, errors and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json

import pytest
from aiohttp import ClientSession, web
from tests.ingest import builders
from tests.ingest.servers import serving

from rankscope_ingest.detect.stall_handler import request_stacks
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.runs.models import Health


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
    """Return a fetcher with a token and a timeout of 0.5 s."""
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
    answers = await request_stacks(fetcher.stacks, targets)

    assert [(0, 70), (2, 72)] == [(each.rank, each.pid) for each in answers]
    assert [{"rank": 0, "host": "node", "pid": 70, "stacks": {"threads": []}}] == [
        each.to_document() for each in await request_stacks(fetcher.stacks, targets, [0, 1, 5])
    ]
    assert {"Bearer secret"} == set(asked)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (403, "set RANKSCOPE_TOKEN", "status 403: set RANKSCOPE_TOKEN"),
        (401, "", "the rank requires a token"),
        (200, "no json", "are not valid JSON"),
        (200, "[1]", "are not a JSON object"),
        (302, "", "redirects are not followed"),
    ],
)
async def test_answer_of_a_rank_without_stacks_contains_the_reason(serve, fetcher, status, body, words):
    async def answer(_):
        return web.Response(status=status, text=body, headers={"Location": "http://127.0.0.1:1/"})

    (given,) = await request_stacks(fetcher.stacks, [target(3, await serve(answer))])

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
    hung, healthy = await request_stacks(fetcher.stacks, ranks)
    ended.set()  # the server waits for its last response

    assert "C code may hold its interpreter" in str(hung.error)
    assert {"stacks": 1} == healthy.document


async def test_stacks_are_requested_only_in_allowed_networks(fetcher):
    (given,) = await request_stacks(fetcher.stacks, [target(0, "http://192.0.2.1:80")])

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
